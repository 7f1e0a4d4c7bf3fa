"""Run on ranks: one training step on hand-made samples of which unequal numbers of tokens count, its gradient as a Hugging Face folder."""

import torch

from tests.families import tiny
from tests.training.jobs import LAYOUTS, settings_of

COUNTED = (32, 20, 3, 1, 7, 32, 2, 11)  # tokens with a loss, of 32, in each of 8 samples; 44 and 64 on two data-parallel ranks
LENGTH = 32


def samples() -> list[dict]:
    """The global batch: tokens, labels, position_ids [1, 32] and loss_mask [1, 32], one dict a sample."""
    ids = tiny.tokens(len(COUNTED), LENGTH + 1, seed=21)
    place = torch.arange(LENGTH)
    return [{"tokens": row[None, :-1], "labels": row[None, 1:], "position_ids": place[None], "loss_mask": (place < count).float()[None]}
            for row, count in zip(ids, COUNTED)]


def save_expected(folder: str, out) -> dict:
    """{'loss', 'tokens'} of Transformers' model in ``folder`` on the whole batch in one process; its gradient is saved to ``out``."""
    import transformers

    batch = {name: torch.cat([sample[name] for sample in samples()]) for name in samples()[0]}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    loss = tiny.save_gradients(model, out, batch["tokens"], batch["labels"], batch["loss_mask"])
    return {"loss": loss, "tokens": sum(COUNTED)}


def steps(models: dict, data: str, cases: list, out: str) -> dict:
    """{case: [loss, tokens, gradient norm]} as the run reports them; the gradient of the case goes to the folder ``out``/case.

    A case is [name, model, layout, flags]. With the distributed optimizer a rank has only its part: no folder.
    """
    return {name: _step(models[model], data, {**LAYOUTS[layout], **flags}, f"{out}/{name}") for name, model, layout, flags in cases}


def _step(folder, data, flags, out) -> list:
    import torch.distributed as dist

    from megatron_patch.training.assemble import assemble
    from megatron_patch.training.extra_losses import ExtraLosses
    from megatron_patch.training.model_source import model_config
    from megatron_patch.training.step import train_step

    flags = {"micro_batch_size": 1, "global_batch_size": len(COUNTED), "clip_grad": 0.5, **flags}
    settings = settings_of(folder, data, **flags)
    job = assemble(settings, model_config(settings), dist.get_world_size())
    for chunk in job.chunks:
        chunk.train()
    found, update = {}, job.optimizer.step
    job.optimizer.step = lambda: (found.update(gradients(job)), update())[1]  # before the clip
    outcome = train_step(job, iter(samples()[job.at.dp::job.length.data_parallel]), ExtraLosses(job.config))
    if not flags.get("use_distributed_optimizer"):
        save(job, found, out, folder)
    return [outcome.lm_loss, outcome.tokens, outcome.grad_norm]


def gradients(job) -> dict:
    """{parameter: its gradient} on this rank, scaled as the optimizer takes it (a factor may wait in the DDP chunk)."""
    return {p: p.main_grad * getattr(chunk, "pending", 1.0) for chunk in job.chunks for p in chunk.parameters()}


@torch.no_grad()
def save(job, found: dict, out: str, folder: str) -> None:
    """Gradients take the place of the weights and leave through save_hf: every name and slice is compared."""
    from megatron_patch import save_hf

    for p, gradient in found.items():
        p.copy_(gradient)
    save_hf(job.chunks, out, folder)
