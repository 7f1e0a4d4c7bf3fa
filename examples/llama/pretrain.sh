#!/usr/bin/env bash
# Continue the pre-training of Llama 1 to 3.2, Code Llama, Yi, SmolLM2 or Mistral from its Hugging Face folder and back to one.
#   MODEL=Meta-Llama-3-8B DATA=data/corpus_text_document bash examples/llama/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=Meta-Llama-3-8B bash examples/llama/pretrain.sh     what 64 ranks would hold; no GPU
# 70B and larger: TP=8 PP=8. SmolLM2-135M has 9 heads: TP=1 or 3. Long sequences: CP; Mistral's sliding window holds over CP too.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-2} PP=${PP:-1} CP=${CP:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain
