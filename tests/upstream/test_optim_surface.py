"""The optimizer classes against the installed core's own signatures; options that cannot work here. One process, no group."""

import inspect

from tests.groups import run_ranks


def surface():
    """Public methods whose parameters do not cover upstream's, and the errors of check_options."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    from megatron_patch.optim.build import check_options
    from megatron_patch.optim.chained import ChainedOptimizer
    from megatron_patch.optim.distributed import DistributedOptimizer

    missing = []
    for ours, theirs in ((DistributedOptimizer, distrib_optimizer.DistributedOptimizer), (ChainedOptimizer, optimizer.ChainedOptimizer)):
        for name, method in inspect.getmembers(theirs, inspect.isroutine):
            if not name.startswith("_") or name == "__init__":
                missing += [f"{ours.__name__}.{name}: {found}" for found in _uncovered(getattr(ours, name), method)]
    changed = [name for name in vars(DistributedOptimizer) if callable(vars(DistributedOptimizer)[name])]
    return {"missing": missing, "changed": changed, "errors": _option_errors(check_options)}


def _uncovered(ours, theirs):
    """Upstream's parameters that ours lacks, has at another place or with another default."""
    mine, needed = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    for place, (name, parameter) in enumerate(needed.items()):
        default = parameter.default if parameter.default is not inspect.Parameter.empty and parameter.default != {} else None
        if name not in mine or list(mine).index(name) != place:
            yield name
        elif default is not None and mine[name].default != parameter.default:
            yield f"{name}={mine[name].default}, upstream {parameter.default}"


def _option_errors(check_options):
    errors = {}
    for flags in (
        ("use_precision_aware_optimizer",),
        ("optimizer_cuda_graph",),
        ("optimizer_cpu_offload",),
        ("use_precision_aware_optimizer", "optimizer_cpu_offload"),
        (),
    ):
        try:
            check_options(**dict.fromkeys(flags, True), lr=1.0)
            errors["+".join(flags)] = None
        except ValueError as error:
            errors["+".join(flags)] = str(error)
    return errors


def test_every_public_method_takes_upstreams_parameters_and_bad_options_are_named():
    """Signatures of the installed core are covered, name, place and default; precision-aware state and CUDA graphs without
    Transformer Engine and the pair with CPU offload are refused by flag (B76); CPU offload alone is not."""
    (found,) = run_ranks(1, "tests.upstream.test_optim_surface:surface", timeout=120)
    assert found["missing"] == []
    assert "sharded_param_state_fully_reshardable" in found["changed"]
    errors = found["errors"]
    assert errors[""] is None and errors["optimizer_cpu_offload"] is None
    assert "--use-precision-aware-optimizer needs" in errors["use_precision_aware_optimizer"]
    assert "--optimizer-cuda-graph needs" in errors["optimizer_cuda_graph"]
    pair = errors["use_precision_aware_optimizer+optimizer_cpu_offload"]
    assert "--optimizer-cpu-offload" in pair and "--use-precision-aware-optimizer" in pair
