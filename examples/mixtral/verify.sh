#!/usr/bin/env bash
# Is the model in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=Mixtral-8x7B-v0.1 TP=2 bash examples/mixtral/verify.sh
#   MODEL=Mixtral-8x7B-v0.1 CKPT=runs/x/megatron bash examples/mixtral/verify.sh       a converted checkpoint
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

if [ "$DRY_RUN" = 1 ]; then
    train --micro-batch-size 1 --seq-length "${SEQ:-64}" --train-iters 1 --lr 1e-5
    exit
fi
WORDS=(--hf "$MODEL" --tp "${TP:-1}" --pp "${PP:-1}" --cp "${CP:-1}" --ep "${EP:-1}" --seq-length "${SEQ:-64}" --dtype "${DTYPE:-fp32}")
[ "${TP:-1}" = 1 ] || WORDS+=(--sp)
[ -z "${CKPT:-}" ] || WORDS+=(--ckpt "$CKPT")
[ -z "${PLATFORM:-}" ] || WORDS+=(--platform "$PLATFORM")
"$PYTHON" -m toolkits.verify "${WORDS[@]}"
