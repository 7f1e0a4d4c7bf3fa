"""Upstream's ChainedOptimizer, able to load a distributed checkpoint whose experts were split otherwise.

With expert parallelism core keeps two optimizers (dense, expert), without it one. The tensors of a fully_reshardable
checkpoint do not depend on that, only the nesting of the common part does; upstream then stops with KeyError 'optimizer'
or 'Expected 2 entries in state dict'.
Source: megatron/core/optimizer/optimizer.py, ChainedOptimizer.load_state_dict of 0.16.1 and 0.19.2.
"""

from megatron.core.optimizer import optimizer as upstream

from megatron_patch.optim.folding import Folding


class ChainedOptimizer(Folding, upstream.ChainedOptimizer):
    """Upstream's class; load_state_dict also takes the nesting of another number of optimizers, and see folding.py for step."""

    def load_state_dict(self, state_dict):
        """Load a state dict of one or several optimizers into one or several (distributed, fully reshardable) ones."""
        return super().load_state_dict(renest(state_dict, len(self.chained_optimizers)))


def renest(state_dict, wanted):
    """`state_dict` of any number of distributed optimizers, nested for `wanted` of them; as given where it fits already.

    What dist_checkpointing.load returns is the saved nesting for the common part and the nesting of this run for the
    tensors ('param_state'), so both can be present at once.
    """
    if not isinstance(state_dict, dict) or not any("param_state" in part for part in (state_dict, *_parts(state_dict))):
        return state_dict
    saved = [part for part in (state_dict, *_parts(state_dict)) if "optimizer" in part]
    here = [state_dict] if wanted == 1 else _parts(state_dict)
    if not saved or all("optimizer" in part for part in here) and len(here) == wanted:
        return state_dict
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    common = {
        **{key: value for part in saved for key, value in part.items() if isinstance(key, str)},
        "optimizer": {**saved[0]["optimizer"], "param_groups": _for_experts_too(groups)},
    }
    if wanted == 1:
        return {**common, "param_state": state_dict["param_state"]}
    return {index: {**common, "param_state": part["param_state"]} for index, part in enumerate(here)}


def _parts(state_dict):
    return [state_dict[key] for key in sorted(key for key in state_dict if isinstance(key, int))]


def _for_experts_too(groups):
    """Every saved group once for dense and once for expert parameters; a saved one goes before its copy for the other kind."""
    copies = [{**group, "is_expert_parallel": expert} for group in groups for expert in (False, True)]
    return copies + list(groups)  # upstream keeps the last of equal groups
