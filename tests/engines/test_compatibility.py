"""Tests of the table of vLLM releases: what a run adds, and what the table shows."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engines.compatibility import COLUMNS, EXACT, Outcomes, add, table

HITS = "tests/engines/test_vllm.py::test_hits_and_index_equal_those_of_vllm"
KILL = "tests/engines/test_vllm_faults.py::test_streams_and_requests_survive_kill_9"


def cells(known: Outcomes, release: str) -> dict[str, str]:
    """Return a release's row of the table, by column."""
    row = next(line for line in table(known).splitlines() if line.startswith(f"| {release} "))
    return dict(zip(("vLLM", *COLUMNS), row.strip("| ").split(" | "), strict=True))


def test_a_run_adds_its_outcomes_to_earlier_runs(tmp_path: Path) -> None:
    at = tmp_path / "build" / "compatibility.json"
    add({"0.9.0": {HITS: "failed", EXACT: "7 of 9"}}, at)
    add({"0.10.0": {HITS: "passed", EXACT: "9 of 9"}}, at)
    add({"0.10.0": {HITS: "skipped"}}, at)
    add({"0.9.0": {f"{KILL}[server]": "passed", f"{KILL}[engine core]": "failed"}}, at)
    known = json.loads(at.read_text())
    assert [line[:8] for line in table(known).splitlines()[2:]] == ["| 0.10.0", "| 0.9.0 "]
    new, old = cells(known, "0.10.0"), cells(known, "0.9.0")
    assert (new["hits exact"], new["kill -9"], new["events"]) == ("9 of 9", "not run", "yes")
    assert (old["hits exact"], old["kill -9"]) == ("**7 of 9**", "**1 of 2**")


def test_a_skipped_test_counts_as_not_run() -> None:
    known = {"0.9.0": {f"{KILL}[server]": "skipped", f"{KILL}[engine core]": "passed"}}
    assert cells(known, "0.9.0")["kill -9"] == "yes"
    known["0.9.0"][f"{KILL}[engine core]"] = "skipped"
    assert cells(known, "0.9.0")["kill -9"] == "not run"


def test_columns_refer_to_existing_tests() -> None:
    folder = Path(__file__).parent
    texts = "".join(path.read_text() + path.name for path in folder.glob("test_vllm*.py"))
    for names in COLUMNS.values():
        for name in names:
            assert f"def {name}(" in texts or name in {p.name for p in folder.iterdir()}, name
