#!/usr/bin/env bash
# a Qwen model from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=Qwen3-8B bash examples/qwen/convert.sh                            MODEL -> OUT/megatron
#   MODEL=Qwen3-8B CKPT=runs/x/checkpoints bash examples/qwen/convert.sh    CKPT -> OUT/hf
# Experts are read one tensor each or fused (gate_up_proj) and leave one tensor each. Qwen (1): mlp.w2 is the gate.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
