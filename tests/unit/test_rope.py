"""Rotary tables and factors against numbers computed by hand, and both config.json forms."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_patch.rope import Rope, read_rope

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


@pytest.mark.parametrize("scaling, expected", [
    (None, [7.292665e-3, 1.414214e-3, 2.742482e-4, 5.318296e-5, 1.031339e-5]),
    (LLAMA3, [7.292665e-3, 5.248462e-4, 3.428102e-5, 6.647870e-6, 1.289173e-6]),
    ({**LLAMA3, "factor": 32.0}, [7.292665e-3, 4.295568e-4, 8.570255e-6, 1.661967e-6, 3.222933e-7])])
def test_llama3_table(scaling, expected):
    """Case B47: head_dim 16, theta 5e5; entries 3 to 7 for no scaling, factor 8 and factor 32."""
    rope = Rope("llama3" if scaling else "default", 5e5, scaling=scaling or {})
    table, factor = rope.table(16, 131072)
    torch.testing.assert_close(table[3:8], torch.tensor(expected), rtol=2e-6, atol=0)
    assert factor == 1.0


def test_llama3_own_limits_are_honoured():
    """Low, high and original values other than 1, 4, 8192 change the table."""
    base = Rope("llama3", 5e5, scaling=LLAMA3).table(16, 131072)[0]
    for change in (dict(low_freq_factor=2.0), dict(high_freq_factor=8.0), dict(original_max_position_embeddings=1024)):
        assert not torch.equal(base, Rope("llama3", 5e5, scaling={**LLAMA3, **change}).table(16, 131072)[0]), change


def test_yarn_factor():
    """Case B49: factor 4 without betas gives 0.1 ln 4 + 1 = 1.138629 on cos and sin."""
    _, factor = Rope("yarn", scaling=dict(factor=4.0, original_max_position_embeddings=32)).table(16, 128)
    assert factor == pytest.approx(0.1 * math.log(4) + 1, abs=1e-6) == pytest.approx(1.138629, abs=1e-6)


def test_linear_divides_and_dynamic_is_plain_up_to_its_length():
    """Linear: every frequency / factor. Case B50: dynamic equals the plain table up to max_position_embeddings, with a limit."""
    plain, _ = Rope().table(16, 2048)
    torch.testing.assert_close(Rope("linear", scaling=dict(factor=4.0)).table(16, 2048)[0], plain / 4)
    dynamic = Rope("dynamic", scaling=dict(factor=2.0))
    torch.testing.assert_close(dynamic.table(16, 2048)[0], plain)
    assert dynamic.limit(2048) == 2048 and Rope().limit(2048) is None


@pytest.mark.parametrize("length, factors", [(None, [1.0, 2.0]), (8, [1.0, 2.0]), (9, [3.0, 4.0])])
def test_longrope_has_factors_for_two_lengths(length, factors):
    """Up to 8 tokens the short factors divide the table, beyond them the long ones; cos and sin have sqrt(1 + ln 4 / ln 8)."""
    scaling = dict(short_factor=[1.0, 2.0], long_factor=[3.0, 4.0], original_max_position_embeddings=8)
    table, factor = Rope("longrope", scaling=scaling).table(4, 32, length)
    torch.testing.assert_close(table, torch.tensor([1.0, 0.01]) / torch.tensor(factors))
    assert factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(8)), abs=1e-6)


def test_both_config_forms():
    """Case B51: v4 (rope_theta + rope_scaling) and v5 (rope_parameters), and one table repeated per layer type, read the same."""
    v4 = SimpleNamespace(rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2.0})
    v5 = SimpleNamespace(rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0})
    nested = SimpleNamespace(rope_parameters={"full_attention": v5.rope_parameters, "sliding_attention": v5.rope_parameters})
    assert read_rope(v4) == read_rope(v5) == read_rope(nested) == Rope("linear", 1e6, scaling={"factor": 2.0})


@pytest.mark.parametrize("kind", ["proportional", "made_up"])
def test_other_types_are_refused_by_name(kind):
    """An unknown type is never ignored."""
    with pytest.raises(ValueError, match=f"rope type '{kind}' is not supported"):
        read_rope(SimpleNamespace(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}))


def test_tables_that_differ_between_layers_are_refused():
    """Two different tables per layer type: an error, not the first one."""
    two = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ValueError, match="differ between layer types"):
        read_rope(SimpleNamespace(rope_parameters=two))
    found = read_rope(SimpleNamespace(rope_parameters=two), two=True)  # a family that has them
    assert (found.theta, found.sliding.theta, found.parameters()["sliding_attention"]["rope_theta"]) == (1e6, 1e4, 1e4)
