"""Ranked bodies of the optimizer tests; each runs on all ranks of one process group (tests/groups.py) and returns JSON."""

from pathlib import Path

import megatron.core.optimizer as upstream
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_patch.optim import build, distributed
from megatron_patch.optim.resume import check_resumable, saved_sharding
from tests.upstream.optim_job import KEYS, Job, differences, forward_backward, shared_folder

MOE = dict(moe=True)


FOLDER = None  # where worlds of different sizes leave checkpoints for each other


def run(names, folder=None):
    """{name: result} of the cases named, in order, in this one process group; `folder` outlives it."""
    global FOLDER
    FOLDER = folder and Path(folder)
    return {name: CASES[name]() for name in names}


def leave_for_other_world():
    """Save the DP2 state in both formats and, gathered on one rank, in the memory-saving one."""
    for name in LEFT:
        job = Job(dtype="bf16")
        job.train(0, 3)
        if dist.get_rank() == 0:
            (FOLDER / name).mkdir()
        dist.barrier()
        job.save(FOLDER / name, name.partition(" ")[0], saves_memory="gathered" in name)


def take_from_other_world():
    """Restore what another number of data-parallel ranks saved, and go on with another learning rate."""
    kinds = [name.partition(" ")[0] for name in LEFT]
    return [_restored(dict(dtype="bf16", lr=5e-3), FOLDER / name, kind) for name, kind in zip(LEFT, kinds)]


def learning_rate_after_load():
    """Upper limits of the learning rate in the param groups after a resume with another --lr than the checkpoint's."""
    with shared_folder() as folder:
        job = Job()
        job.train(0, 1)
        job.save(folder)
        job = Job(lr=5e-3)
        job.load(folder)
        return sorted({group["max_lr"] for group in job.optimizer.param_groups})


LEFT = ("fully_reshardable", "fully_reshardable gathered", "dp_reshardable")


def reshard(save, loads, kind="fully_reshardable", save_build=build.build_optimizer):
    """Train in layout `save`, save, restore in every layout of `loads`. Per layout: states that differ from those before
    the save, parameters that are not the fp32 master cast down, steps taken, parameters unequal across DP."""
    with shared_folder() as folder:
        job = Job(build=save_build, **save)
        job.train(0, 3)
        job.save(folder, kind)
        return [_restored(layout, folder, kind) for layout in loads]


def _restored(layout, folder, kind):
    job = Job(seed=2, **layout)
    truth = job.load(folder, kind)
    state, model = job.full_state(), job.model_params()
    cast = sorted(name for name in model if not torch.equal(state[name]["param"].to(job.dtype), model[name]))
    return {"differ": differences(truth, state), "not_cast_down": cast, "steps": job.steps_taken(), "unequal": _unequal(job)}


def _unequal(job):
    """Dense parameters that are not the same on all ranks of the DP group."""
    group, names = parallel_state.get_data_parallel_group(), []
    for name, param in job.named():
        if getattr(param, "allreduce", True):
            copies = [torch.empty_like(param) for _ in range(group.size())]
            dist.all_gather(copies, param.detach().contiguous(), group=group)
            names += [name] if any(not torch.equal(copies[0], copy) for copy in copies) else []
    return names


def continuation(kind="fully_reshardable", **layout):
    """Six steps against three, save, load, three: names whose parameter or moment differs, and both lists of gradient norms."""
    with shared_folder() as folder:
        whole = Job(**layout)
        norms = whole.train(0, 6)
        first = Job(**layout)
        first.train(0, 3)
        first.save(folder, kind)
        resumed = Job(**{**layout, "seed": 2})
        resumed.load(folder, kind)
        again = resumed.train(3, 6)
        differ = differences(whole.full_state(), resumed.full_state())
        model = whole.model_params()
        differ += [name for name, param in resumed.model_params().items() if not torch.equal(param, model[name])]
        scales = [float(job.optimizer.get_loss_scale()) for job in (whole, resumed)]
        return {"differ": differ, "norms": [norms[3:], again], "scales": scales, "classes": _classes(resumed)}


def _classes(job):
    return [type(part).__name__ for part in getattr(job.optimizer, "chained_optimizers", [job.optimizer])]


def upstream_save_is_shifted(bucket_size):
    """What unmodified core saves, read back here: how many states differ (several padded buckets; one bucket)."""
    result = reshard(dict(bucket_size=bucket_size), [dict(bucket_size=bucket_size)], save_build=upstream.get_megatron_optimizer)
    return len(result[0]["differ"])


def upstream_dp_reshardable():
    """The errors unmodified core ends with on every rank: saving a shard without a parameter, then loading fp32 parameters."""
    errors = []
    job = Job(bucket_size=1, build=_upstream_class_with_our_adam)
    job.train(0, 1)
    errors.append(
        _error(lambda: job.optimizer.sharded_state_dict(job.model_state("dp_reshardable"), metadata=job.metadata("dp_reshardable")))
    )
    job = Job(bucket_size=None, build=_upstream_class_with_our_adam)
    job.train(0, 1)
    state = job.optimizer.chained_optimizers[0].get_parameter_state_dp_reshardable()
    for entry in (entry for buckets in state[0].values() for bucket in buckets for entry in bucket):
        entry["padding"] = False
    errors.append(_error(lambda: job.optimizer.chained_optimizers[0].load_parameter_state_from_dp_reshardable(state)))
    return errors


def _upstream_class_with_our_adam(config, chunks):
    optimizer = build.build_optimizer(config, chunks)
    for part in optimizer.chained_optimizers:
        part.__class__ = distributed.upstream.DistributedOptimizer
        part.state_dict = lambda part=part: distributed.DistributedOptimizer.state_dict(part)
    return optimizer


def _error(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def refusals():
    """{situation: message} of checkpoints that this run's optimizer cannot read, asked before the load."""
    messages = {}
    with shared_folder() as folder:
        for name, layout, kind in (
            ("fully", {}, "fully_reshardable"),
            ("dp", {}, "dp_reshardable"),
            ("plain", dict(distributed=False), "fully_reshardable"),
        ):
            job = Job(**layout)
            job.train(0, 1)
            if dist.get_rank() == 0:
                (folder / name).mkdir()
            dist.barrier()
            job.save(folder / name, kind)
            messages[f"saved {name}"] = saved_sharding(folder / name)
        for name, layout in (
            ("fully", dict(distributed=False)),
            ("plain", {}),
            ("dp", dict(bucket_size=3000)),
            ("dp", {}),
            ("fully", dict(bucket_size=3000)),
        ):
            job = Job(**layout)
            messages[f"{name} into {layout}"] = _error(lambda job=job, name=name: check_resumable(folder / name, job.optimizer))
        job = Job(bucket_size=3000)
        state = Job().optimizer.chained_optimizers[0].get_parameter_state_dp_reshardable()
        part = job.optimizer.chained_optimizers[0]
        messages["load"] = _error(lambda: part.load_parameter_state_from_dp_reshardable(state))
        messages["plain state"] = _error(lambda: part.load_state_dict({"state": {}, "param_groups": []}))
    return messages


def build_is_scoped():
    """Names of megatron.core.optimizer before, inside and after a build, after a build that fails, and the config's fields."""
    names = [name for name, _, _ in build.stand_ins()]
    before = [getattr(upstream, name) for name in names]
    seen = []
    with build.upstream_classes(), build.upstream_classes():
        seen.append(all(getattr(upstream, name) is value for name, value, _ in build.stand_ins() if not isinstance(value, bool)))
    seen.append([getattr(upstream, name) for name in names] == before)
    Job()
    error = _error(lambda: Job(optimizer="none such"))
    seen.append([getattr(upstream, name) for name in names] == before)
    job = Job(optimizer_cpu_offload=True)
    adam = type(job.optimizer.chained_optimizers[0].optimizer).__name__
    return {"seen": seen, "error": error, "names": names, "classes": _classes(job), "adam": adam}


def grad_norm_with_experts():
    """[norm reported with EP2, norm of the whole gradient of the same model and tokens without EP, that of EP2's after the clip]"""
    tokens = torch.randint(0, 104, (4, 17), generator=torch.Generator().manual_seed(5))
    with shared_folder() as folder:
        reference = Job(bucket_size=None, **MOE)
        reference.train(0, 1)
        reference.save(folder)
        seen = []
        for layout in (dict(ep=2), {}):
            job = Job(bucket_size=None, clip_grad=0.05, **MOE, **layout)
            job.load(folder)
            forward_backward(job, tokens)
            job.optimizer.prepare_grads()
            whole = _whole_gradient(job)
            _, norm, _ = job.optimizer.step()
            seen.append((float(norm), whole, _whole_gradient(job)))
    return [seen[0][0], seen[1][1], seen[0][2]]


def _whole_gradient(job):
    """Norm of the full gradient, from main gradients gathered over DP and experts gathered over EP; nothing of clip_grads.py."""
    squares = torch.zeros((), dtype=torch.float64)
    for part in job.optimizer.chained_optimizers:
        for param in (param for buffer in part.buffers for param in buffer.params):
            grad = torch.zeros(param.numel(), dtype=torch.float64)
            if param in part.model_param_gbuf_map:
                owned = part._get_model_param_range_map(param)["param"]
                index, order = part.model_param_group_index_map[param]
                grad[owned.start : owned.end] = part.optimizer.param_groups[index]["params"][order].grad.double()
            squares += grad.square().sum()
    dist.all_reduce(squares)  # every element has one owner in the whole world here (TP1, PP1)
    return squares.sqrt().item()


def gather_overlap():
    """Losses of four real iterations with the parameter gather overlapped and not."""
    tokens = torch.randint(0, 104, (4, 4, 17), generator=torch.Generator().manual_seed(6))
    curves = []
    for gather in (False, True):
        job = Job(gather=gather, bucket_size=2000)
        curves.append([])
        for batch in tokens:
            curves[-1].append(forward_backward(job, batch))
            job.optimizer.step()
    return curves


def tied_gradients(pp):
    """Tied embedding, hand-written gradients rank + 1: [this rank's embedding gradient after finalize, copies equal after 5 steps]."""
    from megatron.core.distributed import finalize_model_grads

    job = Job(pp=pp, tied=True, overlap=False, bucket_size=None)
    for _, param in job.named():
        param.main_grad.fill_(float(dist.get_rank() + 1))
    finalize_model_grads(job.chunks, None)
    grad = _tied_gradient(job)
    for number in range(5):
        for _, param in job.named():
            param.main_grad.copy_(torch.sin(param.detach() * 37 + number + dist.get_rank()))
        finalize_model_grads(job.chunks, None)
        job.optimizer.step()
    return [grad, _tied_copies_equal(job)]


def _tied_gradient(job):
    """The one value of the embedding's reduced gradient, read from the shard that this rank owns; None where it owns none."""
    job.optimizer.prepare_grads()
    weight = job.bare[0].shared_embedding_or_output_weight()
    part = job.optimizer.chained_optimizers[0]
    if weight not in part.model_param_gbuf_map:
        return None
    index, order = part.model_param_group_index_map[weight]
    return sorted(set(part.optimizer.param_groups[index]["params"][order].grad.tolist()))


def _tied_copies_equal(job):
    weight = job.bare[0].shared_embedding_or_output_weight().detach().contiguous()
    copies = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, weight)
    return all(torch.equal(copies[0], copy) for copy in copies)


def state_oracle():
    """Whole main parameters and moments after three steps against torch.optim.AdamW on the same values: worst difference.
    Clipping is off, so that each parameter can be followed alone."""
    job = Job(bucket_size=2000, clip_grad=0.0)
    theirs = {name: torch.nn.Parameter(param.detach().clone()) for name, param in job.named()}
    # norms decay too: wd_mult is applied by the scheduler, and there is none here
    oracle = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.1, fused=True)
    job.train(0, 3)
    for number in range(3):
        for param in theirs.values():
            param.grad = torch.sin(param.detach() * 37 + number)
        oracle.step()
    state, worst = job.full_state(), 0.0
    for name, param in theirs.items():
        want = {"param": param.detach(), **oracle.state[param]}
        worst = max([worst] + [(state[name][key] - want[key]).abs().max().item() for key in KEYS])
    return worst


CASES = {
    "fp32 buckets": lambda: reshard(dict(), [dict(bucket_size=3000), dict(overlap=False), dict(bucket_size=1)]),
    "bf16 buckets": lambda: reshard(dict(dtype="bf16", bucket_size=3000), [dict(dtype="bf16"), dict(dtype="bf16", overlap=False)]),
    "fp16 buckets": lambda: reshard(dict(dtype="fp16", overlap=False), [dict(dtype="fp16")]),
    "bf16 layouts": lambda: reshard(
        dict(dtype="bf16"), [dict(dtype="bf16", **layout) for layout in (dict(tp=2), dict(pp=2), dict(pp=2, vp=2), dict(bucket_size=3000))]
    ),
    "fp32 from pp2": lambda: reshard(dict(pp=2, vp=2), [dict(tp=2, bucket_size=3000), dict(), dict(pp=2)]),
    "experts split": lambda: reshard(
        dict(ep=2, **MOE), [dict(tp=2, **MOE), dict(**MOE), dict(pp=2, **MOE), dict(ep=2, bucket_size=3000, **MOE)]
    ),
    "experts whole": lambda: reshard(dict(tp=2, **MOE), [dict(ep=2, **MOE)]),
    "dp_reshardable fp32": lambda: reshard(dict(bucket_size=1, **MOE), [dict(bucket_size=1, **MOE)], "dp_reshardable"),
    "dp_reshardable bf16": lambda: (
        reshard(dict(dtype="bf16", ep=2, **MOE), [dict(dtype="bf16", ep=2, **MOE)], "dp_reshardable")
        if dist.get_world_size() > 1
        else reshard(dict(dtype="bf16"), [dict(dtype="bf16")], "dp_reshardable")
    ),
    **{f"continue {dtype}": lambda dtype=dtype: continuation(dtype=dtype) for dtype in ("fp32", "bf16", "fp16")},
    **{f"continue plain {dtype}": lambda dtype=dtype: continuation(dtype=dtype, distributed=False) for dtype in ("fp32", "bf16", "fp16")},
    "continue experts": lambda: continuation(dtype="bf16", ep=2, **MOE),
    "upstream shifted": lambda: [upstream_save_is_shifted(1000), upstream_save_is_shifted(None)],
    "upstream dp_reshardable": upstream_dp_reshardable,
    "refusals": refusals,
    "scoped": build_is_scoped,
    "oracle": state_oracle,
    "grad norm": grad_norm_with_experts,
    "gather overlap": gather_overlap,
    "learning rate": learning_rate_after_load,
    "leave": leave_for_other_world,
    "take": take_from_other_world,
    "tied pp2": lambda: tied_gradients(2),
}
