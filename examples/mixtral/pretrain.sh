#!/usr/bin/env bash
# Continue the pre-training of Mixtral from its Hugging Face folder and back to one.
#   MODEL=Mixtral-8x7B-v0.1 DATA=data/corpus_text_document bash examples/mixtral/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=Mixtral-8x7B-v0.1 bash examples/mixtral/pretrain.sh     what 64 ranks would hold; no GPU
# 8 experts: EP divides 8. 8x22B: TP=2 PP=8. The load balance of the original is not part of its weights; the coefficient below
# is Megatron's: config.json's router_aux_loss_coef c is c * top-k / layers here.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-1} PP=${PP:-4} EP=${EP:-8} LR=${LR:-5e-6}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
