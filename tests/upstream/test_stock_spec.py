"""Stock Megatron-LM builds and runs a model with ``--spec megatron_patch.spec <family>``, through its own parser and builder."""

import importlib.util

import pytest

from tests.groups import run_ranks

FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 128
--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-4 --vocab-size 128
--make-vocab-size-divisible-by 1 --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-rope-fusion --tokenizer-type NullTokenizer""".split()
MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall".split()


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None,
                    reason="the 0.16.1 wheel ships no megatron.training; 0.19.2's is the reference")
@pytest.mark.parametrize("family, more", [("llama", []), ("qwen3_moe", MOE)])
def test_stock_takes_our_spec(family, more):
    """Our norm and attention are in the model that stock builds; the loss is finite and gradients arrive."""
    found = run_ranks(1, "tests.upstream.stock_spec:build", family, FLAGS + more)[0]
    assert found == {"norm": "RMSNorm", "attention": "CoreAttention", "finite": True, "norm_gradient": True}
