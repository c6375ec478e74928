"""Tests of docs/replicas.md, notes/replicas.md and discovery.md: the log lines, keys, metrics and
tests that they quote exist.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = "\n".join(
    (DOCS / name).read_text(encoding="utf-8") for name in ("reference/discovery.md", "replicas.md")
)
PROMISES = (DOCS / "notes/replicas.md").read_text(encoding="utf-8")
HEAD = "| what | what you see | log line | what the router does | what to do |"


def failures() -> list[list[str]]:
    """Return the rows of the page's table of failures."""
    lines = PAGE.partition(HEAD)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_quoted_log_lines_exist() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    quoted = re.findall(r"`([^`]+)`", " ".join(row[2] for row in failures()))
    assert len(quoted) > 4
    assert [line for line in quoted if line not in source] == []


def test_quoted_keys_exist() -> None:
    known = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:limits|replicas|timeouts)\.\w+|discovery\w*|drain_s)`", PAGE))
    assert len(named) > 5
    assert [key for key in named if f"| `{key}` |" not in known] == []


def test_quoted_metrics_exist() -> None:
    told = PAGE + (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(warmroute_\w+)` \|", told, re.MULTILINE))
    named = set(re.findall(r"`(warmroute_\w*[a-z])(?:\{[^`]*\})?[` ]", PAGE))
    assert len(named) > 15
    assert sorted(named - listed) == []


def test_each_promise_lists_test_files_that_exist() -> None:
    promises = PROMISES.partition("\n## What is promised\n")[2]
    rows = [line.strip("|").split("|") for line in promises.splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    for promise, shown_by in rows[1:]:
        files = re.findall(r"`(tests/[\w/]+\.py)`", shown_by)
        assert files, promise
        assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_page_lists_all_tests_of_replicas() -> None:
    live = {f"tests/live/{path.name}" for path in (ROOT / "tests/live").glob("test_replica*.py")}
    assert sorted(live - set(re.findall(r"`(tests/[\w/]+\.py)`", PROMISES))) == []
