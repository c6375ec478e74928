"""The source files that make a policy what it is: one that was changed makes another run."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

from policies.naming import POLICY, WRAPPER
from policies.parameters import PolicyError

# What a policy is asked, not how it answers: every policy imports these.
COMMON = frozenset({"policies.contract", "policies.facts", "policies.record"})


def policy_files(spec: str) -> list[Path]:
    """Files of the policy and its wrappers, and of their own package that these import; sorted.

    Empty for a policy that cannot be loaded: its run will say so.
    """
    found: dict[str, Path] = {}
    for number, part in enumerate(spec.split("|")):
        name = part.partition("?")[0]
        try:
            behind = (WRAPPER if number else POLICY).find(name)
        except PolicyError:
            return []
        file = inspect.getsourcefile(behind)
        if file is not None:
            _follow(behind.__module__, Path(file), found)
    return sorted(found.values())


def _follow(module: str, file: Path, found: dict[str, Path]) -> None:
    if module in found or module in COMMON:
        return
    found[module] = file
    for name in _imported(file, module.partition(".")[0]):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            _follow(name, Path(spec.origin), found)


def _imported(file: Path, package: str) -> list[str]:
    """Modules of `package` that a file imports by their full names."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return [name for name in names if name.startswith(f"{package}.")]
