#!/usr/bin/env bash
# Is ChatGLM or GLM-4 in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=chatglm3-6b-base TP=2 bash examples/chatglm/verify.sh
#   MODEL=chatglm3-6b-base CKPT=runs/x/megatron bash examples/chatglm/verify.sh       a converted checkpoint
# Transformers has classes for glm, glm4 and glm4_moe, none for model_type chatglm: TRUST=1 runs the code beside the weights. The tests
# hold that family to tests/references.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
