#!/usr/bin/env bash
# Is a Qwen model in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=Qwen3-8B TP=2 bash examples/qwen/verify.sh
#   MODEL=Qwen3-8B CKPT=runs/x/megatron bash examples/qwen/verify.sh       a converted checkpoint
# A MoE's router must send a token to the same experts in both: run it in DTYPE=fp32. Qwen (1) has no class in Transformers.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
