#!/usr/bin/env bash
# Continue the pre-training of gpt-oss from its Hugging Face folder and back to one.
#   MODEL=gpt-oss-20b DATA=data/corpus_text_document bash examples/gpt_oss/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=gpt-oss-20b bash examples/gpt_oss/pretrain.sh     what 64 ranks would hold; no GPU
# 20b: 24 layers, 32 experts, one node. 120b: 36 layers, 128 experts, NODES=8 PP=4 EP=16. 64 heads, 8 of them keys: TP up to 64.
# Attention with sinks writes its scores out, 64 heads x SEQ x SEQ in every layer: TP divides the heads, CP the queries.
# The load balance of the original is not part of its weights: EXTRA='--moe-aux-loss-coeff 1e-3' asks for one, Megatron's.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-1} PP=${PP:-1} CP=${CP:-1} EP=${EP:-8} LR=${LR:-5e-6} SEQ=${SEQ:-2048}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain --moe-token-dispatcher-type alltoall
