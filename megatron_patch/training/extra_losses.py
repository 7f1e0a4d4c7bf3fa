"""Losses beside the language-model loss: MoE balancing losses and multi-token prediction, for the report only.

core adds their gradients itself and keeps their values in process-wide trackers; this reads and clears those.
"""

import torch
import torch.distributed as dist

from megatron_patch import platform

# moe_router_load_balancing_type -> name in core's tracker. Source: megatron/core/transformer/moe/router.py.
BALANCING = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss", "global_aux_loss": "global_load_balancing_loss"}


class ExtraLosses:
    """``collect`` returns {name: value} after an iteration, the same on every rank; {} for a model that has none."""

    def __init__(self, config):
        kinds = config.get("moe_router_load_balancing_type") or "none"
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        self.names = [BALANCING[kind] for kind in kinds if kind in BALANCING and config.get("moe_aux_loss_coeff")]
        self.names += ["z_loss"] if config.get("moe_z_loss_coeff") else []
        if not config.get("num_moe_experts"):
            self.names = []
        self.predictions = config.get("mtp_num_layers") or 0

    def collect(self, job) -> dict[str, float]:
        """Means over micro-batches (and MoE layers) of the iteration that just ran. Collective."""
        return {**self._balancing(job), **self._predictions(job)}

    def _balancing(self, job) -> dict[str, float]:
        if not self.names:
            return {}
        from megatron.core.transformer.moe import moe_utils

        found: dict[str, torch.Tensor] = {}
        moe_utils.track_moe_metrics(
            loss_scale=1 / job.length.micro_batches, iteration=0, writer=None, total_loss_dict=found, force_initialize=True,
            track_names=self.names, num_layers=job.config.num_layers, moe_layer_freq=job.config.get("moe_layer_freq"),
            mtp_num_layers=job.config.get("mtp_num_layers"))
        return {name: float(value) for name, value in found.items()}

    def _predictions(self, job) -> dict[str, float]:
        if not self.predictions:
            return {}
        from megatron.core import parallel_state as ps
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        found: dict[str, torch.Tensor] = {}
        MTPLossLoggingHelper.track_mtp_metrics(1 / job.length.micro_batches, 0, None, None, found)
        values = torch.zeros(self.predictions, device=platform.current().device)
        # The stage that has them holds the same numbers on all its ranks.
        if found and ps.get_tensor_model_parallel_rank() == 0 and ps.get_data_parallel_rank(with_context_parallel=True) == 0:
            for number in range(self.predictions):
                values[number] = found[f"mtp_{number + 1} loss"]
        dist.all_reduce(values)
        return {f"mtp_{number + 1}_loss": float(value) for number, value in enumerate(values)}
