#!/usr/bin/env bash
# InternLM2 from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=internlm2_5-7b bash examples/internlm/convert.sh                            MODEL -> OUT/megatron
#   MODEL=internlm2_5-7b CKPT=runs/x/checkpoints bash examples/internlm/convert.sh    CKPT -> OUT/hf
# attention.wqkv holds each group's queries, key and value one after another, which is Megatron's own order: nothing moves.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
