#!/usr/bin/env bash
# Is gpt-oss in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=gpt-oss-20b TP=2 bash examples/gpt_oss/verify.sh
#   MODEL=gpt-oss-20b CKPT=runs/x/megatron bash examples/gpt_oss/verify.sh       a converted checkpoint
# The router must send a token to the same experts in both: run it in DTYPE=fp32. EP=2 cuts the experts over the same ranks.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
