#!/usr/bin/env bash
# Continue the pre-training of DeepSeek-V2, V2-Lite, V3, R1 or Moonlight from its Hugging Face folder and back to one.
#   MODEL=Moonlight-16B-A3B DATA=data/corpus_text_document bash examples/deepseek/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=Moonlight-16B-A3B bash examples/deepseek/pretrain.sh     what 64 ranks would hold; no GPU
# V2-Lite and Moonlight: 16 heads, 27 layers, 64 experts, one node. V2: 60 layers, 160 experts, NODES=8 PP=4 EP=16.
# V3 and R1: 61 layers, 256 experts: NODES=32 PP=8 EP=32 EXTRA='--decoder-last-pipeline-num-layers 5'; 671B take 10.7 TB in training.
# The bias that balances V3's experts stays as it is loaded; EXTRA='--moe-router-bias-update-rate 1e-3' moves it.
# Moonlight's tokenizer is code beside the weights: EXTRA=--trust-remote-code runs it.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-1} PP=${PP:-1} CP=${CP:-1} EP=${EP:-8} LR=${LR:-5e-6}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain --moe-token-dispatcher-type alltoall
