#!/usr/bin/env bash
# StarCoder from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=starcoder2-15b bash examples/starcoder/convert.sh                            MODEL -> OUT/megatron
#   MODEL=starcoder2-15b CKPT=runs/x/checkpoints bash examples/starcoder/convert.sh    CKPT -> OUT/hf
# StarCoder's c_attn is one head's keys and values after all queries; its masks (attn.bias) are no weights and are left out.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
