"""Tiny HF models on disk with Transformers' own logits beside them, made once per test run."""

import pytest


@pytest.fixture(scope="session")
def zoo(tmp_path_factory):
    """{case: folder}: safetensors, config.json, gradients/ and expected.pt: tokens, labels [b, s], logits [b, s, v], loss, and the
    greedy continuation [1, GREEDY] of the first PROMPT tokens with the gaps between the two best logits."""
    import torch

    from tests.families import tiny

    folders = {}
    for case in tiny.CASES:
        folder = tmp_path_factory.mktemp(case)
        model = tiny.save(case, folder)
        ids = tiny.inputs(case, model)
        with torch.no_grad():
            logits = model(ids).logits
            continuation, gaps = tiny.continuation(model, ids)
        labels = tiny.tokens(seed=6)
        loss = tiny.save_gradients(model, folder / "gradients", ids, labels)
        torch.save({"tokens": ids, "labels": labels, "logits": logits, "loss": loss, "continuation": continuation,
                    "gaps": gaps}, folder / "expected.pt")
        folders[case] = str(folder)
    return folders
