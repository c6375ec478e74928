"""Tests of the report page in a real browser, with the sizes of a desk and of a phone."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from simulator.live.page import render_page
from simulator.runs.compare import run_compare
from tests.simulator.browser import CHROMIUM, DESK, PHONE, seen
from tests.simulator.compared import row_of, written
from tests.simulator.made_up import demo_runs
from tests.simulator.synthetic import setup


def demo_page(folder: Path) -> str:
    """Return the page of live runs of three workloads, one of which has turns."""
    return render_page(demo_runs()[3:8], [], [], ["made up"], "a test")


def comparison(folder: Path) -> str:
    """Return the page of a comparison of rules with long names, times of many seconds and wide
    intervals.
    """
    names = ("hybrid?load_factor=0.5|bounded_load?epsilon=0.25", "warmset?gate=1000", "lmetric")
    asked = [setup(name, seed) for name in names for seed in range(3)]
    rows = [
        row_of(one, 3000.0 * 2 ** (number % 4), 0.1 * number) for number, one in enumerate(asked)
    ]
    results = written(folder / "w4b.results.jsonl", list(zip(asked, rows, strict=True)))
    html = folder / "compare.html"
    assert run_compare((results,), "lmetric", Console(file=StringIO()), html=html)
    return html.read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("page", [demo_page, comparison])
def test_the_page_fits_its_window_and_loads_no_external_resources(
    tmp_path: Path, page: Callable[[Path], str]
) -> None:
    html = page(tmp_path)
    desk, phone = seen(tmp_path, (html, DESK), (html, PHONE))
    assert not desk["scrolled"], "on a desk tables are seen whole"
    assert desk["images"] == phone["images"]
