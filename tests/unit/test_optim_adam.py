"""FusedAdam against torch.optim.Adam and AdamW."""

import copy
import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_patch.optim import adam
from megatron_patch.optim.adam import FusedAdam

SHAPES = [(7,), (16, 33), (3, 5, 4), (128, 64)]


def parameters(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(params, step, dtype=None):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype or param.dtype)


def groups(params):
    return [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "lr": 3e-3}]


def train(optimizer, params, start, stop):
    for step in range(start, stop):
        gradients(params, step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + math.sin(step))  # a schedule, as Megatron's OptimizerParamScheduler writes it
        optimizer.step()


def moments(optimizer, params, key):
    return [optimizer.state[param][key] for param in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decoupled", [True, False])
def test_forty_steps_are_bitwise_torch_fused(decoupled, dtype):
    """Parameters and both moments equal torch's fused Adam or AdamW bit for bit after 40 steps of a schedule."""
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    common = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)
    optimizer = FusedAdam(groups(ours), adam_w_mode=decoupled, **common)
    oracle = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups(theirs), fused=True, **common)
    train(optimizer, ours, 0, 40)
    train(oracle, theirs, 0, 40)
    for a, b in zip(ours, theirs):
        assert torch.equal(a, b)
    for key in ("exp_avg", "exp_avg_sq"):
        for a, b in zip(moments(optimizer, ours, key), moments(oracle, theirs, key)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_both_kernels_follow_torch_plain_maths(decoupled, fused, monkeypatch):
    """The fused and the foreach kernel both stay within 1e-6 of torch's unfused loop over 40 steps."""
    if not fused:
        monkeypatch.setattr(adam, "FUSED_DEVICES", ())
    ours, theirs = parameters(), parameters()
    optimizer = FusedAdam(groups(ours), adam_w_mode=decoupled, weight_decay=0.1)
    oracle = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups(theirs), weight_decay=0.1, foreach=False)
    train(optimizer, ours, 0, 40)
    train(oracle, theirs, 0, 40)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_keep_fp32_moments(dtype):
    """A 16-bit parameter is updated through fp32: the result is AdamW on an fp32 copy, rounded at each step."""
    ours, theirs = parameters(dtype=dtype), [p.detach().float().requires_grad_() for p in parameters(dtype=dtype)]
    optimizer, oracle = FusedAdam(ours), torch.optim.AdamW(theirs, weight_decay=0.0, fused=True)
    for step in range(10):
        gradients(ours, step)
        for mine, param in zip(ours, theirs):
            param.grad = mine.grad.float()
        optimizer.step()
        oracle.step()
        with torch.no_grad():
            for param in theirs:
                param.copy_(param.to(dtype))
    for a, b in zip(ours, theirs):
        assert torch.equal(a.float(), b)
        assert optimizer.state[a]["exp_avg"].dtype == torch.float32
        assert torch.equal(optimizer.state[a]["exp_avg_sq"], oracle.state[b]["exp_avg_sq"])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_gradient_factor_scales_one_step(decoupled, fused, monkeypatch):
    """Each step with gradient_factor 0.3 is torch's step on 0.3 x the gradients; the step after it is not scaled. eps is large
    enough for the size of the gradients to show."""
    if not fused:
        monkeypatch.setattr(adam, "FUSED_DEVICES", ())
    ours, theirs = parameters(), parameters()
    common = dict(eps=0.1, weight_decay=0.1)
    optimizer = FusedAdam(ours, adam_w_mode=decoupled, **common)
    oracle = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, foreach=False, **common)
    for step in range(4):
        gradients(ours, step), gradients(theirs, step)
        if step % 2:
            optimizer.gradient_factor = 0.3
            for param in theirs:
                param.grad *= 0.3
        optimizer.step(), oracle.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [True, False])
def test_without_bias_correction_the_first_step_is_hand_computed(fused, monkeypatch):
    """bias_correction=False: p - lr * (0.1 g) / (sqrt(0.001 g^2) + eps), hand-computed for g = 2."""
    if not fused:
        monkeypatch.setattr(adam, "FUSED_DEVICES", ())
    param = torch.nn.Parameter(torch.tensor([1.0]))
    param.grad = torch.tensor([2.0])
    FusedAdam([param], lr=0.1, bias_correction=False).step()
    assert param.item() == pytest.approx(1 - 0.1 * 0.2 / (math.sqrt(0.004) + 1e-8), abs=1e-6)


def test_the_fused_kernel_is_called_once_per_group():
    """A step of two groups is two fused kernels, not one call per parameter."""
    params = parameters()
    optimizer = FusedAdam(groups(params))
    gradients(params, 0)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        optimizer.step()
    calls = {event.key: event.count for event in trace.key_averages()}
    assert calls.get("aten::_fused_adamw_") == 2


def test_layout_is_what_megatron_reads():
    """The step is an int in the param group from the start; a state holds exp_avg and exp_avg_sq and nothing else."""
    params = parameters()
    optimizer = FusedAdam(groups(params))
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]
    params[0].grad = None
    gradients(params[1:], 0)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    assert not optimizer.state[params[0]] and set(optimizer.state[params[1]]) == {"exp_avg", "exp_avg_sq"}


def test_resume_is_bitwise_and_accepts_torch_layout():
    """12 steps equal 5 + load_state_dict + 7, from our state dict and from that of torch.optim.AdamW(fused)."""
    whole = parameters()
    train(FusedAdam(groups(whole), weight_decay=0.1), whole, 0, 12)
    for first in (FusedAdam, lambda g, **kw: torch.optim.AdamW(g, fused=True, **kw)):
        params = parameters()
        saved = first(groups(params), weight_decay=0.1)
        train(saved, params, 0, 5)
        resumed = FusedAdam(groups(params), weight_decay=0.1)
        resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
        assert [group["step"] for group in resumed.param_groups] == [5, 5]
        train(resumed, params, 5, 12)
        for a, b in zip(params, whole):
            assert torch.equal(a, b)


def test_loading_keeps_fp32_moments_of_bf16_parameters():
    """load_state_dict does not round the fp32 moments of a bf16 parameter (torch's own would)."""
    params = parameters(dtype=torch.bfloat16)
    saved = FusedAdam(params)
    train(saved, params, 0, 3)
    resumed = FusedAdam(params)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    for param in params:
        assert torch.equal(resumed.state[param]["exp_avg"], saved.state[param]["exp_avg"])


def test_mistakes_are_refused_by_name():
    """amsgrad, capturable, bad numbers and parameters saved at different steps are refused with the value found."""
    for kwargs, word in (
        (dict(amsgrad=True), "amsgrad=True"),
        (dict(capturable=True), "capturable=True"),
        (dict(lr=-1.0), "lr=-1.0"),
        (dict(betas=(0.9, 1.0)), "betas"),
    ):
        with pytest.raises(ValueError, match=word):
            FusedAdam(parameters(), **kwargs)
    params = parameters()
    state = {"state": {i: {"step": torch.tensor(float(i))} for i in range(4)}, "param_groups": [{"params": [0, 1, 2, 3], "lr": 1e-3}]}
    with pytest.raises(ValueError, match=r"steps \[0, 1, 2, 3\]"):
        FusedAdam(params).load_state_dict(state)
