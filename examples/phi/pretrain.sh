#!/usr/bin/env bash
# Continue the pre-training of Phi-3, Phi-3.5, Phi-4 and Phi-4-mini from its Hugging Face folder and back to one.
#   MODEL=phi-4 DATA=data/corpus_text_document bash examples/phi/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=phi-4 bash examples/phi/pretrain.sh     what 64 ranks would hold; no GPU
# Phi-3-medium and Phi-4: 40 heads over 10, TP 1, 2 or 5. Phi-3-mini: 32 heads; its window is 2047 tokens. Phi-4-mini: 24 over 8.
# longrope (128k variants): up to original_max_position_embeddings the short factors hold, in longer sequences the long ones.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-2} PP=${PP:-1} CP=${CP:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain
