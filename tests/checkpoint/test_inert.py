"""Pickles of others are read without running their code, and reading one changes nothing for the readers that come after."""

from argparse import Namespace

import torch
from torch.serialization import get_safe_globals, safe_globals

from megatron_patch.checkpoint.inert import load_weights_only


class Foreign:
    """A class torch does not trust."""


def test_reading_leaves_torchs_list_of_safe_classes(tmp_path):
    """What torch trusted before, core's Namespace among it, it trusts afterwards, and nothing else. Mutant: Namespace put in, and so
    taken out again, whoever had put it in before."""
    path = tmp_path / "common.pt"
    torch.save({"args": Namespace(hidden_size=8), "other": Foreign()}, path)
    for trusted in ([], [Namespace]):
        with safe_globals(trusted):
            before = set(get_safe_globals())
            assert load_weights_only(path, "common.pt")["args"].hidden_size == 8
            assert set(get_safe_globals()) == before
