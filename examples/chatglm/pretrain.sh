#!/usr/bin/env bash
# Continue the pre-training of ChatGLM2, 3, GLM-4, 4.5 (with CP=1 also ChatGLM-6B, GLM-130B) from its Hugging Face folder and back to one.
#   MODEL=chatglm3-6b-base DATA=data/corpus_text_document bash examples/chatglm/pretrain.sh
#   DRY_RUN=1 NODES=8 MODEL=chatglm3-6b-base bash examples/chatglm/pretrain.sh     what 64 ranks would hold; no GPU
# ChatGLM2 to GLM-4 have 2 key/value heads; with TP above 2 ranks share them. rope_ratio (32k and 128k variants) is read.
# ChatGLM-6B and GLM-130B see a context in both directions: CP=1, SEQ=2048, and every sample holds [gMASK] and bos.
# GLM-4.5 (model_type glm4_moe): a mixture of 128 or 160 experts, EP=8 on a node, and no bidirectional context.
# GLM-130B: 96 heads and 70 layers, TP=8 PP=8 with embedding and loss as a layer each: see examples/bloom/pretrain.sh.
# Its tokenizer is code beside the weights: EXTRA=--trust-remote-code runs it; without a tokenizer in MODEL it is not asked for.
# Run again after a stop it goes on from the newest checkpoint. Variables and recipe: examples/common.sh.
TP=${TP:-2} PP=${PP:-1} CP=${CP:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

pretrain
