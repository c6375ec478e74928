"""Tests that docs/reference/errors.md lists all error codes of the router, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
SOURCES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "router").rglob("*.py")}
CODE = re.compile(r"[a-z]+(_[a-z]+)*")
# Who makes an error, and which of its arguments is the code; a keyword `code` is one everywhere.
MAKERS = {
    "ClientError": 3,
    "refused": 2,
    "error_response": 2,
    "Refusal": 0,
    "Reject": 2,
    "_reject": 2,
    "Rejection": 1,
}


def codes_in(tree: ast.Module) -> Iterator[str]:
    """Yield the error codes that occur in a module's source."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def text(node: ast.expr) -> str:
        value = constants.get(node.id) if isinstance(node, ast.Name) else None
        value = node.value if isinstance(node, ast.Constant) else value
        return value if isinstance(value, str) else ""

    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in MAKERS and len(node.args) > MAKERS[name]:
                yield text(node.args[MAKERS[name]])
            if name in MAKERS:
                yield from (text(word.value) for word in node.keywords if word.arg == "code")
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3:
            status, code, _ = node.elts
            if isinstance(status, ast.Constant) and status.value in range(400, 600):
                yield text(code)


def documented_codes() -> set[str]:
    """Return the error codes on the page: those of the table, and those that occur only in logs."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    told = {code for row in rows for code in re.findall(r"`(\w+)`", row.split("|")[1])}
    return told | {"client_closed", "slow_client"}


def test_every_code_is_listed() -> None:
    made = {code for text in SOURCES.values() for code in codes_in(ast.parse(text))}
    made = {code for code in made if CODE.fullmatch(code)}
    assert len(made) > 50
    assert sorted(made - documented_codes()) == []


def test_every_listed_code_is_in_the_source() -> None:
    everything = "\n".join(SOURCES.values())
    assert [code for code in sorted(documented_codes()) if f'"{code}"' not in everything] == []
