# Sourced by the scripts of every family, which say only what is the family's own and call pretrain, convert or verify of this file.
# From the environment: MODEL a Hugging Face folder; DATA a prefix from toolkits.preprocess_data (default: synthetic);
# OUT; GPUS per node (8); NODES (1); NODE_RANK; MASTER host of node 0; PORT; EXTRA more flags of pretrain, the last word.
set -euo pipefail
: "${MODEL:?set MODEL to a Hugging Face folder}"
PYTHON=${PYTHON:-python3} GPUS=${GPUS:-8} NODES=${NODES:-1} NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
OUT=${OUT:-runs/$(basename "$MODEL")} DRY_RUN=${DRY_RUN:-0}
WORLD=$((NODES * GPUS))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

layout() { # the flags of TP, PP, CP, EP and ETP, as far as they are set
    local name
    for name in TP:tensor-model PP:pipeline-model CP:context EP:expert-model ETP:expert-tensor; do
        local size=${name%%:*}
        [ -z "${!size:-}" ] || echo "--${name##*:}-parallel-size ${!size}"
    done
    [ "${TP:-1}" = 1 ] || echo --sequence-parallel
}

data() { # real text where DATA is set
    if [ -n "${DATA:-}" ]; then echo "--data-path $DATA --split 99,1,0"; else echo --mock-data; fi
}

dry_run() { # FLAGS...: check settings, layout, data and weights for WORLD ranks in one process, without a GPU
    "$PYTHON" -m megatron_patch.pretrain --hf-model "$MODEL" "$@" --dry-run --world-size "$WORLD"
}

train() { # FLAGS...
    # shellcheck disable=SC2046,SC2206
    local flags=($(layout) $(data) "$@" ${EXTRA:-})
    if [ "$DRY_RUN" = 1 ]; then dry_run "${flags[@]}"; return; fi
    "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS" --node-rank "$NODE_RANK" \
        --rdzv-backend c10d --rdzv-endpoint "${MASTER:-localhost}:${PORT:-29500}" --rdzv-id "${SLURM_JOB_ID:-job}" \
        -m megatron_patch.pretrain --hf-model "$MODEL" "${flags[@]}"
}

pretrain() { # FLAGS...: the recipe of every family, then what the script adds; goes on from the newest checkpoint in OUT
    train --bf16 \
        --micro-batch-size "${MICRO_BATCH:-1}" --global-batch-size "${GLOBAL_BATCH:-128}" \
        --seq-length "${SEQ:-4096}" --train-iters "${ITERS:-1000}" \
        --lr "${LR:-1e-5}" --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters "${WARMUP:-50}" \
        --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
        --eval-interval 200 --eval-iters 10 --log-interval 1 \
        --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval "${SAVE_EVERY:-200}" \
        --save-hf "$OUT/hf" "$@"
}

convert() { # MODEL -> OUT/megatron, which serves every layout; with CKPT back, CKPT -> OUT/hf; DRY_RUN=1 shows the mapping only
    if [ "$DRY_RUN" = 1 ]; then
        "$PYTHON" -m toolkits.plan "$MODEL"
    elif [ -n "${CKPT:-}" ]; then
        "$PYTHON" -m toolkits.convert megatron-to-hf --ckpt "$CKPT" --hf-ref "$MODEL" --out "$OUT/hf"
    else
        "$PYTHON" -m toolkits.convert hf-to-megatron --hf "$MODEL" --out "$OUT/megatron"
    fi
}

verify() { # MODEL, or with CKPT a converted checkpoint of it, against Transformers, in the layout of TP, PP, CP, EP
    if [ "$DRY_RUN" = 1 ]; then
        train --micro-batch-size 1 --seq-length "${SEQ:-64}" --train-iters 1 --lr 1e-5
        return
    fi
    local words=(--hf "$MODEL" --tp "${TP:-1}" --pp "${PP:-1}" --cp "${CP:-1}" --ep "${EP:-1}" --seq-length "${SEQ:-64}"
                 --dtype "${DTYPE:-fp32}")
    [ "${TP:-1}" = 1 ] || words+=(--sp)
    [ -z "${CKPT:-}" ] || words+=(--ckpt "$CKPT")
    [ "${TRUST:-0}" = 0 ] || words+=(--trust-remote-code)
    [ -z "${PLATFORM:-}" ] || words+=(--platform "$PLATFORM")
    "$PYTHON" -m toolkits.verify "${words[@]}"
}
