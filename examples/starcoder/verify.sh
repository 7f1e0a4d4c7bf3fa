#!/usr/bin/env bash
# Is StarCoder in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=starcoder2-15b TP=2 bash examples/starcoder/verify.sh
#   MODEL=starcoder2-15b CKPT=runs/x/megatron bash examples/starcoder/verify.sh       a converted checkpoint
# StarCoder's learned positions end at n_positions: SEQ must not pass it.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
