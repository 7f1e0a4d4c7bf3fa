#!/usr/bin/env bash
# Continue the pre-training of Galactica and OPT from its Hugging Face folder and back to one.
#   MODEL=galactica-30b DATA=data/corpus_text_document bash examples/galactica/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=galactica-30b bash examples/galactica/pretrain.sh     what 64 ranks would hold; no GPU
# Learned positions, kept from row 2 on: SEQ at most 2048. 125M has 12 heads: TP up to 4. 120B: 80 heads, 96 layers, PP=8.
# OPT-350m (a projection of the embeddings, norms after the sublayers) is refused.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-8} PP=${PP:-1} CP=${CP:-1} SEQ=${SEQ:-2048}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain
