"""Adam with the interface of Transformer Engine's and Apex's FusedAdam, over torch's own fused kernels.

megatron-core resumes only from an Adam that keeps its step count in the param group and nothing but moments in the
per-parameter state; torch.optim.AdamW keeps a step per parameter, and a resumed run then stops in an assert or a
KeyError. This class gives core the layout it expects on a machine that has neither Transformer Engine nor Apex.
Source of the contract: transformer_engine/pytorch/optimizers/fused_adam.py; megatron/core/optimizer/distrib_optimizer.py.
"""

import math
from collections import defaultdict

import torch

FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


class FusedAdam(torch.optim.AdamW):
    """Adam (adam_w_mode=False) or AdamW (True) with fp32 moments.

    param_groups[i]['step']: int, steps taken so far. state[param]: {'exp_avg', 'exp_avg_sq'}, fp32, shaped as param.
    It derives from torch.optim.AdamW only because DistributedOptimizer.__init__ checks for that class; none of
    AdamW's own methods remains in use. Raises ValueError for amsgrad, capturable and sparse gradients.
    ``gradient_factor``: what the next step multiplies gradients by, in its own pass over them; then it is 1 again.
    """

    gradient_factor = 1.0

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        *,
        set_grad_none=None,
        capturable=False,
    ):
        if amsgrad or capturable:
            raise ValueError(
                f"FusedAdam: amsgrad={amsgrad}, capturable={capturable}; both must be False here. "
                "CUDA graphs of the optimizer step need Transformer Engine."
            )
        for name, value, ok in (
            ("lr", lr, lr >= 0),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("betas", betas, all(0 <= b < 1 for b in betas)),
        ):
            if not ok:
                raise ValueError(f"FusedAdam: {name}={value} is out of range; lr, eps, weight_decay >= 0, betas in [0, 1).")
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=tuple(betas), eps=eps, weight_decay=weight_decay, step=0)
        self.adam_w_mode = bool(adam_w_mode)
        torch.optim.Optimizer.__init__(self, params, defaults)

    def __setstate__(self, state):
        """Restore pickled or loaded attributes; AdamW's own version wants a step per parameter."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        """Update every parameter that has a gradient; each group's step advances by one. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = int(group.get("step") or 0) + 1
            for tensors in self._batches(group["params"]).values():
                _update(*tensors, group, self.adam_w_mode, self.gradient_factor)
        self.gradient_factor = 1.0
        return loss

    def _batches(self, params):
        """Lists (params, grads, exp_avgs, exp_avg_sqs) by (device, param dtype, grad dtype); no gradient, no entry."""
        batches = defaultdict(lambda: ([], [], [], []))
        state = self.state
        for param in params:
            grad = param.grad
            if grad is None or param.numel() == 0:
                continue
            if grad.is_sparse:
                raise ValueError(f"FusedAdam: sparse gradient of shape {tuple(grad.shape)}; only dense ones are supported.")
            moments = state[param]
            if "exp_avg_sq" not in moments:
                self.initialize_state(param)
            batch = batches[param.device, param.dtype, grad.dtype]
            for column, tensor in zip(batch, (param, grad, moments["exp_avg"], moments["exp_avg_sq"])):
                column.append(tensor)
        return batches

    def initialize_state(self, param):
        """Zero moments of one parameter, fp32 whatever the parameter's dtype."""
        for key in ("exp_avg", "exp_avg_sq"):
            self.state[param][key] = torch.zeros_like(param, dtype=_moment_dtype(param))

    def load_state_dict(self, state_dict):
        """Load our layout, or that of torch.optim.Adam(W): one step per parameter moves into the param group.

        Moments keep fp32 (torch would cast them to the parameter's dtype). Raises ValueError when the parameters of
        one group disagree about the step, which one shared counter cannot hold.
        """
        groups = [_with_group_step({**self.defaults, "step": None, **group}, state_dict["state"]) for group in state_dict["param_groups"]]
        super().load_state_dict({"state": {}, "param_groups": groups})
        for saved, group in zip(groups, self.param_groups):
            for key, param in zip(saved["params"], group["params"]):
                if key in state_dict["state"]:
                    self.state[param] = _moments(state_dict["state"][key], param)


def _moment_dtype(param):
    return param.dtype if param.dtype == torch.float64 else torch.float32


def _moments(saved, param):
    """The tensors of one saved state but 'step', on the parameter's device."""
    return {key: value.to(param.device, _moment_dtype(param)) for key, value in saved.items() if key != "step" and torch.is_tensor(value)}


def _with_group_step(group, state):
    """A copy of a saved param group whose 'step' is an int, taken from its parameters' states where the group has none."""
    step = group.get("step")
    if step is None:
        steps = {int(state[key]["step"]) for key in group["params"] if "step" in state.get(key, {})}
        if len(steps) > 1:
            raise ValueError(
                f"FusedAdam: parameters of one group were saved at steps {sorted(steps)}; one step is expected. "
                "Load the weights without the optimizer (--no-load-optim)."
            )
        step = steps.pop() if steps else 0
    return {**group, "step": int(step)}


def _update(params, grads, exp_avgs, exp_avg_sqs, group, decoupled, factor):
    """One Adam step on tensors of one device and dtype, in place."""
    dtype = exp_avgs[0].dtype
    wide = params if params[0].dtype == dtype else [param.to(dtype) for param in params]
    grads = grads if grads[0].dtype == dtype else [grad.to(dtype) for grad in grads]
    kernel = _fused if params[0].device.type in FUSED_DEVICES else _foreach
    kernel(wide, grads, exp_avgs, exp_avg_sqs, group, decoupled, factor)
    if wide is not params:
        torch._foreach_copy_(params, wide)


def _divisor(factor: float, device) -> torch.Tensor | None:
    """What the fused kernel divides gradients by, to multiply them by ``factor``."""
    if factor == 1:
        return None
    return torch.tensor(1 / factor if factor else math.inf, device=device)


def _fused(params, grads, exp_avgs, exp_avg_sqs, group, decoupled, factor):
    # beta ** inf is 0, so an infinite step makes the kernel's bias corrections exactly 1
    step = torch.tensor(float(group["step"] if group["bias_correction"] else math.inf), device=params[0].device)
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(params),
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=_divisor(factor, params[0].device),
    )


def _foreach(params, grads, exp_avgs, exp_avg_sqs, group, decoupled, factor):
    if factor != 1:
        torch._foreach_mul_(grads, factor)
    (beta1, beta2), lr, weight_decay = group["betas"], float(group["lr"]), group["weight_decay"]
    step = group["step"] if group["bias_correction"] else math.inf
    if weight_decay and decoupled:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    elif weight_decay:
        grads = torch._foreach_add(grads, params, alpha=weight_decay)
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**step))
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_addcdiv_(params, exp_avgs, denominators, -lr / (1 - beta1**step))
