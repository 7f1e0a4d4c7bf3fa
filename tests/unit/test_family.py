"""A declaration that names something which is not there is refused when it is read, with the name."""

import pytest

from megatron_patch.packing import FLAT_GLU
from model_zoo.llama import LLAMA


@pytest.mark.parametrize("mistake, told", [
    (dict(weights=dict(qkv_biass=("a",))), r"unknown slots \['qkv_biass'\]; see megatron_patch/slots.py"),
    (dict(drop=("mlp_inn",)), r"unknown slots \['mlp_inn'\]"),
    (dict(packings=dict(mlp_inn=FLAT_GLU)), r"unknown slots \['mlp_inn'\]"),
    (dict(weights=dict(mlp_in=("one",))), "slot 'mlp_in' packs 2 tensors, got 1 names"),
    (dict(weights=dict(mlp_out=("h.{layr}.down.weight",))), r"slot 'mlp_out' has \['layr'\] in braces"),
])
def test_a_typo_is_named(mistake, told):
    """Slots that are given, dropped or packed; how many names a slot takes; what stands in braces."""
    with pytest.raises(ValueError, match=f"family larch: {told}"):
        LLAMA.extend("larch", model_types=("larch",), architectures=("LarchForCausalLM",), **mistake)
