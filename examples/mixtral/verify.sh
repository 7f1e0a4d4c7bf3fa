#!/usr/bin/env bash
# Is Mixtral in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=Mixtral-8x7B-v0.1 TP=2 bash examples/mixtral/verify.sh
#   MODEL=Mixtral-8x7B-v0.1 CKPT=runs/x/megatron bash examples/mixtral/verify.sh       a converted checkpoint
# The router must send a token to the same experts in both: run it in DTYPE=fp32. EP=2 cuts the experts over the same ranks.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
