"""Run on ranks: parameters that are built, beside those that the dry run counts."""

import torch.distributed as dist

from tests.checkpoint.format_ranks import LAYOUTS


def stages(folders) -> dict:
    """{'case/layout': [(dense, expert) parameters counted, the same built]} on this rank, without weights."""
    from megatron_patch import layout, load_config, parallel
    from megatron_patch.model import build_chunks
    from megatron_patch.training.footprint import stage_sizes

    found = {}
    for kind, sizes in LAYOUTS[dist.get_world_size()].items():
        for case, folder in folders.items():
            config = load_config(folder, **sizes)
            if kind == "ep2" and not config.get("num_moe_experts"):
                continue
            parallel.initialize(config)
            counts = [0, 0]
            for chunk in build_chunks(config):
                for name, parameter in chunk.named_parameters():
                    counts[".experts." in name] += parameter.numel()
            stage = stage_sizes(config, 2, distributed_optimizer=False, grad_bytes=4, half=True)[parallel.place().pp]
            assert stage.layers == tuple(n for part in layout.stages(config)[parallel.place().pp] for n in part)
            found[f"{case}/{kind}"] = [[stage.dense, stage.expert], counts]
    return found
