#!/usr/bin/env bash
# Is Phi in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=phi-4 TP=2 bash examples/phi/verify.sh
#   MODEL=phi-4 CKPT=runs/x/megatron bash examples/phi/verify.sh       a converted checkpoint
# longrope has two tables: verify with a SEQ on either side of original_max_position_embeddings.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
