"""The report as a real browser shows it, on a desk and on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from simulator.live.page import render_page
from simulator.runs.compare import run_compare
from tests.simulator.made_up import demo_runs
from tests.simulator.synthetic import setup
from tests.simulator.test_compare import row_of, written

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--dump-dom",
]
# Runs in the page itself and leaves what it saw in the title.
LOOK = """<script>
window.onerror = (message) => { window.failed = message; };
window.onload = () => {
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  const images = [...document.images];
  document.title = JSON.stringify({
    wide: document.documentElement.scrollWidth,
    window: window.innerWidth,
    images: images.length,
    broken: images.filter((image) => image.naturalWidth === 0).length,
    silent: images.filter((image) => !image.alt).length,
    fetched: performance.getEntriesByType("resource")
      .filter((entry) => !entry.name.startsWith("data:")).length,
    scrolled: [...document.querySelectorAll(".table")]
      .filter((one) => one.scrollWidth > one.clientWidth).length,
    failed: window.failed || null,
  });
};
</script></body>"""


def demo_page(folder: Path) -> str:
    """Live runs."""
    return render_page(demo_runs(), [], [], ["made up"], "a test")


def comparison(folder: Path) -> str:
    """Rules of long names, with times of many seconds and wide intervals."""
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
@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_fits_its_window_and_needs_nothing_from_outside(
    tmp_path: Path, page: Callable[[Path], str], width: int
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(tmp_path).replace("</body>", LOOK))
    assert CHROMIUM is not None
    arguments = [f"--window-size={width},900", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [CHROMIUM, *FLAGS, *arguments, file.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    seen = json.loads(unescape(title[1]))
    assert seen["failed"] is None
    assert seen["wide"] <= seen["window"]
    assert not seen["scrolled"] or width < 1280, "on a desk tables are seen whole"
    assert seen["broken"] == seen["silent"] == seen["fetched"] == 0
