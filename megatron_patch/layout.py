"""Who owns what: the split of layers over pipeline stages, and every layout mistake, found before any work.

One function, :func:`stages`, decides the split for training, loading, export and reports; it agrees with
megatron/core/transformer/transformer_block.py get_num_layers_to_build and transformer_layer.py
get_transformer_layer_offset (tests/upstream compares them).
"""

import re
from collections.abc import Mapping

from megatron_patch import upstream

# How pretrain calls what the messages speak of; a command with other flags passes its own, without those that it does not have.
FLAGS = {field: f"--{field.replace('_', '-')}" for field in (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "sequence_parallel", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout")}
FLAGS.update(num_layers_in_first_pipeline_stage="--decoder-first-pipeline-num-layers",
             num_layers_in_last_pipeline_stage="--decoder-last-pipeline-num-layers")
UNEVEN = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "num_layers_in_first_pipeline_stage",
          "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout")


def stages(config, flags: Mapping[str, str] = FLAGS) -> list[list[list[int]]]:
    """Global layer ids per pipeline rank, then per virtual stage. Raises ValueError, in terms of ``flags``, when the split does not work
    out."""
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    counts = _layout_counts(config, pp) if config.pipeline_model_parallel_layout else _counts(config, pp, vpp, flags)
    out, first = [[[] for _ in row] for row in counts], 0
    for stage in range(len(counts[0])):
        for rank in range(pp):
            out[rank][stage] = list(range(first, first + counts[rank][stage]))
            first += counts[rank][stage]
    if first != config.num_layers:
        raise ValueError(f"the pipeline split builds {first} layers, the model has {config.num_layers}; "
                         f"per stage: {[[len(s) for s in row] for row in out]}.")
    return out


def _counts(config, pp, vpp, flags):
    per_rank = _layers_per_rank(config, pp, flags)
    for rank, n in enumerate(per_rank):
        if n % vpp:
            raise ValueError(f"pipeline rank {rank} has {n} layers, not divisible by {vpp} virtual stages "
                             f"(num_layers {config.num_layers}, PP {pp}); choose virtual stages that divide {n}.")
    counts = [[n // vpp] * vpp for n in per_rank]
    counts[0][0] -= bool(config.account_for_embedding_in_pipeline_split)
    counts[-1][-1] -= bool(config.account_for_loss_in_pipeline_split)
    if min(min(row) for row in counts) < 0:
        raise ValueError(f"not enough layers ({config.num_layers}) for {pp} x {vpp} stages with embedding or loss counted as layers.")
    return counts


def _layers_per_rank(config, pp, flags):
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    extra = bool(config.account_for_embedding_in_pipeline_split) + bool(config.account_for_loss_in_pipeline_split)
    if first is None and last is None:
        total = config.num_layers + extra
        if total % pp:
            raise ValueError(f"{config.num_layers} layers{' + embedding/loss' if extra else ''} ({total}) cannot be split evenly over "
                             f"PP {pp}. {_suggest(config, pp, flags)}")
        return [total // pp] * pp
    if extra:
        raise ValueError("a first or last stage size cannot be combined with account-for-embedding/loss-in-pipeline-split; use one.")
    if pp == 1:
        raise ValueError("a first or last pipeline stage size needs pipeline-model-parallel-size > 1, found 1.")
    ends = (first or 0) + (last or 0)
    middle, rest = pp - (first is not None) - (last is not None), config.num_layers - ends
    if rest < 0 or (middle and (rest % middle or not rest)) or (not middle and rest):
        raise ValueError(f"{config.num_layers} layers minus first {first} and last {last} leave {rest} for {middle} middle stages; "
                         f"choose sizes so that the rest is a multiple of {max(middle, 1)}"
                         + (", and not 0." if middle else " (here exactly 0)."))
    mid = [rest // middle] * middle if middle else []
    return ([first] if first is not None else []) + mid + ([last] if last is not None else [])


def _suggest(config, pp, flags):
    n = config.num_layers
    near = [d for d in range(1, n + 1) if n % d == 0 and d <= pp][-1]
    if not set(UNEVEN) <= set(flags):
        return f"Use {flags['pipeline_model_parallel_size']} {near}."
    embedding, loss, first, last, free = (flags[field] for field in UNEVEN)
    if (n + 2) % pp == 0 and n + 2 >= 2 * pp:
        each = (n + 2) // pp
        split = [each - 1] + [each] * (pp - 2) + [each - 1]
        return f"{embedding} {loss} gives {split}; or set {first} and {last}."
    return f"Use PP {near}, or {first}/{last}, or {free}."


def parse_layout(text: str) -> list[str]:
    """Stages of a layout string such as 'Et|(t|)*2,tL'. Source: core pipeline_parallel_layer_layout.py."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, _repeated, text)
    unknown = set(text) - set("EtmL|")
    if unknown:
        raise ValueError(f"pipeline-model-parallel-layout has unknown characters {sorted(unknown)}; expected E, t, m, L and |.")
    return text.split("|")


def _repeated(match) -> str:
    if len(match.group(2)) > 4:
        raise ValueError(f"pipeline-model-parallel-layout repeats '{match.group(1)}' {match.group(2)} times; no model has so many layers.")
    return match.group(1) * int(match.group(2))


def _layout_counts(config, pp):
    layout = config.pipeline_model_parallel_layout
    rows = parse_layout(layout) if isinstance(layout, str) else ["".join({"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}
                                                                          [str(x).split(".")[-1].lower()] for x in row) for row in layout]
    if len(rows) % pp:
        raise ValueError(f"pipeline-model-parallel-layout has {len(rows)} stages, not a multiple of PP {pp}.")
    flat = "".join(rows)
    if not flat.startswith("E") or not flat.endswith("L") or flat.count("E") != 1 or flat.count("L") != 1:
        raise ValueError(f"pipeline-model-parallel-layout must start with its only E and end with its only L, found '{'|'.join(rows)}'.")
    if flat.count("t") != config.num_layers:
        raise ValueError(f"pipeline-model-parallel-layout has {flat.count('t')} decoder layers, the model has {config.num_layers}.")
    return [[rows[stage * pp + rank].count("t") for stage in range(len(rows) // pp)] for rank in range(pp)]


def check(config, world_size: int | None = None, seq_length: int | None = None, flags: Mapping[str, str] = FLAGS) -> None:
    """Raise ValueError for the first layout mistake: both numbers and what to do, by the names in ``flags`` (config field: flag).
    Sizes only, no process group."""
    _check_sizes(config)
    _check_tensor(config)
    _check_delta(config)
    _check_experts(config, flags)
    _check_pipeline(config, flags)
    _check_sequence(config, seq_length, flags)
    if world_size is not None:
        _check_world(config, world_size, flags)


def _sizes(config) -> dict:
    return dict(TP=config.tensor_model_parallel_size, PP=config.pipeline_model_parallel_size, CP=config.context_parallel_size,
                EP=config.expert_model_parallel_size, ETP=config.expert_tp)


def _check_sizes(config):
    for name, size in _sizes(config).items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive integer, found {size!r}.")


def _check_world(config, world_size, flags):
    sizes = _sizes(config)
    dense = sizes["TP"] * sizes["PP"] * sizes["CP"]
    if world_size % dense:
        raise ValueError(f"world size {world_size} is not a multiple of TP {sizes['TP']} x PP {sizes['PP']} x CP {sizes['CP']} = {dense}; "
                         f"start {dense} processes, or tell a dry run --world-size {dense}, or a multiple.")
    expert = sizes["ETP"] * sizes["EP"] * sizes["PP"]
    if world_size % expert:
        raise ValueError(f"world size {world_size} is not a multiple of expert TP {sizes['ETP']} x EP {sizes['EP']} x PP {sizes['PP']} = "
                         f"{expert}; lower EP or set {flags['expert_tensor_parallel_size']} 1.")


def _divides(what, number, by, size, hint):
    if number % size:
        raise ValueError(f"{what} {number} is not divisible by {by} {size}; {hint}")


def _divisors(number, limit):
    return [d for d in range(1, limit + 1) if number % d == 0]


def _check_tensor(config):
    tp, heads, groups = config.tensor_model_parallel_size, config.num_attention_heads, config.num_query_groups
    named = {"num_attention_heads": heads, "fused qkv rows": (heads + 2 * groups) * config.kv_channels}
    named |= {name: config.get(name) for name in ("ffn_hidden_size", "moe_shared_expert_intermediate_size") if config.get(name)}
    possible = [d for d in _divisors(heads, heads) if (groups % d == 0 or d % groups == 0) and all(n % d == 0 for n in named.values())]
    hint = f"TP can be {possible}."
    _divides("num_attention_heads", heads, "TP", tp, hint)
    if groups % tp and tp % groups:
        raise ValueError(f"num_query_groups {groups} vs TP {tp}: one must divide the other; {hint}")
    for name, number in named.items():
        _divides(name, number, "TP", tp, hint)
    if config.get("wide_qk_norm"):
        hint = f"the norm over all key heads cannot share a head; TP can be {_divisors(groups, groups)}."
        _divides("num_query_groups", groups, "TP", tp, hint)
    if config.get("attention_output_gate") and not upstream.gated_attention_shares_groups():
        hint = f"ranks share a gated group from megatron-core 0.17 on, found {upstream.CORE_TEXT}; TP can be {_divisors(groups, groups)}."
        _divides("num_query_groups", groups, "TP", tp, hint)


def _check_delta(config):
    """Gated delta nets cut their heads over TP, and over CP too."""
    if config.get("experimental_attention_variant") != "gated_delta_net":
        return
    cp, heads = config.context_parallel_size, config.linear_num_key_heads
    if cp > 1 and not upstream.delta_nets_cut_sequences():
        raise ValueError(f"CP {cp} with gated delta nets needs megatron-core 0.18 or later, found {upstream.CORE_TEXT}; use CP 1.")
    _divides("linear_num_key_heads", heads, "TP x CP", config.tensor_model_parallel_size * cp,
             f"TP x CP can be {_divisors(heads, heads)}.")


def _check_experts(config, flags):
    experts, ep = config.get("num_moe_experts"), config.expert_model_parallel_size
    if not experts:
        if ep > 1:
            raise ValueError(f"{flags['expert_model_parallel_size']} {ep} needs a mixture-of-experts model; this one has no experts.")
        return
    _divides("num_moe_experts", experts, "EP", ep, f"EP can be {_divisors(experts, experts)}.")
    ffn = config.get("moe_ffn_hidden_size") or config.ffn_hidden_size
    _divides("moe_ffn_hidden_size", ffn, "expert TP", config.expert_tp, f"set {flags['expert_tensor_parallel_size']} to a divisor.")
    if config.get("moe_pad_expert_input_to_capacity") and config.get("moe_token_dispatcher_type") == "allgather":
        raise ValueError("--moe-pad-expert-input-to-capacity does nothing with --moe-token-dispatcher-type allgather; use alltoall.")
    topk = config.get("moe_router_topk", 2)
    if topk > experts:
        raise ValueError(f"moe_router_topk {topk} is larger than num_moe_experts {experts}.")
    softmax = config.get("moe_router_score_function", "softmax") == "softmax" and config.get("moe_router_load_balancing_type") != "sinkhorn"
    if topk == 1 and softmax and config.get("moe_router_pre_softmax") is False:
        raise ValueError("one expert per token, renormalised, has the weight 1 always: Megatron-core does not train such a router. Use a "
                         "checkpoint with two or more experts per token, or one that does not renormalise (norm_topk_prob false).")


def _check_pipeline(config, flags):
    vpp = config.virtual_pipeline_model_parallel_size
    if vpp is not None and config.pipeline_model_parallel_size < 2:
        raise ValueError(f"virtual pipeline size {vpp} needs {flags['pipeline_model_parallel_size']} > 1, "
                         f"found {config.pipeline_model_parallel_size}.")
    split = stages(config, flags)
    if config.pipeline_model_parallel_layout and vpp is not None and len(split[0]) != vpp:
        raise ValueError(f"pipeline-model-parallel-layout has {len(split[0])} virtual stages per rank, "
                         f"virtual pipeline size is {vpp}; drop one of the two.")


def _check_sequence(config, seq_length, flags):
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    if config.sequence_parallel and tp < 2:
        raise ValueError(f"{flags['sequence_parallel']} needs {flags['tensor_model_parallel_size']} > 1, found {tp}; drop it.")
    if cp > 1 and config.get("prefix_tokens"):
        raise ValueError(f"CP {cp} does not go with this model's attention, whose context sees itself in both directions; use CP 1.")
    if seq_length is None:
        return
    if config.position_embedding_type == "learned_absolute" and seq_length > config.max_position_embeddings:
        raise ValueError(f"seq_length {seq_length} exceeds the {config.max_position_embeddings} positions that this model has learned; "
                         f"use a shorter sequence.")
    limit = config.rope.limit(config.max_position_embeddings)
    if limit and seq_length > limit:
        raise ValueError(f"seq_length {seq_length} exceeds {limit}: dynamic rope scaling is exact only up to max_position_embeddings; "
                         f"use a shorter sequence.")
    if cp > 1:
        _divides("seq_length", seq_length, "2 x CP", 2 * cp, "context parallelism cuts a sequence into 2 x CP chunks.")
    if config.sequence_parallel:
        _divides("seq_length / CP", seq_length // cp, "TP", tp, "sequence parallelism cuts the sequence over TP ranks.")
