#!/usr/bin/env bash
# Continue the pre-training of InternLM2 and 2.5 (1.8B, 7B, 20B) from its Hugging Face folder and back to one.
#   MODEL=internlm2_5-7b DATA=data/corpus_text_document bash examples/internlm/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=internlm2_5-7b bash examples/internlm/pretrain.sh     what 64 ranks would hold; no GPU
# 8 key/value heads: TP up to 8. 20B: 48 heads, TP=4 PP=2. Dynamic rope is exact up to max_position_embeddings, longer SEQ is refused.
# Its tokenizer is code beside the weights: EXTRA=--trust-remote-code runs it; without a tokenizer in MODEL it is not asked for.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-2} PP=${PP:-1} CP=${CP:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain
