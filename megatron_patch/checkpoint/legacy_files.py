"""The files of a legacy Megatron checkpoint, found and read without their tensors, and the layout that they were saved in."""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.checkpoint import archive_read, legacy_layout, legacy_names, tracker
from megatron_patch.checkpoint.legacy_layout import Rank
from megatron_patch.checkpoint.saved_args import CHECKED, USUAL
from megatron_patch.checkpoint.strided import Stored

FILES = (legacy_layout.FILE, "model_rng.pt")  # the second where the optimizer had a file of its own
FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
         "expert_model_parallel_size", "expert_tensor_parallel_size")
EXTRA = ("_extra_state", "rotary_pos_emb.inv_freq", ".local_tokens_per_expert")  # no weights


@dataclass(frozen=True)
class RankFile:
    """One file: its parameters by chunk, under today's names, and what is beside them. ``early``: names from before Megatron-core."""

    path: Path
    chunks: dict[str, dict[str, Stored]]
    args: object
    version: object
    iteration: object
    early: bool


def find(ckpt) -> Path | None:
    """The folder of mp_rank_* folders: ``ckpt`` itself, or what its tracker names; None when there is none."""
    root = Path(ckpt)
    if _rank_folders(root):
        return root
    found = tracker.named(root)
    inner = root if found is None else found[0]
    return inner if _rank_folders(inner) else None


def _rank_folders(folder: Path) -> dict[str, Path]:
    """{folder name: its file}, in order."""
    found = {path.name: path for path in folder.glob("mp_rank_*") if FOLDER.fullmatch(path.name)} if folder.is_dir() else {}
    files = {name: next((path / file for file in FILES if (path / file).is_file()), None) for name, path in sorted(found.items())}
    return {name: file for name, file in files.items() if file is not None}


def load(path: Path) -> RankFile:
    """Raises ValueError for a file that cannot be read, or holds no model."""
    found = archive_read.read(path)
    keys = [key for key in found if re.fullmatch(r"model\d*", str(key))] if isinstance(found, dict) else []
    if not keys:
        raise ValueError(f"{path} holds no 'model' or 'model0'; expected a checkpoint of Megatron-LM.")
    chunks = {key: {".".join(names): tensor for names, tensor in archive_read.tensors(found[key])} for key in sorted(keys, key=_number)}
    early = any(legacy_names.is_early(chunk) for chunk in chunks.values())
    named = {key: _renamed(path, chunk, early) for key, chunk in chunks.items()}
    return RankFile(path, named, found.get("args"), found.get("checkpoint_version", 0), found.get("iteration"), early)


def _renamed(path: Path, chunk: dict, early: bool) -> dict:
    """The parameters of ``chunk`` under today's names. Raises ValueError where two become one: which of them is the model's is unknown."""
    out, old = {}, {}
    for name, tensor in chunk.items():
        if name.endswith(EXTRA):
            continue
        today = legacy_names.today(name) if early else name
        if today in out:
            raise ValueError(f"{path} holds '{old[today]}' and '{name}', both of which are '{today}' today; remove the one that the model "
                             f"does not use, or convert with the tool that wrote them.")
        out[today], old[today] = tensor, name
    return out


def first_args(folder: Path):
    """The arguments in the first rank's file, None where it has none."""
    return load(next(iter(_rank_folders(folder).values()))).args


def _number(key: str) -> int:
    return int(key.removeprefix("model") or 0)


def layout_of(folder: Path, config) -> tuple[object, dict[Rank, RankFile]]:
    """(``config`` with the layout of the checkpoint, {rank: file}). Raises ValueError, naming the file, where one is missing or left over,
    or the files contradict each other."""
    paths = _rank_folders(folder)
    files = {name: load(path) for name, path in paths.items()}
    _check_agreement(list(files.values()))
    first = next(iter(files.values()))
    config = config.replace(**_sizes(files, first.args, config), sequence_parallel=False, context_parallel_size=1, mtp_num_layers=0)
    ranks = {rank: legacy_layout.folder(config, rank) for rank in legacy_layout.ranks(config)}
    missing, more = sorted(set(ranks.values()) - set(files)), sorted(set(files) - set(ranks.values()))
    if missing or more:
        raise ValueError(f"{folder} {'lacks ' + ', '.join(missing[:4]) if missing else 'holds ' + ', '.join(more[:4]) + ' beside'}"
                         f"{' and ' + str(len(missing) - 4) + ' more' if len(missing) > 4 else ''}: the arguments in {first.path} say TP "
                         f"{config.tensor_model_parallel_size}, PP {config.pipeline_model_parallel_size}, EP "
                         f"{config.expert_model_parallel_size}; copy the whole checkpoint.")
    held = {rank: files[name] for rank, name in ranks.items()}
    return config.replace(**_stages(held, config, folder)), held


def _check_agreement(files: list[RankFile]) -> None:
    first = files[0]
    for file in files[1:]:
        for name in (*SIZES, *CHECKED, *USUAL):
            have, want = (getattr(one.args, name, None) for one in (file, first))
            if have != want:
                raise ValueError(f"{file.path} was saved with {name} {have}, {first.path} with {want}; the files are of different "
                                 f"checkpoints.")
        for name in ("version", "iteration"):
            if getattr(file, name) != getattr(first, name):
                raise ValueError(f"{file.path} is of {name} {getattr(file, name)}, {first.path} of {getattr(first, name)}; the files are "
                                 f"of different checkpoints.")
        if list(file.chunks) != list(first.chunks):
            raise ValueError(f"{file.path} holds {', '.join(file.chunks)}, {first.path} {', '.join(first.chunks)}; the files are of "
                             f"different checkpoints.")


def _sizes(files: dict[str, RankFile], args, config) -> dict:
    """Parallel sizes by the arguments; by the names of the folders where there are none."""
    numbers = [[int(n) for n in FOLDER.fullmatch(name).groups() if n is not None] for name in files]
    chunks = len(next(iter(files.values())).chunks)
    out = dict(virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, expert_tensor_parallel_size=None)
    if getattr(args, SIZES[1], None) is None:
        most = [max(column) + 1 for column in zip(*numbers)] if len({len(row) for row in numbers}) == 1 else [1]
        tp, *rest = most
        if len(rest) == 1:
            rest = [1, *rest] if _all_first(files) else [*rest, 1]
        pp, ep = rest or (1, 1)
        return dict(out, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep)
    for name in SIZES:
        size = getattr(args, name, None)
        if name != SIZES[2] and size is not None and (type(size) is not int or not 0 < size <= len(files)):
            raise ValueError(f"the arguments in {next(iter(files.values())).path} say {name} {size!r}, and there are {len(files)} files of "
                             f"ranks; copy the whole checkpoint.")
    out |= {name: getattr(args, name, None) or 1 for name in (SIZES[1], SIZES[3])}
    out[SIZES[0]] = getattr(args, SIZES[0], None) or getattr(args, "model_parallel_size", None) or 1
    if config.get("num_moe_experts"):
        out["expert_tensor_parallel_size"] = getattr(args, SIZES[4], None)
    return out


def _all_first(files) -> bool:
    """Whether every file has the word embeddings: then they are of one pipeline stage."""
    return all("embedding.word_embeddings.weight" in next(iter(file.chunks.values())) for file in files.values())


def _stages(held: dict[Rank, RankFile], config, folder: Path) -> dict:
    """The layers of each stage, and the prediction layers, as the files hold them."""
    first = {rank.pp: file for rank, file in reversed(list(held.items()))}
    rows = [chunk for key in next(iter(held.values())).chunks for chunk in (first[pp].chunks[key] for pp in range(len(first)))]
    layers, extra = [_count(chunk, "decoder.layers.") for chunk in rows], [_count(chunk, "mtp.layers.") for chunk in rows]
    if sum(layers) != config.num_layers:
        raise ValueError(f"{folder} holds {sum(layers)} layers ({layers} by stage), config.json says {config.num_layers}; pass the "
                         f"--hf-ref that this checkpoint was made from, and all of its files.")
    text = "|".join("t" * n + "m" * bool(m) for n, m in zip(layers, extra))
    return dict(pipeline_model_parallel_layout=f"E{text}L" if len(rows) > 1 else None, mtp_num_layers=sum(extra),
                num_layers_in_first_pipeline_stage=None, num_layers_in_last_pipeline_stage=None,
                account_for_embedding_in_pipeline_split=False, account_for_loss_in_pipeline_split=False)


def _count(chunk, prefix: str) -> int:
    """One more than the highest layer number."""
    return 1 + max((int(name.removeprefix(prefix).split(".")[0]) for name in chunk if name.startswith(prefix)), default=-1)
