#!/usr/bin/env bash
# Galactica from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=galactica-30b bash examples/galactica/convert.sh                            MODEL -> OUT/megatron
#   MODEL=galactica-30b CKPT=runs/x/checkpoints bash examples/galactica/convert.sh    CKPT -> OUT/hf
# q, k and v are fused by heads, weights and biases alike; biases are there or not as config.json's enable_bias says.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
