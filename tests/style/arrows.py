"""The one-way flow of imports: who may import whom (the table), and what an import statement names (the reader)."""

import ast

# From the bottom up. A module may import what stands on a lower line, and its own unit; never its own line or a higher
# one. A unit covers its submodules; the longest matching name counts.
LEVELS = (
    ("megatron_patch",),
    ("megatron_patch.main_grad",),
    ("megatron_patch.packing", "megatron_patch.own", "megatron_patch.platform", "megatron_patch.upstream", "megatron_patch.launch",
     "megatron_patch.notices"),
    ("megatron_patch.slots",),
    ("megatron_patch.family",),
    ("megatron_patch.registry", "model_zoo"),
    ("megatron_patch.rope",),
    ("megatron_patch.translate",),
    ("megatron_patch.layout",),
    ("megatron_patch.parallel",),
    ("megatron_patch.layers",),
    ("megatron_patch.delta",),
    ("megatron_patch.spec",),
    ("megatron_patch.model",),
    ("megatron_patch.checkpoint", "megatron_patch.optim", "megatron_patch.fp8", "megatron_patch.data"),
    ("megatron_patch.training", "megatron_patch.generation"),
    ("megatron_patch.pretrain", "megatron_patch.verification"),
    ("toolkits", "rlhf"),
    ("examples",),
)
LEVEL = {unit: level for level, units in enumerate(LEVELS) for unit in units}

# The declarations say what a family is: they need neither megatron nor a process group.
DECLARATIONS = tuple(f"megatron_patch.{name}" for name in "packing slots family registry rope translate layout".split())
DECLARATIONS = (*DECLARATIONS, "model_zoo")
PLAN = "megatron_patch.checkpoint.plan"


def within(module: str, unit: str) -> bool:
    """Whether ``module`` is ``unit`` or lies below it."""
    return module == unit or module.startswith(unit + ".")


def unit_of(module: str) -> str | None:
    """The unit of the table that covers a module of ours; None when the table has no place for it. The package
    'megatron_patch' itself covers only its own __init__.py."""
    units = [unit for unit in LEVEL if within(module, unit) and (unit != "megatron_patch" or module == unit)]
    return max(units, key=len, default=None)


def imports(source: str, module: str, modules: set[str], package: bool = False) -> list[tuple[int, str]]:
    """(line, module) for each import statement of ``source``, anywhere in the file. ``from x import y`` names x.y when
    that is one of ``modules``, else x. Relative imports are resolved against ``module``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, package)
            names = [f"{base}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name if name in modules else base) for name in names]
    return found


def _absolute(node: ast.ImportFrom, module: str, package: bool) -> str:
    if not node.level:
        return node.module
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + package]
    return ".".join([*parts, node.module] if node.module else parts)


def wrong_way(source: str, module: str, modules: set[str], package: bool = False) -> list[str]:
    """A message for each import of ``source`` that goes against the table."""
    unit = unit_of(module)
    if unit is None:
        return [f"{module}: has no place in LEVELS; add it where it belongs"]
    problems = []
    for line, target in imports(source, module, modules, package):
        other = unit_of(target)
        if target.split(".")[0] in ("tests", "benchmarks"):
            problems.append(f"{module}:{line} imports {target}, which is not installed")
        elif other and other != unit and LEVEL[other] >= LEVEL[unit] and not _discovery(module, target):
            problems.append(f"{module}:{line} imports {target}, which stands beside or above it")
        if any(within(module, part) for part in (*DECLARATIONS, PLAN)) and _heavy(target):
            problems.append(f"{module}:{line} imports {target}; declarations know no megatron and no process group")
    return problems


def _discovery(module: str, target: str) -> bool:
    """The registry finds families by listing model_zoo's folder: it names the package, no module of it."""
    return module == "megatron_patch.registry" and target == "model_zoo"


def _heavy(target: str) -> bool:
    return within(target, "megatron") or within(target, "torch.distributed")
