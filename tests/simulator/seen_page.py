"""An HTML reader for tests that collects what a page shows."""

from __future__ import annotations

from html.parser import HTMLParser


class Seen(HTMLParser):
    """Collects the cells and pictures of a page. Lifetime: test."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.images: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.cell = tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        if tag == "img":
            self.images.append(named)
        if tag in ("link", "script", "iframe"):
            self.links.append(tag)

    def handle_data(self, data: str) -> None:
        if self.cell:
            self.rows[-1].append(data)

    def handle_endtag(self, tag: str) -> None:
        self.cell = False
