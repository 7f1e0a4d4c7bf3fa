#!/usr/bin/env bash
# The same job on a SLURM cluster: one torchrun per node, rendezvous on the first. Submit it from where examples/ lies:
#   MODEL=Meta-Llama-3-8B DATA=data/corpus_text_document sbatch --nodes 8 examples/llama/slurm.sh
#   DRY_RUN=1 NODES=8 MODEL=Meta-Llama-3-8B bash examples/llama/slurm.sh        checks the same job on a laptop
# FAMILY=falcon runs examples/falcon/pretrain.sh instead, and so with every folder beside this one.
# MINUTES=230 saves and stops after so long, ahead of the time limit; submitted again the job goes on from there.
#SBATCH --job-name=llama
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail
script=${EXAMPLES:-${SLURM_SUBMIT_DIR:+$SLURM_SUBMIT_DIR/examples}}
script=${script:-$(dirname "${BASH_SOURCE[0]}")/..}/${FAMILY:-llama}/pretrain.sh
if [ "${DRY_RUN:-0}" = 1 ]; then exec bash "$script"; fi

export GPUS=${SLURM_GPUS_ON_NODE:-8} NODES=$SLURM_JOB_NUM_NODES PORT=$((20000 + SLURM_JOB_ID % 20000))
MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER EXTRA="${MINUTES:+--exit-duration-in-mins $MINUTES} ${EXTRA:-}"
srun --kill-on-bad-exit=1 bash "$script"
