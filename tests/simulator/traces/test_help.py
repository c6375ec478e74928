"""Tests that the help on trace sources names exactly the sources that exist."""

from __future__ import annotations

from pathlib import Path

from simulator.traces.formats import FORMATS
from simulator.traces.generators.table import GENERATORS
from simulator.workloads.open import help_lines, markdown

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "traces.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == markdown(), f"run: python -m simulator.workloads.open {PAGE}"


def test_help_names_everything_and_fits() -> None:
    lines = list(help_lines())
    assert max(map(len, lines)) <= 100
    said = {line.split()[0] for line in lines}
    assert {one.name for one in (*FORMATS, *GENERATORS)} <= said
    assert {"lifetime_s", "gap_s", "model", "think_s"} <= said
