#!/usr/bin/env bash
# Continue the pre-training of StarCoder, SantaCoder (gpt_bigcode) and StarCoder2 from its Hugging Face folder and back to one.
#   MODEL=starcoder2-15b DATA=data/corpus_text_document bash examples/starcoder/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=starcoder2-15b bash examples/starcoder/pretrain.sh     what 64 ranks would hold; no GPU
# StarCoder: one key/value head, held by every TP rank; learned positions, SEQ up to 8192. 15B has 48 heads, 3B 22 (TP 1 or 2).
# StarCoder2: rope and a window of 4096 tokens; 3B 24 heads over 2, 7B 36 over 4 (TP up to 4), 15B 48 over 4.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-4} PP=${PP:-1} CP=${CP:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain
