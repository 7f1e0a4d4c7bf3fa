#!/usr/bin/env bash
# Falcon from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=falcon-40b bash examples/falcon/convert.sh                            MODEL -> OUT/megatron
#   MODEL=falcon-40b CKPT=runs/x/checkpoints bash examples/falcon/convert.sh    CKPT -> OUT/hf
# config.json of 2023 (RefinedWeb, RefinedWebModel) is read under its old keys and leaves with them.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
