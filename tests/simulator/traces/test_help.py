"""Tests that the help on trace sources names exactly the sources that exist."""

from __future__ import annotations

from pathlib import Path

from simulator.traces.formats import FORMATS
from simulator.traces.generators.table import GENERATORS
from simulator.workloads.open import help_lines, markdown

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "traces.md"


def test_the_reference_page_of_traces_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(), f"run: python -m simulator.workloads.open {PAGE}"


def test_help_lists_all_formats_and_generators_and_fits_the_terminal() -> None:
    lines = list(help_lines())
    assert max(map(len, lines)) <= 100
    said = {line.split()[0] for line in lines}
    assert {one.name for one in (*FORMATS, *GENERATORS)} <= said
    assert {"lifetime_s", "gap_s", "model", "think_s"} <= said
