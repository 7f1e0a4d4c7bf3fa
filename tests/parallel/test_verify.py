"""verify passes for the original and fails, naming the layer, for weights that are not: a check that can fail."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from tests.families import tiny
from tests.groups import run_ranks


def convert(folder, out):
    """A Megatron checkpoint of an HF folder, by our converter."""
    subprocess.run([sys.executable, "-m", "toolkits.convert", "hf-to-megatron", "--hf", folder, "--out", out], check=True, timeout=120)
    return str(out)


def test_original_passes_and_a_swap_fails(zoo, tmp_path):
    """Gate and up swapped in layer 2: no shape changes, no round trip sees it; the report names layer 2, the first that departs, and
    fails (B36). In bf16 the tolerance comes from the depth, the argmax agreement is told, and the swap still fails. Mutants: the last
    layer that departs named, a tolerance that no swap exceeds."""
    bad = tmp_path / "bad"
    shutil.copytree(zoo["llama"], bad, ignore=shutil.ignore_patterns("gradients", "expected.pt"))
    weights = load_file(bad / "model.safetensors")
    gate, up = (f"model.layers.2.mlp.{p}_proj.weight" for p in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]
    save_file(weights, bad / "model.safetensors", metadata={"format": "pt"})
    good, swapped = convert(zoo["llama"], tmp_path / "m"), convert(bad, tmp_path / "mbad")
    checkpoints = [[None, False], [good, False], [swapped, False], [good, True], [swapped, True]]
    own, converted, wrong, half, wrong_half = run_ranks(1, "tests.parallel.verify_cases:reports", zoo["llama"], checkpoints)[0]
    for report in (own, converted):
        assert report["passed"] and report["greedy_identical"] and report["first_layer_that_departs"] is None
        assert report["max_logit_difference"] <= 1e-4 and abs(report["loss_hf"] - report["loss_megatron"]) <= 1e-4
        assert report["greedy_smallest_gap"] > 1e-3
    assert not wrong["passed"] and wrong["first_layer_that_departs"] == 2
    assert half["passed"] and half["first_layer_that_departs"] is None and half["argmax_agreement"] >= 0.95
    assert half["tolerance"] == pytest.approx(2**-7 * 8 * 8**0.5 * max(1.0, half["logit_std"]))  # 4 layers, 8 sub-layers
    assert not wrong_half["passed"] and wrong_half["first_layer_that_departs"] == 2


MISTAKES = [
    (["--tp", "3"], "num_attention_heads 4 is not divisible by TP 3"),
    (["--pp", "3"], "4 layers .* cannot be split evenly over PP 3. Use --pp 2.$"),
    (["--ep", "2"], "^--ep 2 needs a mixture-of-experts"),
    (["--sp"], "^--sp needs --tp > 1, found 1"),
    (["--vpp", "2"], "needs --pp > 1, found 1"),
    (["--ckpt", "nowhere"], "nowhere is no Megatron checkpoint"),
    (["--transformer-impl", "te"], "'te' needs Transformer Engine")]


def test_mistakes_are_found_before_ranks_start(zoo):
    """Layout, path and backend mistakes: one line at argument time, in terms of the command's own flags. Mutant: pretrain's flags."""
    found = run_ranks(1, "tests.parallel.verify_cases:mistakes", zoo["llama"], [arguments for arguments, _ in MISTAKES])[0]
    for (arguments, message), error in zip(MISTAKES, found):
        assert error and re.search(message, error) and "parallel-size" not in error, (arguments, error)


def test_a_flag_that_would_not_help_is_not_advised(tmp_path):
    """GLM-130B was released without modeling code: --trust-remote-code has nothing to run."""
    (tmp_path / "config.json").write_text(json.dumps(tiny.raw_config("glm_130b")))
    (error,) = run_ranks(1, "tests.parallel.verify_cases:mistakes", str(tmp_path), [[]])
    assert "has no auto_map" in error[0] and "--trust-remote-code" not in error[0]


# The code that stands beside Baichuan's weights: here the reference model as a class of Transformers.
REMOTE = """
from transformers import PreTrainedModel, PretrainedConfig

from tests.references.baichuan import Baichuan13B


class BaichuanConfig(PretrainedConfig):
    model_type = "baichuan"


class BaichuanForCausalLM(PreTrainedModel):
    config_class = BaichuanConfig

    def __init__(self, config):
        super().__init__(config)
        self.kept = [Baichuan13B(config.to_dict())]
        self.model, self.lm_head = self.kept[0].model, self.kept[0].lm_head
        self.post_init()

    def forward(self, ids):
        return self.kept[0](ids)
"""


@pytest.mark.slow
def test_remote_code_runs_only_when_asked(zoo, tmp_path):
    """A family without a class in Transformers is compared with the code beside its weights, with --trust-remote-code; without the flag,
    or without the code, one line says so and nothing of the folder is run."""
    folder = tmp_path / "baichuan"
    shutil.copytree(zoo["baichuan_13b"], folder, ignore=shutil.ignore_patterns("gradients", "expected.pt"))

    def verify(*flags):
        return subprocess.run([sys.executable, "-m", "toolkits.verify", "--hf", folder, "--new-tokens", "0", "--platform", "cpu", *flags],
                              capture_output=True, text=True, timeout=200, env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "code")})

    bare = verify("--trust-remote-code")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_baichuan.BaichuanConfig", "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_baichuan.py").write_text(REMOTE)
    refused = verify()
    copied = list((tmp_path / "code").rglob("modeling_baichuan.py"))
    passed = verify("--trust-remote-code")
    assert bare.returncode == 1 and "has no auto_map" in bare.stderr
    assert refused.returncode == 1 and "only with --trust-remote-code" in refused.stderr and not copied
    assert passed.returncode == 0 and "PASS" in passed.stdout, passed.stdout + passed.stderr
