#!/usr/bin/env bash
# Continue the pre-training of Bloom (560M to 176B) and BloomZ from its Hugging Face folder and back to one.
#   MODEL=bloom DATA=data/corpus_text_document bash examples/bloom/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=bloom bash examples/bloom/pretrain.sh     what 64 ranks would hold; no GPU
# 176B: 112 heads and 70 layers on 64 ranks, 8 stages: embedding and loss count as a layer each, so that 72 are cut in 8.
# ALiBi has no limit of length; 2048 is what it was trained with. 560M to 7B1: TP=1 or 2, PP=1.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-8} PP=${PP:-8} SEQ=${SEQ:-2048}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

STAGES=()
[ "$PP" = 1 ] || STAGES=(--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split)
pretrain "${STAGES[@]}"
