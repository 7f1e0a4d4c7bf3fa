#!/usr/bin/env bash
# ChatGLM or GLM-4 from Hugging Face to Megatron, and a trained checkpoint back. No GPU is needed.
#   MODEL=chatglm3-6b-base bash examples/chatglm/convert.sh                            MODEL -> OUT/megatron
#   MODEL=chatglm3-6b-base CKPT=runs/x/checkpoints bash examples/chatglm/convert.sh    CKPT -> OUT/hf
# GLM-4 comes in two forms, with names of its first code (model_type chatglm) and of Transformers (glm, glm4); each keeps its names.
# DRY_RUN=1 shows the mapping only. The result serves every layout: Megatron reshards it when it is loaded.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

convert
