#!/usr/bin/env bash
# Bloom from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=bloom bash examples/bloom/convert.sh                            MODEL -> OUT/megatron
#   MODEL=bloom CKPT=runs/x/checkpoints bash examples/bloom/convert.sh    CKPT -> OUT/hf
# The hub's weights have no 'transformer.' in front of their names; both spellings are read, the export has it.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
