"""The style rules as functions of a file's text. Each returns messages, one a fault; none means the file is fine."""

import ast
import re

MAX_LINES = 400
VERSION_FILE = "megatron_patch/upstream.py"

NAME = re.compile(r"(^|_)(utils?|misc|helpers?)(_|$)")
# Written as patterns so that this file does not hold what it looks for.
HOST = re.compile(r"\b(pypi[.](org|nvidia)|pythonhosted[.]org|download[.]pytorch[.]org|registry[.]npmjs)")
MACHINE_PATH = re.compile(r"(?<![\w.~$/})*-])/(work|root|tmp|home/[a-z]\w*)(?=[/'\"\s)`:,]|$)")


def file_length(path: str, source: str) -> list[str]:
    """No file that a reader cannot hold."""
    lines = source.count("\n")
    return [f"{path}: {lines} lines, at most {MAX_LINES}"] if lines > MAX_LINES else []


def telling_name(path: str) -> list[str]:
    """A file or folder says what it holds."""
    parts = [part.split(".")[0] for part in path.lower().split("/")]
    return [f"{path}: '{part}' says nothing; name its one job" for part in parts if NAME.search(part)]


def no_machine(path: str, source: str) -> list[str]:
    """No package host and no path of somebody's machine."""
    return [
        f"{path}:{number}: '{match.group().strip()}' belongs to one machine or host"
        for number, line in enumerate(source.splitlines(), 1)
        for match in (HOST.search(line), MACHINE_PATH.search(line))
        if match
    ]


def no_version_branch(path: str, tree: ast.Module) -> list[str]:
    """Only upstream.py asks which megatron-core it runs on."""
    if path == VERSION_FILE:
        return []
    return [
        f"{path}:{node.lineno}: asks for megatron-core's version; only {VERSION_FILE} may"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Compare) and any(_is_core(side) for side in (node.left, *node.comparators)))
        or _reads_version(node)
    ]


def _is_core(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):
        return _is_core(node.value)
    return getattr(node, "id", getattr(node, "attr", "")) in ("CORE", "CORE_TEXT")


def _reads_version(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "__version__":
        return _dotted(node.value) in ("megatron", "megatron.core", "mcore")
    if not isinstance(node, ast.Call) or _dotted(node.func).split(".")[-1] != "version":
        return False
    return any(isinstance(a, ast.Constant) and a.value in ("megatron-core", "megatron_core") for a in node.args)


def no_patch_at_import(path: str, tree: ast.Module) -> list[str]:
    """Importing a module of ours assigns to no attribute of megatron and replaces no module of it."""
    ours = _bound_to_megatron(tree)
    return [
        f"{path}:{node.lineno}: assigns to megatron at import; use a subclass or a scoped stand-in"
        for node in _at_import(tree)
        for target in _targets(node)
        if _root(target) in ours or _is_sys_modules(target)
    ]


def _bound_to_megatron(tree: ast.Module) -> set[str]:
    """The names that import statements of the file bind to something of megatron's."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or "megatron") for a in node.names if a.name.split(".")[0] == "megatron"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron" and not node.level:
            names |= {a.asname or a.name for a in node.names}
    return names


def _at_import(node: ast.AST):
    """The nodes that run when the module is imported: everything outside function bodies."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _at_import(child)


def _targets(node: ast.AST) -> list[ast.expr]:
    """What a statement changes in place: attributes and items, not plain names."""
    if isinstance(node, ast.Call) and _dotted(node.func) in ("setattr", "delattr"):
        return node.args[:1]
    found = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [getattr(node, "target", None)]
    return [target for target in found if isinstance(target, (ast.Attribute, ast.Subscript))]


def _is_sys_modules(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and _dotted(target.value) == "sys.modules"


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return getattr(node, "id", "")


def _dotted(node: ast.expr) -> str:
    """'torch.load' for that expression; '' when it is not a plain dotted name."""
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return getattr(node, "id", "")


def no_remote_code(path: str, tree: ast.Module) -> list[str]:
    """Code from a checkpoint's folder runs only when the user asks: no literal True for trust_remote_code."""
    return [
        f"{path}:{value.lineno}: trust_remote_code is on without the user's word"
        for node in ast.walk(tree)
        for name, value in _named_values(node)
        if name == "trust_remote_code" and isinstance(value, ast.Constant) and value.value is True
    ]


def _named_values(node: ast.AST):
    """(name, value) of keyword arguments, parameter defaults, assignments and dict items."""
    if isinstance(node, ast.Call):
        yield from ((keyword.arg, keyword.value) for keyword in node.keywords)
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        yield from ((a.arg, d) for a, d in zip(positional[::-1], node.defaults[::-1], strict=False))
        yield from ((a.arg, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from ((getattr(t, "id", getattr(t, "attr", "")), node.value) for t in targets)
    elif isinstance(node, ast.Dict):
        yield from ((getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True))


def no_pickle(path: str, tree: ast.Module) -> list[str]:
    """torch.load says weights_only=True: a checkpoint is data, never code."""
    return [
        f"{path}:{node.lineno}: {_dotted(node.func)} without weights_only=True can run code from a file"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (_dotted(node.func) in ("pickle.load", "pickle.loads") or _loads_unsafely(node))
    ]


def _loads_unsafely(node: ast.Call) -> bool:
    if _dotted(node.func) != "torch.load":
        return False
    return not any(k.arg == "weights_only" and getattr(k.value, "value", False) is True for k in node.keywords)
