#!/usr/bin/env bash
# Continue the pre-training of Falcon (7B, 40B, 180B, Falcon2-11B, RW) from its Hugging Face folder and back to one.
#   MODEL=falcon-40b DATA=data/corpus_text_document bash examples/falcon/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=falcon-40b bash examples/falcon/pretrain.sh     what 64 ranks would hold; no GPU
# 7B has 71 heads, a prime: TP=1 PP=4 (one key/value head). 40B: 128 heads over 8. 180B: 232 heads, 80 layers, PP=8. RW: ALiBi.
# Attention and MLP run side by side on one norm (7B, 11B) or two (40B, 180B).
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-8} PP=${PP:-2} CP=${CP:-1} SEQ=${SEQ:-2048}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain
