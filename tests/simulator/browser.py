"""Lays out pages in a real browser for a desk and a phone; one start of the browser shows several
views.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
DESK, PHONE = 1280, 420  # pixels across
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
    "--allow-file-access-from-files",  # a view passes its measurements to the page around it
    "--dump-dom",
]
# Runs in each view and passes its measurements to the page around it.
LOOK = """<script>
window.onerror = (message) => { window.failed = message; };
window.onload = () => {
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  const images = [...document.images];
  parent.seen[window.name] = {
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
  };
};
</script></body>"""
AROUND = """<!DOCTYPE html><html><head><title></title><script>
const seen = [];
window.seen = seen;
window.onload = () => { document.title = JSON.stringify(seen); };
</script></head><body>%s</body></html>"""
VIEW = '<iframe name="%d" src="%s" style="width:%dpx;height:900px;border:0"></iframe>'


def seen(folder: Path, *views: tuple[str, int]) -> list[dict[str, Any]]:
    """Return the measured layout of each view; a view is a page and its width in pixels."""
    frames = []
    for number, (page, width) in enumerate(views):
        (folder / f"view{number}.html").write_text(page.replace("</body>", LOOK))
        frames.append(VIEW % (number, f"view{number}.html", width))
    around = folder / "views.html"
    around.write_text(AROUND % "".join(frames))
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", around.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(\[.*?\])</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    told: list[dict[str, Any]] = json.loads(unescape(title[1]))
    assert [view["window"] for view in told] == [width for _, width in views]
    for view in told:
        assert view["failed"] is None
        assert view["wide"] <= view["window"]
        assert view["broken"] == view["silent"] == view["fetched"] == 0
    return told
