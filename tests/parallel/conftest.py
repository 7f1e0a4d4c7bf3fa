"""Tiny HF models on disk with Transformers' own logits beside them, made once per test run."""

import pytest


@pytest.fixture(scope="session")
def zoo(tmp_path_factory):
    """{case: folder}: safetensors, config.json, gradients/ and expected.pt: tokens, labels [b, s], logits [b, s, v], loss, and the
    greedy continuation [1, GREEDY] of the first PROMPT tokens with the gaps between the two best logits."""
    from tests.families import tiny

    return {case: tiny.save_with_answers(case, tmp_path_factory.mktemp(case)) for case in tiny.CASES}
