#!/usr/bin/env bash
# Continue the pre-training of a Qwen model (1, 1.5, 2, 2.5, 3, 3.5; MoE with EP) from its Hugging Face folder and back to one.
#   MODEL=Qwen3-8B DATA=data/corpus_text_document bash examples/qwen/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=Qwen3-8B bash examples/qwen/pretrain.sh     what 64 ranks would hold; no GPU
# Qwen2.5-0.5B has 14 heads: TP=1 or 2; Qwen2.5-1.5B 12 and 7B 28: TP up to 4. 30B-A3B: EP=8; 235B-A22B: TP=4 PP=2 EP=8.
# Qwen (1) needs its tokenizer's code: EXTRA=--trust-remote-code.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-2} PP=${PP:-1} CP=${CP:-1} EP=${EP:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain
