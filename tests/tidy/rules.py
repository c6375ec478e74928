"""The project's rules of style as functions that take a file and yield its problems.

`test_tidy.py` applies them to all files.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

OURS = ("router", "engine", "policies", "simulator", "kvkernels")
MAX_COLUMNS = 100
MAX_FUNCTION_LINES = 60
FACE_FIELDS = ("Owns:", "Gives:", "Never imports:", "Start reading at:")

# The parts that decide; they receive time and randomness from their callers.
PURE = (
    "policies/",
    "router/core/",
    "engine/scheduler",
    "engine/block_pool",
    "engine/step_time",
    "kernels/kvkernels/",
)
IMPURE_MODULES = {"time", "random", "datetime", "secrets", "uuid"}
# Modules that package docstrings name after `Never imports:`; a rule looks for their imports.
KNOWN_MODULES = {*OURS, "torch", "aiohttp", "zmq", "asyncio", "logging", "random", "time"}
CONSTANT = re.compile(r"_{0,2}[A-Z][A-Z0-9_]*|__\w+__")
MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {
    *("list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"),
}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def long_lines(text: str) -> Iterator[str]:
    """Yield the lines of more than 100 columns."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield f"line {number} has {len(line)} columns, the limit is {MAX_COLUMNS}"


def functions(tree: ast.Module) -> Iterator[FunctionNode]:
    """Yield all functions and methods of a module, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            yield node


def long_functions(tree: ast.Module) -> Iterator[str]:
    """Yield the functions of more than 60 lines, docstring included."""
    for function in functions(tree):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{function.name} has {lines} lines, the limit is {MAX_FUNCTION_LINES}"


def module_state(tree: ast.Module) -> Iterator[str]:
    """Yield the mutable containers that a module binds to names which are not constants."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if node.value is None or not is_mutable(node.value):
            continue
        for target in targets:
            if isinstance(target, ast.Name) and not CONSTANT.fullmatch(target.id):
                yield f"line {node.lineno}: {target.id} is mutable state of the module"


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, MUTABLE_NODES)


@cache  # each of a package's rules asks for them
def imports(tree: ast.Module) -> tuple[tuple[int, str], ...]:
    """Return (line, dotted name) of everything that a module imports, inside functions too."""
    return tuple(imported(ast.walk(tree)))


def imported(nodes: Iterable[ast.AST]) -> list[tuple[int, str]]:
    """Return (line, dotted name) of everything that these statements import."""
    found: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
    return found


def run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module that run on import; functions and type-checking blocks are
    left out.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from run_on_import(child)


def import_cycle(trees: dict[str, ast.Module]) -> list[str]:
    """Return the modules of `path -> tree` that import each other in a ring while they are loaded,
    or [].
    """
    names = {dotted(path): path for path in trees}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for reader, path in names.items():
        for _, name in imported(run_on_import(trees[path])):
            target = name if name in names else name.rpartition(".")[0]
            if target in names and target != reader:
                sorter.add(reader, target)
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imports_of(tree: ast.Module, banned: str) -> Iterator[str]:
    """Yield the imports of the module `banned` or of anything below it."""
    for line, name in imports(tree):
        if f"{name}.".startswith(f"{banned}."):
            yield f"line {line}: imports {name}"


def imported_tests(tree: ast.Module) -> Iterator[str]:
    """Yield the imports of a module of tests or of something in one; shared code belongs in a
    module without tests.
    """
    for line, name in imports(tree):
        root, *parts = name.split(".")
        if root in ("tests", "") and any(part.startswith("test_") for part in parts):
            yield f"line {line}: imports {name}"


def impurities(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield the uses of clocks and random numbers in code that decides, which must be
    given both.
    """
    if not path.startswith(PURE):
        return
    for module in sorted(IMPURE_MODULES):
        yield from imports_of(tree, module)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"np.random", "numpy.random"}:
            yield f"line {node.lineno}: draws from numpy.random"


def floor_breaches(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield the imports that the lowest packages may not have: policies may import numpy and the
    standard library, kvkernels nothing of ours.
    """
    for line, name in imports(tree):
        root = name.partition(".")[0]
        if path.startswith("policies/") and root not in {
            *("policies", "numpy", ""),
            *sys.stdlib_module_names,
        }:
            yield f"line {line}: policies/ imports {name}"
        if path.startswith("kernels/kvkernels/") and root in OURS and root != "kvkernels":
            yield f"line {line}: kvkernels imports {name}"


def bad_face(docstring: str | None, folder: Path, root: Path) -> Iterator[str]:
    """Yield what a package's docstring lacks: what it owns, gives and never imports, and where to
    start reading.
    """
    text = docstring or ""
    missing = [field for field in FACE_FIELDS if not re.search(rf"^{field}", text, re.MULTILINE)]
    if missing:
        yield f"the docstring lacks {', '.join(missing)}"
        return
    start = re.match(r"\s*`([^`]+)`", text.partition("Start reading at:")[2])
    if start is None:
        yield "`Start reading at:` names no file in backticks"
    elif not (folder / start[1]).is_file() and not (root / start[1]).is_file():
        yield f"`Start reading at:` names {start[1]}, which is not there"


def never_imported(docstring: str | None) -> list[str]:
    """Return the modules that a package docstring names after `Never imports:`."""
    line = re.search(r"^Never imports:(.*?)^Start reading", docstring or "", re.M | re.S)
    if line is None:
        return []
    parts = re.split(r"[,;]|\.\s", line[1].replace("\n", " "))
    names = [part.strip().removeprefix("the ").strip(" `.") for part in parts]
    return [name for name in names if name.partition(".")[0] in KNOWN_MODULES]


def dotted(path: str) -> str:
    """Return the name under which one of our files is imported."""
    inside = path.removeprefix("kernels/").removesuffix(".py").removesuffix("/__init__")
    return inside.replace("/", ".")


def unfinished(text: str) -> Iterator[str]:
    """Yield the lines with a mark of work left for later."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\b(TO" r"DO|FIX" r"ME)\b", line):
            yield f"line {number} leaves work for later: {line.strip()}"


GROUP_LINES = 25  # of code, with docstrings and comments in between


def unrelated_groups(tree: ast.Module) -> list[list[str]]:
    """Return the groups of a module's definitions that name nothing of each other. Each group of 25
    lines or more is given as the names that it defines.
    """
    definitions = [node for node in tree.body if defined_names(node)]
    owner = {name: at for at, node in enumerate(definitions) for name in defined_names(node)}
    group = list(range(len(definitions)))

    def root(at: int) -> int:
        while group[at] != at:
            at = group[at]
        return at

    for at, node in enumerate(definitions):
        for name in used_names(node) & owner.keys():
            group[root(at)] = root(owner[name])
    lines, names = dict[int, int](), dict[int, list[str]]()
    for at, node in enumerate(definitions):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        lines[root(at)] = lines.get(root(at), 0) + length
        names.setdefault(root(at), []).extend(defined_names(node))
    return [names[at] for at, length in lines.items() if length >= GROUP_LINES]


def defined_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    return [name.id for one in targets for name in ast.walk(one) if isinstance(name, ast.Name)]


def used_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement mentions, including types in quotes."""
    found = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            found.add(one.id)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            found.add(one.value)
    return found
