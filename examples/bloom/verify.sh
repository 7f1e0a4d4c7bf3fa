#!/usr/bin/env bash
# Is Bloom in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=bloom TP=2 bash examples/bloom/verify.sh
#   MODEL=bloom CKPT=runs/x/megatron bash examples/bloom/verify.sh       a converted checkpoint
# 176B does not fit a host in fp32 (704 GB): verify 560M or 7B1, and check 176B with DRY_RUN=1.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
