#!/usr/bin/env bash
# Is DeepSeek in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=Moonlight-16B-A3B TP=2 bash examples/deepseek/verify.sh
#   MODEL=Moonlight-16B-A3B CKPT=runs/x/megatron bash examples/deepseek/verify.sh       a converted checkpoint
# The router must send a token to the same experts in both: run it in DTYPE=fp32. EP=2 cuts the experts over the same ranks.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
