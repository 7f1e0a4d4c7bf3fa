# Sourced by the scripts of every family: checks what they need, then starts torchrun, or with DRY_RUN=1 a dry run.
# From the environment: MODEL a Hugging Face folder; DATA a prefix from toolkits.preprocess_data (default: synthetic);
# OUT; GPUS per node (8); NODES (1); NODE_RANK; MASTER host of node 0; PORT; EXTRA more flags of pretrain, the last word.
set -euo pipefail
: "${MODEL:?set MODEL to a Hugging Face folder}"
PYTHON=${PYTHON:-python3} GPUS=${GPUS:-8} NODES=${NODES:-1} NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
OUT=${OUT:-runs/$(basename "$MODEL")} DRY_RUN=${DRY_RUN:-0}
WORLD=$((NODES * GPUS))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

layout() { # the flags of TP, PP, CP, EP and ETP, as far as they are set
    local name
    for name in TP:tensor-model PP:pipeline-model CP:context EP:expert-model ETP:expert-tensor; do
        local size=${name%%:*}
        [ -z "${!size:-}" ] || echo "--${name##*:}-parallel-size ${!size}"
    done
    [ "${TP:-1}" = 1 ] || echo --sequence-parallel
}

data() { # real text where DATA is set
    if [ -n "${DATA:-}" ]; then echo "--data-path $DATA --split 99,1,0"; else echo --mock-data; fi
}

dry_run() { # FLAGS...: check settings, layout, data and weights for WORLD ranks in one process, without a GPU
    "$PYTHON" -m megatron_patch.pretrain --hf-model "$MODEL" "$@" --dry-run --world-size "$WORLD"
}

train() { # FLAGS...
    # shellcheck disable=SC2046,SC2206
    local flags=($(layout) $(data) "$@" ${EXTRA:-})
    if [ "$DRY_RUN" = 1 ]; then dry_run "${flags[@]}"; return; fi
    "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS" --node-rank "$NODE_RANK" \
        --rdzv-backend c10d --rdzv-endpoint "${MASTER:-localhost}:${PORT:-29500}" --rdzv-id "${SLURM_JOB_ID:-job}" \
        -m megatron_patch.pretrain --hf-model "$MODEL" "${flags[@]}"
}
