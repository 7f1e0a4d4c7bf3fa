#!/usr/bin/env bash
# Is Galactica in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=galactica-30b TP=2 bash examples/galactica/verify.sh
#   MODEL=galactica-30b CKPT=runs/x/megatron bash examples/galactica/verify.sh       a converted checkpoint
# Positions end at 2048: SEQ must not pass it.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
