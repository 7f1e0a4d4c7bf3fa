"""TransformerConfig with the fields that our own layers read, see megatron_patch/own.py; upstream's layers do not know them."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_patch.own import Own


@dataclass
class Config(Own, TransformerConfig):
    """TransformerConfig and :class:`Own`."""


@dataclass
class MLAConfig(Own, MLATransformerConfig):
    """MLATransformerConfig and :class:`Own`."""


def own(config, name: str):
    """A field of :class:`Own`, also of a config of upstream's own class (stock Megatron-LM's --spec)."""
    return getattr(config, name, getattr(Own, name))
