#!/usr/bin/env bash
# Is Baichuan in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=Baichuan2-13B-Base TP=2 bash examples/baichuan/verify.sh
#   MODEL=Baichuan2-13B-Base CKPT=runs/x/megatron bash examples/baichuan/verify.sh       a converted checkpoint
# Transformers has no class for it: TRUST=1 runs the code beside the weights. The tests hold the family to tests/references.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
