"""The router of a mixture of experts: upstream's, with the group scores of DeepSeek-V2 and a selection bias that stays fp32."""

import contextlib
from functools import partial

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_patch.layers.config import own
from megatron_patch.platform.ledger import lent


class Router(TopKRouter):
    """Token choice of the top k experts, of the best groups only when the config has groups.

    Upstream scores a group by the sum of its best (k // groups taken) experts; with ``router_group_best`` it is that many: 1, the
    maximum, in DeepSeek-V2, 2 in DeepSeek-V3. Source: transformers DeepseekV2TopkRouter, DeepseekV3TopkRouter.
    """

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        if own(config, "router_group_best") and config.moe_router_fusion:
            raise ValueError("moe_router_fusion has no group scores of this model; leave --moe-router-fusion out.")

    def routing(self, logits: Tensor, *args, **kwargs):
        best = own(self.config, "router_group_best")
        # a group's score is ours; Source: core moe_utils.py, topk_routing_with_score_function
        with lent(moe_utils, group_limited_topk=partial(limited_topk, best=best)) if best else contextlib.nullcontext():
            return super().routing(logits, *args, **kwargs)

    def _apply(self, fn, *args, **kwargs):
        """Moves, but never rounds the selection bias: Float16Module casts every buffer, and the rounded bias chooses other experts."""
        kept = self.expert_bias
        super()._apply(fn, *args, **kwargs)
        if kept is not None and self.expert_bias.dtype != kept.dtype:
            self.expert_bias = kept.to(self.expert_bias.device)
        return self


def limited_topk(scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int, *, best: int):
    """(scores, ids) [tokens, topk] of the best experts among the ``group_topk`` groups whose ``best`` experts add up to most.

    ``scores`` [tokens, experts]. Source: the interface of core moe_utils.py, group_limited_topk.
    """
    groups_TGE = scores.view(num_tokens, num_groups, num_experts // num_groups)
    chosen_TG = groups_TGE.topk(best, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
    hidden_TG = torch.ones(num_tokens, num_groups, dtype=torch.bool, device=scores.device).scatter(1, chosen_TG, False)
    return groups_TGE.masked_fill(hidden_TG[..., None], float("-inf")).flatten(1).topk(topk, dim=-1)
