#!/usr/bin/env bash
# Continue the pre-training of a Qwen model (1.5, 2, 2.5, 3; for the MoE ones set EP) on one node or more, from its Hugging Face folder and back to one.
#   MODEL=Qwen3-8B DATA=data/corpus_text_document bash examples/qwen/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=Qwen3-8B bash examples/qwen/pretrain.sh     what 64 ranks would hold; no GPU
# Run again after a stop it goes on from the newest checkpoint. Variables: see examples/common.sh.
TP=${TP:-2} PP=${PP:-1} CP=${CP:-1} EP=${EP:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

FLAGS=(
    --bf16
    --micro-batch-size "${MICRO_BATCH:-1}" --global-batch-size "${GLOBAL_BATCH:-128}"
    --seq-length "${SEQ:-4096}" --train-iters "${ITERS:-1000}"
    --lr "${LR:-1e-5}" --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters "${WARMUP:-50}"
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --eval-interval 200 --eval-iters 10 --log-interval 1
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval "${SAVE_EVERY:-200}"
    --save-hf "$OUT/hf"
)
train "${FLAGS[@]}"
