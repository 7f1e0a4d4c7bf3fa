#!/usr/bin/env bash
# Is Falcon in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=falcon-40b TP=2 bash examples/falcon/verify.sh
#   MODEL=falcon-40b CKPT=runs/x/megatron bash examples/falcon/verify.sh       a converted checkpoint
# RW: Transformers 5.24 adds ALiBi twice in eager attention; the default (SDPA) is right.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
