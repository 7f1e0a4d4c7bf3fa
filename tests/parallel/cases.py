"""Run on one rank: what users ran into, of single families most of it, and what those refuse."""

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from tests.parallel.parity import load


def everything(folders: dict, out: str) -> dict:
    """What test_cases asks for, by name."""
    return dict(norm_head=norm_head(folders["baichuan2"], out), target=target(folders["qwen2"]),
                routed=routed(folders["qwen3_moe"]),
                rows=rows_without_context(folders["chatglm"]), modes=modes(folders["qwen_beyond"]), short=short(folders["phi3_long"]),
                refusals={name: refusal(*case) for name, case in REFUSED(folders).items()})


def norm_head(folder, out) -> list:
    """[how far ten times larger head rows move the logits, that the export holds these rows bitwise]."""
    from megatron_patch import save_hf
    from megatron_patch.generation.forward import full_logits

    _, chunks = load(folder, "one")
    expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
    chunks[0].output_layer.weight.data.mul_(10)
    moved = (full_logits(chunks, expected["tokens"]) - expected["logits"]).abs().max().item()
    save_hf(chunks, f"{out}/ten", folder)
    raw = load_file(f"{folder}/model.safetensors")["lm_head.weight"]
    return [moved, torch.equal(load_file(f"{out}/ten/model.safetensors")["lm_head.weight"], raw * 10)]


def target(folder) -> list:
    """[sum of our losses of the last 4 labels of a row, the same from the original's logits]."""
    _, (chunk,) = load(folder, "one")
    expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
    ids, labels = expected["tokens"][:1], expected["labels"][:1]
    mask = torch.zeros(labels.shape)
    mask[:, -4:] = 1
    losses = chunk(ids, torch.arange(ids.shape[1])[None], None, labels=labels, loss_mask=mask)
    shares = expected["logits"][:1].log_softmax(-1).gather(-1, labels[..., None])[0, -4:]
    return [(losses * mask).sum().item(), -shares.sum().item()]


def routed(folder) -> dict:
    """{dispatcher and capacity factor: share of the tokens x top-k choices that reach an expert}."""
    from megatron_patch.generation.forward import full_logits
    from tests.families import tiny

    out = {}
    for dispatcher in ("alltoall", "allgather"):
        for factor in (None, 0.5):
            config, chunks = load(folder, "one", moe_token_dispatcher_type=dispatcher, moe_expert_capacity_factor=factor)
            maps = []
            for layer in chunks[0].decoder.layers:
                layer.mlp.router.register_forward_hook(lambda module, args, found, maps=maps: maps.append(found[1]))
            full_logits(chunks, tiny.tokens())
            choices = tiny.tokens().numel() * config.moe_router_topk * len(maps)
            out[f"{dispatcher} {factor}"] = sum(int(routing.sum()) for routing in maps) / choices
    return out


def modes(folder) -> list:
    """Distance from the original in training and then, the same tokens, in inference: beyond seq_length they differ."""
    from tests.families import tiny

    _, (chunk,) = load(folder, "one")
    original, ids, out = tiny.build("qwen_beyond"), tiny.tokens(), []
    for training in (True, False):
        chunk.train(training), original.train(training)
        with torch.no_grad():
            ours, theirs = chunk(ids, torch.arange(ids.shape[1]).expand_as(ids), None), original(ids).logits
        out.append((ours[..., :theirs.shape[-1]] - theirs).abs().max().item())
    return out


def short(folder) -> float:
    """Distance from the original at 64 tokens, for which longrope has its short factors, after a longer sequence."""
    from megatron_patch.generation.forward import full_logits
    from tests.families import tiny

    _, chunks = load(folder, "one")
    ids = tiny.tokens()
    full_logits(chunks, ids)
    with torch.no_grad():
        theirs = tiny.build("phi3_long")(ids[:, :64]).logits
    return (full_logits(chunks, ids[:, :64]) - theirs).abs().max().item()


def rows_without_context(folder) -> str:
    """What a row without bos is told."""
    from megatron_patch.generation.forward import full_logits

    _, chunks = load(folder, "one")
    return refusal(lambda: full_logits(chunks, torch.full((1, 16), 7)))


def REFUSED(folders) -> dict:  # noqa: N802
    """{name: (function, arguments)} of what raises."""
    from megatron_patch import spec

    def build(case, layer_impl="native", **fields):
        from megatron_patch import load_config
        from megatron_patch.model import transformer_config

        spec.block_spec(transformer_config(load_config(folders[case]).replace(**fields)), layer_impl)

    again = dict(recompute_granularity="selective", recompute_modules=["layernorm"])
    cut = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    return dict(stock=(spec.bloom, None), stock_biases=(spec.gpt_oss, None), te_biases=(lambda: build("gpt_oss", "te", **cut),),
                layernorm=(lambda: build("falcon", **again),), wide=(lambda: check("olmo2", 4),),
                prefix=(lambda: check("chatglm", context_parallel_size=2),), learned=(lambda: check("opt", seq_length=129),),
                pad=(lambda: check("qwen3_moe", moe_pad_expert_input_to_capacity=True, moe_token_dispatcher_type="allgather"),),
                delta_te=(lambda: build_delta("te"),), delta_heads=(lambda: check("qwen3_next", 2, linear_num_key_heads=3),),
                delta_documents=(documents, folders["qwen3_next"]))


def build_delta(layer_impl):
    """What a block with gated delta nets is told about ``layer_impl``."""
    from megatron_patch import delta

    delta.require(SimpleNamespace(experimental_attention_variant="gated_delta_net"), layer_impl)


def documents(folder):
    """A pass through Qwen3-Next with documents of their own."""
    from megatron_patch.generation.forward import full_logits

    _, chunks = load(folder, "one")
    full_logits(chunks, torch.full((1, 16), 7), torch.zeros(1, 16, dtype=torch.int32))


def check(name, tp=1, seq_length=None, **fields):
    """layout.check of a tiny model."""
    from megatron_patch import layout, translate
    from tests.families import tiny

    config = translate.from_hf(tiny.raw_config(name)).replace(tensor_model_parallel_size=tp, **fields)
    layout.check(config, seq_length=seq_length)


def refusal(function, *arguments) -> str:
    """The message of the ValueError that ``function`` raises."""
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return "nothing was refused"
