#!/usr/bin/env bash
# Continue the pre-training of OLMo 2 (1B, 7B, 13B, 32B) from its Hugging Face folder and back to one.
#   MODEL=OLMo-2-1124-13B DATA=data/corpus_text_document bash examples/olmo/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=OLMo-2-1124-13B bash examples/olmo/pretrain.sh     what 64 ranks would hold; no GPU
# Norms stand after the sublayers, and over all heads of q and k at once: with TP they take one small sum over the ranks a layer.
# 13B: 40 heads, TP 1, 2, 4, 5 or 8; 32B: 40 over 8.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-2} PP=${PP:-1} CP=${CP:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain
