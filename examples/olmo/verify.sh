#!/usr/bin/env bash
# Is OLMo 2 in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=OLMo-2-1124-13B TP=2 bash examples/olmo/verify.sh
#   MODEL=OLMo-2-1124-13B CKPT=runs/x/megatron bash examples/olmo/verify.sh       a converted checkpoint
# TP=2 is the layout to look at: the norms of q and k reach over all heads.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
