#!/usr/bin/env bash
# Continue the pre-training of Baichuan and Baichuan2, 7B and 13B from its Hugging Face folder and back to one.
#   MODEL=Baichuan2-13B-Base DATA=data/corpus_text_document bash examples/baichuan/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=Baichuan2-13B-Base bash examples/baichuan/pretrain.sh     what 64 ranks would hold; no GPU
# 13B: ALiBi, 40 heads (TP 1, 2, 4, 5, 8); it has no learned limit of length, 4096 is what it was trained with. 7B: rope, 32 heads.
# Baichuan2 normalises the rows of its head in the forward pass; its z loss is not trained (z_loss_weight must be 0).
# Its tokenizer is code beside the weights: EXTRA=--trust-remote-code runs it; without a tokenizer in MODEL it is not asked for.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-2} PP=${PP:-1} CP=${CP:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain
