"""Weights of a torch_dist checkpoint into a live model, through core's own reader."""

from pathlib import Path

from megatron_patch.checkpoint.hf import bare

TRACKER = "latest_checkpointed_iteration.txt"


def iteration_folder(root) -> Path:
    """The folder that the tracker of ``root`` names, or ``root`` itself when it is one. Raises ValueError, saying what is there."""
    root = Path(root)
    if (root / "metadata.json").is_file():
        return root
    tracker = root / TRACKER
    if not tracker.is_file():
        there = sorted(p.name for p in root.iterdir())[:8] if root.is_dir() else "no such folder"
        raise ValueError(f"{root} is no Megatron checkpoint: neither {TRACKER} nor metadata.json; found {there}.")
    text = tracker.read_text(encoding="utf-8").strip()
    if text != "release" and not text.isdigit():
        raise ValueError(f"{tracker} holds '{text[:40]}'; expected an iteration number or 'release'.")
    folder = root / (text if text == "release" else f"iter_{int(text):07d}")
    if not (folder / "metadata.json").is_file():
        raise ValueError(f"{tracker} names {folder.name}, which has no metadata.json: the checkpoint is not complete.")
    return folder


def model_state(chunks, metadata: dict | None = None) -> dict:
    """{'model': ...}, or model0, model1 ... for virtual stages: core's sharded state dicts, as stock Megatron-LM names them."""
    if len(chunks) == 1:
        return {"model": chunks[0].sharded_state_dict(metadata=metadata)}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}


def load_megatron(model, checkpoint) -> Path:
    """Fill ``model`` (a chunk or this rank's chunks) from the torch_dist ``checkpoint``, a root or an iteration folder.

    Weights only; optimizer states are left alone. Raises ValueError for a folder that is no complete checkpoint.
    """
    from megatron.core import dist_checkpointing

    folder, chunks = iteration_folder(checkpoint), bare(model)
    metadata = dist_checkpointing.load_content_metadata(str(folder)) or {}
    state = dist_checkpointing.load(model_state(chunks, metadata), str(folder))
    for key, chunk in zip(["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))], chunks):
        chunk.load_state_dict(state[key], strict=True)
    return folder
