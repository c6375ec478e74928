"""docs/pair.md is true: what it quotes of logs, keys and metrics exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pair.md").read_text(encoding="utf-8")
HEAD = "| what | what you see | log line | what the router does | what to do |"


def failures() -> list[list[str]]:
    """The rows of the table of failures."""
    lines = PAGE.partition(HEAD)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_log_lines_exist() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    quoted = re.findall(r"`([^`]+)`", " ".join(row[2] for row in failures()))
    assert len(quoted) > 4
    assert [line for line in quoted if line not in source] == []


def test_the_keys_named_exist() -> None:
    known = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:limits|replicas|timeouts)\.\w+|discovery\w*|drain_s)`", PAGE))
    assert len(named) > 5
    assert [key for key in named if f"| `{key}` |" not in known] == []


def test_the_metrics_named_exist() -> None:
    told = PAGE + (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(warmroute_\w+)` \|", told, re.MULTILINE))
    named = set(re.findall(r"`(warmroute_\w*[a-z])(?:\{[^`]*\})?[` ]", PAGE))
    assert len(named) > 15
    assert sorted(named - listed) == []
