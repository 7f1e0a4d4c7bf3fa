#!/usr/bin/env bash
# Continue the pre-training of Mixtral on one node or more, from its Hugging Face folder and back to one.
#   MODEL=Mixtral-8x7B-v0.1 DATA=data/corpus_text_document bash examples/mixtral/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=Mixtral-8x7B-v0.1 bash examples/mixtral/pretrain.sh     what 64 ranks would hold; no GPU
# Run again after a stop it goes on from the newest checkpoint. Variables: see examples/common.sh.
TP=${TP:-1} PP=${PP:-4} EP=${EP:-8}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

FLAGS=(
    --bf16
    --micro-batch-size "${MICRO_BATCH:-1}" --global-batch-size "${GLOBAL_BATCH:-128}"
    --seq-length "${SEQ:-4096}" --train-iters "${ITERS:-1000}"
    --lr "${LR:-5e-6}" --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters "${WARMUP:-50}"
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --eval-interval 200 --eval-iters 10 --log-interval 1
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval "${SAVE_EVERY:-200}"
    --save-hf "$OUT/hf"
)
train "${FLAGS[@]}"
