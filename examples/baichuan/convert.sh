#!/usr/bin/env bash
# Baichuan from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=Baichuan2-13B-Base bash examples/baichuan/convert.sh                            MODEL -> OUT/megatron
#   MODEL=Baichuan2-13B-Base CKPT=runs/x/checkpoints bash examples/baichuan/convert.sh    CKPT -> OUT/hf
# 13B is known by a config.json without max_position_embeddings, Baichuan2 by its vocabulary of 125696. W_pack is cut by heads.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
