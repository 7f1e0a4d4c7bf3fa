#!/usr/bin/env bash
# OLMo 2 from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=OLMo-2-1124-13B bash examples/olmo/convert.sh                            MODEL -> OUT/megatron
#   MODEL=OLMo-2-1124-13B CKPT=runs/x/checkpoints bash examples/olmo/convert.sh    CKPT -> OUT/hf
# OLMo 1 (model_type olmo, norms without weights) is another family and is refused.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
