#!/usr/bin/env bash
# Mixtral from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=Mixtral-8x7B-v0.1 bash examples/mixtral/convert.sh                            MODEL -> OUT/megatron
#   MODEL=Mixtral-8x7B-v0.1 CKPT=runs/x/checkpoints bash examples/mixtral/convert.sh    CKPT -> OUT/hf
# Experts are read one tensor each (w1 gate, w3 up, w2 down) or fused, and leave one tensor each.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
