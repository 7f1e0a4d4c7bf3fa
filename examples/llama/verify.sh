#!/usr/bin/env bash
# Is Llama in Megatron what it is in Transformers? Logits, layers, loss and greedy text, in the layout of TP, PP, CP, EP.
#   MODEL=Meta-Llama-3-8B TP=2 bash examples/llama/verify.sh
#   MODEL=Meta-Llama-3-8B CKPT=runs/x/megatron bash examples/llama/verify.sh       a converted checkpoint
# Dynamic rope is exact up to max_position_embeddings only: a longer SEQ is refused.
# It starts its own ranks, one for each of TP x PP x CP. DRY_RUN=1 checks the layout only. Without a GPU: PLATFORM=cpu.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

verify
