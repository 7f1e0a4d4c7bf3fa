#!/usr/bin/env bash
# Phi from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=phi-4 bash examples/phi/convert.sh                            MODEL -> OUT/megatron
#   MODEL=phi-4 CKPT=runs/x/checkpoints bash examples/phi/convert.sh    CKPT -> OUT/hf
# qkv_proj and gate_up_proj, fused on disk, are cut by heads and by gate and up for each TP rank.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
