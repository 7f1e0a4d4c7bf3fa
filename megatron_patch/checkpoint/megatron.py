"""Weights of a torch_dist checkpoint into a live model, through core's own reader."""

from pathlib import Path

from megatron_patch.checkpoint import inert
from megatron_patch.checkpoint.hf import bare
from megatron_patch.checkpoint.tracker import find


def with_group(metadata: dict) -> dict:
    """``metadata`` as sharded_state_dict wants it; the group is never written."""
    from megatron.core import parallel_state as ps

    return dict(metadata, dp_cp_group=ps.get_data_parallel_group(with_context_parallel=True))


def model_state(model, metadata: dict) -> dict:
    """{'model': ...}, or model0, model1 ... of virtual stages: core's sharded state dicts, as stock Megatron-LM names them."""
    chunks = bare(model)
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    return {name: chunk.sharded_state_dict(metadata=with_group(metadata)) for name, chunk in zip(names, chunks)}


def load_megatron(model, checkpoint) -> Path:
    """Fill ``model`` (a chunk or this rank's chunks) from the torch_dist ``checkpoint``, a root or an iteration folder.

    Weights only; optimizer states are left alone. Raises ValueError for a folder that is no complete checkpoint.
    """
    from megatron.core import dist_checkpointing

    folder = find(checkpoint)
    inert.check_metadata(folder / ".metadata")
    template = model_state(model, dist_checkpointing.load_content_metadata(str(folder)) or {})
    names = list(template)  # load() empties the dict it is given
    state = dist_checkpointing.load(template, str(folder))
    for name, chunk in zip(names, bare(model)):
        chunk.load_state_dict(state[name], strict=True)
    return folder
