#!/usr/bin/env bash
# Is Gemma in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=gemma-2-9b TP=2 bash examples/gemma/verify.sh
#   MODEL=gemma-2-9b CKPT=runs/x/megatron bash examples/gemma/verify.sh       a converted checkpoint
# A SEQ above sliding_window lets the window show; below it the layers with and without are alike.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
