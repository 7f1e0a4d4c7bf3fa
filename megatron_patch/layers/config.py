"""TransformerConfig with the fields that our own layers read, see megatron_patch/own.py; upstream's layers do not know them."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_patch.own import Own


@dataclass
class Config(Own, TransformerConfig):
    """TransformerConfig and :class:`Own`. Upstream refuses biases of experts that are cut over ranks, whose sum they would enter more
    than once; the native model shares them out (model.py)."""

    def __post_init__(self):
        ranks = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        if self.num_moe_experts and self.add_bias_linear:
            self.expert_tensor_parallel_size = 1
        super().__post_init__()
        self.expert_tensor_parallel_size = ranks


@dataclass
class MLAConfig(Own, MLATransformerConfig):
    """MLATransformerConfig and :class:`Own`."""


def own(config, name: str):
    """A field of :class:`Own`, also of a config of upstream's own class (stock Megatron-LM's --spec)."""
    return getattr(config, name, getattr(Own, name))
