#!/usr/bin/env bash
# DeepSeek from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=Moonlight-16B-A3B bash examples/deepseek/convert.sh                            MODEL -> OUT/megatron
#   MODEL=Moonlight-16B-A3B CKPT=runs/x/checkpoints bash examples/deepseek/convert.sh    CKPT -> OUT/hf
# The checkpoint's layer for multi-token prediction (V3: layer 61) is not converted; FP8 weights must be made bf16 first.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
