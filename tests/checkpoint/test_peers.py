"""What three other converters make of the same Hugging Face folder, tensor by tensor and shard by shard, is what ours makes of it.

The digests in peers.json were made by the code of others, run by peers_record.py on the CPU (gloo, one and two processes) with
megatron-core 0.16.1, torch 2.13 and transformers 5.24: mbridge 0.15.1 and mcore-bridge 1.6.5 (load_weights of each), Megatron-Bridge
0.3.1 (the mappings of its bridges). They agree with each other on all 65 parameters of llama, qwen2 and qwen3_moe at TP 1 and on both
ranks of TP 2. None of them is needed to run this.
"""

import json
import math
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.serialization import safe_globals

from megatron_patch.checkpoint import convert
from tests.checkpoint import numbered

TABLE = json.loads((Path(__file__).parent / "peers.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {case: numbered.write(case, tmp_path_factory.mktemp("hf") / case) for case in numbered.CASES}


def test_the_table_is_whole():
    """Three digests a parameter, all different: whole, and both shards of TP 2, but for what TP does not cut."""
    assert {case: len(rows) for case, rows in TABLE.items()} == {"llama": 15, "qwen2": 17, "qwen3_moe": 33}
    for rows in TABLE.values():
        cut = {name: len(set(digests.split())) for name, digests in rows.items()}
        assert all(count == (1 if "norm" in name or "router" in name else 3) for name, count in cut.items()), cut
        assert len({digests.split()[0] for digests in rows.values()}) == len(rows)


@pytest.mark.parametrize("case", numbered.CASES)
@pytest.mark.parametrize("tp", [1, 2])
def test_shards_are_what_peers_load(folders, tmp_path, case, tp):
    """Every parameter under Transformer Engine's names, in the files of mp_rank_00 and 01 as torch.load reads them.
    Mutants: up before gate; v before k in a query group."""
    form = convert.Form("legacy", None, dict(tensor_model_parallel_size=tp), "te")
    convert.hf_to_megatron(folders[case], tmp_path / "m", form=form).run()
    for rank in range(tp):
        with safe_globals([Namespace]):
            found = torch.load(tmp_path / f"m/release/mp_rank_{rank:02d}/model_optim_rng.pt", weights_only=True)["model"]
        ours = {name: numbered.digest(value) for name, value in found.items() if "_extra_state" not in name}
        assert ours == {name: digests.split()[rank if tp == 1 else 1 + rank] for name, digests in TABLE[case].items()}


@pytest.mark.parametrize("case", numbered.CASES)
def test_layers_are_what_peers_load(folders, tmp_path, case):
    """The same in a torch_dist checkpoint, as torch's reader gives the stacked tensors. Mutant: experts numbered backwards."""
    convert.hf_to_megatron(folders[case], tmp_path / "m", form=convert.Form(stacked=True)).run()
    reader = dcp.FileSystemReader(tmp_path / "m/release")
    stored = reader.read_metadata().state_dict_metadata
    state = {key: torch.full(entry.size, math.nan) for key, entry in stored.items() if hasattr(entry, "chunks")}
    dcp.load(state, storage_reader=reader, no_dist=True)
    for name, digests in TABLE[case].items():
        assert numbered.digest(_found(state, name)) == digests.split()[0], name


def _found(state, name):
    """Megatron-core's torch_dist key of a parameter: layers and experts are axes of one tensor."""
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*?)(?:(\.weight)(\d+))?", name)
    if layer is None:
        return state[name]
    number, rest, ending, expert = layer.groups()
    key = "decoder.layers." + rest.replace("mlp.experts.", "mlp.experts.experts.") + (ending or "")
    key = key if key in state else key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return state[key][int(number)] if expert is None else state[key][int(number), int(expert)]
