"""Tiny HF models, indexed text and the platform, made once for the training tests."""

import pytest

MODELS = {"llama": {}, "llama_tied": {}, "qwen3": {}, "qwen3_moe": {}, "bloom": {}, "falcon_40b": {}, "gemma3": {}, "baichuan2": {},
          "qwen3_next": {}, "qwen3_5": {}, "gpt_oss": {}}


@pytest.fixture(scope="session", autouse=True)
def activated():
    from megatron_patch import platform

    platform.activate("cpu")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """{case: folder} of tiny HF models (4 layers, hidden 64, vocabulary 1003)."""
    from tests.families import tiny

    folders = {}
    for case, changes in MODELS.items():
        folder = tmp_path_factory.mktemp(case)
        tiny.save(case, folder, **changes)
        folders[case] = str(folder)
    return folders


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Prefix of an indexed dataset: 80 documents of random ids."""
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = numpy.random.default_rng(0)
    prefix = str(tmp_path_factory.mktemp("data") / "text")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(80):
        document = random.integers(3, 1000, size=random.integers(20, 120))
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix
