#!/usr/bin/env bash
# Hugging Face folder to Megatron checkpoint, and a trained checkpoint back to Hugging Face. No GPU is needed.
#   MODEL=Meta-Llama-3-8B bash examples/llama/convert.sh                      MODEL -> OUT/megatron
#   MODEL=Meta-Llama-3-8B CKPT=runs/x/checkpoints bash examples/llama/convert.sh     CKPT -> OUT/hf
# Without CKPT the result serves every layout: Megatron reshards it when it is loaded. DRY_RUN=1 shows the mapping only.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

if [ "$DRY_RUN" = 1 ]; then
    "$PYTHON" -m toolkits.plan "$MODEL"
elif [ -n "${CKPT:-}" ]; then
    "$PYTHON" -m toolkits.convert megatron-to-hf --ckpt "$CKPT" --hf-ref "$MODEL" --out "$OUT/hf"
else
    "$PYTHON" -m toolkits.convert hf-to-megatron --hf "$MODEL" --out "$OUT/megatron"
fi
