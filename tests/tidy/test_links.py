"""Tests that each link between pages leads to a file that exists and to a heading in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.tidy.checkout import ROOT, text_of, tree

LINK = re.compile(r"\]\((?!\w+://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
PAGES = [path for path in tree() if path.endswith(".md")]


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors that a link to a page may have after #, as the web shows the page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


def broken(page: Path, text: str) -> Iterator[str]:
    """Yield the links of a page that lead nowhere."""
    for file, anchor in LINK.findall(re.sub(r"`[^`\n]+`", "", text)):
        target = (page.parent / file).resolve() if file else page
        if not target.exists():
            yield f"{file} is not there"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{file}#{anchor}: no such heading"


@pytest.mark.parametrize("path", PAGES)
def test_every_link_leads_to_an_existing_target(path: str) -> None:
    assert list(broken(ROOT / path, text_of(path))) == []


def test_pages_quoted_in_the_sources_exist() -> None:
    named = re.compile(r"(?<![\w/-])docs/[\w/-]+\.md")
    sources = [path for path in tree() if path.endswith((".py", ".h", ".cpp", ".cu", ".yml"))]
    found = {page for path in (*sources, "Makefile") for page in named.findall(text_of(path))}
    assert len(found) > 5
    assert sorted(page for page in found if not (ROOT / page).is_file()) == []


@pytest.mark.parametrize("wrong", ["[a](nowhere.md)", "[a](README.md#no-such)", "[a](#no-such)"])
def test_a_broken_link_is_found(wrong: str) -> None:
    assert len(list(broken(ROOT / "README.md", wrong))) == 1
