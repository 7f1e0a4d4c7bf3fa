"""Find a family by Hugging Face model_type: every upper-case Family in model_zoo/ is registered by being there."""

import difflib
import importlib
import pkgutil
from functools import cache

from megatron_patch.family import Family


@cache
def families() -> dict[str, Family]:
    """Family name -> Family, over all modules of model_zoo. Raises ValueError when two claim one name or model_type."""
    import model_zoo

    found: dict[str, Family] = {}
    for info in sorted(pkgutil.iter_modules(model_zoo.__path__), key=lambda m: m.name):
        for value in vars(importlib.import_module(f"model_zoo.{info.name}")).values():
            if isinstance(value, Family) and found.setdefault(value.name, value) is not value:
                raise ValueError(f"two families are called '{value.name}'; rename the one in model_zoo/{info.name}.py")
    return found


@cache
def model_types() -> dict[str, Family]:
    """HF model_type -> Family, before its variants are asked."""
    found: dict[str, Family] = {}
    variants = [variant.name for family in families().values() for _, variant in family.variants]
    for family in families().values():
        for name in (*family.model_types, *family.composites) if family.name not in variants else ():
            if found.setdefault(name, family) is not family:
                raise ValueError(f"model_type '{name}' is claimed by families '{found[name].name}' and '{family.name}'")
    return found


def find(model_type: str) -> Family:
    """The family of an HF ``model_type``. Raises ValueError that lists what is known."""
    known = model_types()
    if model_type in known:
        return known[model_type]
    near = difflib.get_close_matches(str(model_type), known, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise ValueError(f"model_type '{model_type}' is not supported; known: {', '.join(sorted(known))}.{hint} "
                     f"A family is one file in model_zoo/, see CONTRIBUTING.md.")
