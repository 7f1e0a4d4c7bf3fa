#!/usr/bin/env bash
# Continue the pre-training of Gemma 1, 2 and 3 (text) from its Hugging Face folder and back to one.
#   MODEL=gemma-2-9b DATA=data/corpus_text_document bash examples/gemma/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=gemma-2-9b bash examples/gemma/pretrain.sh     what 64 ranks would hold; no GPU
# 2B has 8 heads over 1, Gemma 3 1B 4 over 1 (TP up to 4). Gemma 2 caps scores and logits, slides on every second layer.
# The vocabulary has 256k rows and is tied: with PP the first and the last stage each hold it, so prefer TP.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-2} PP=${PP:-1} CP=${CP:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain
