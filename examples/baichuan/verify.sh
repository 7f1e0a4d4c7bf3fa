#!/usr/bin/env bash
# Is Baichuan in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=Baichuan2-13B-Base TP=2 bash examples/baichuan/verify.sh
#   MODEL=Baichuan2-13B-Base CKPT=runs/x/megatron bash examples/baichuan/verify.sh       a converted checkpoint
# Transformers ships no class for it and verify runs no code of a folder: only DRY_RUN=1 works. The oracle is in tests/references.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
