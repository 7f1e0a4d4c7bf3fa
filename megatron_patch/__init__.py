"""Train Hugging Face GPT-like models with unmodified, pip-installed megatron-core.

Public names: `platform`, `load_config`, `build_model`, `load_hf`, `save_hf`. They are loaded on first use, so importing this
package imports neither torch nor megatron and changes no attribute, environment variable or module of the process."""

import importlib

__version__ = "0.1.0"

_PUBLIC = {
    "platform": ("megatron_patch.platform", None),
    "load_config": ("megatron_patch.translate", "load_config"),
    "build_model": ("megatron_patch.model", "build_model"),
    "load_hf": ("megatron_patch.checkpoint.hf", "load_hf"),
    "save_hf": ("megatron_patch.checkpoint.hf", "save_hf"),
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megatron_patch' has no attribute {name!r}")
    module_name, attribute = _PUBLIC[name]
    module = importlib.import_module(module_name)
    return module if attribute is None else getattr(module, attribute)


def __dir__():
    return sorted(__all__)
