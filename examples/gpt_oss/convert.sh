#!/usr/bin/env bash
# gpt-oss from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=gpt-oss-20b bash examples/gpt_oss/convert.sh                            MODEL -> OUT/megatron
#   MODEL=gpt-oss-20b CKPT=runs/x/checkpoints bash examples/gpt_oss/convert.sh    CKPT -> OUT/hf
# The experts of a layer are one tensor in MODEL, gate and up in every second column; in Megatron each expert has its own rows.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
