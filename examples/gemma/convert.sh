#!/usr/bin/env bash
# Gemma from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=gemma-2-9b bash examples/gemma/convert.sh                            MODEL -> OUT/megatron
#   MODEL=gemma-2-9b CKPT=runs/x/checkpoints bash examples/gemma/convert.sh    CKPT -> OUT/hf
# Norm weights are stored as w and used as 1 + w (layernorm_zero_centered_gamma): no value changes on the way.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
