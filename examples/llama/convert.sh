#!/usr/bin/env bash
# Llama from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=Meta-Llama-3-8B bash examples/llama/convert.sh                            MODEL -> OUT/megatron
#   MODEL=Meta-Llama-3-8B CKPT=runs/x/checkpoints bash examples/llama/convert.sh    CKPT -> OUT/hf
# Old checkpoints with rotary_emb.inv_freq and .bin weights are taken as they are; both rope spellings of config.json are read.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
