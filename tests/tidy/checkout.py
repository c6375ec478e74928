"""The files of this checkout, with their paths, texts and syntax trees."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__"}
CODE = {".py", ".pyi", ".cpp", ".h", ".hpp", ".cu", ".cuh"}


@cache
def tree() -> tuple[str, ...]:
    """Return the paths of the tracked files; outside a git checkout, of all files that are no build
    output.
    """
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        paths = [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]
    else:
        paths = [
            path.relative_to(ROOT).as_posix()
            for path in ROOT.rglob("*")
            if path.is_file() and not NOT_OURS & set(path.relative_to(ROOT).parts)
        ]
    return tuple(sorted(paths))


@cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse(text_of(path), path)


def code() -> Iterator[str]:
    return (path for path in tree() if Path(path).suffix in CODE)


def python() -> Iterator[str]:
    return (path for path in code() if path.endswith(".py"))
