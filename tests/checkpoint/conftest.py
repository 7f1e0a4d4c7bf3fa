"""Tiny HF checkpoints on disk and our Megatron checkpoints of them, made once per test run."""

import pytest

CASES = ("llama", "qwen2_tied", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "phi3", "glm", "starcoder2", "deepseek_v2", "deepseek_v3",
         "moonlight", "glm4_moe", "glm4", "gemma2", "olmo2", "bloom", "falcon", "falcon_40b", "falcon_rw", "gpt_bigcode", "opt",
         "baichuan", "baichuan2_13b", "qwen", "chatglm3", "internlm2", "chatglm", "glm_130b", "qwen3_next", "qwen3_5", "qwen3_5_moe",
         "gpt_oss")


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """{case: folder written by save_pretrained}, vocabulary 1003, all tensors random and different."""
    from tests.families import tiny

    root = tmp_path_factory.mktemp("hf")
    for case in CASES:
        tiny.save(case, root / case)
    return {case: root / case for case in CASES}


@pytest.fixture(scope="session")
def megatron(hf, tmp_path_factory):
    """{case: checkpoint root written by our converter}."""
    from megatron_patch.checkpoint import convert

    root = tmp_path_factory.mktemp("megatron")
    for case, folder in hf.items():
        convert.hf_to_megatron(folder, root / case).run()
    return {case: root / case for case in hf}
