"""Tests that the pictures of README and docs are what the product shows: all of them are made
again.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.live.browser import CHROMIUM
from tests.live.pictures import FOLDER, PICTURES, ROOT, Picture, differing, draw

_MOST = 0.01  # share of pixels that may differ, like edges of letters between browsers
_BYTES = 200_000


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("picture", PICTURES, ids=lambda one: one.name)
async def test_a_picture_in_the_docs_is_what_the_product_shows(
    picture: Picture, tmp_path: Path
) -> None:
    kept = (FOLDER / f"{picture.name}.png").read_bytes()
    assert len(kept) <= _BYTES
    made = await draw(picture, tmp_path)
    (tmp_path / "made.png").write_bytes(made)
    share = differing(kept, made)
    words = f"{share:.1%} of docs/images/{picture.name}.png differ from {tmp_path}/made.png"
    assert share <= _MOST, f"{words}: run `make pictures` and look at it"


def test_each_picture_in_the_docs_has_an_alternative_text() -> None:
    shown: dict[str, str] = {}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for words, place in re.findall(r"!\[([^\]]*)\]\(([^)]+\.png)\)", page.read_text()):
            assert len(words) > 20, (page.name, place)
            shown[(page.parent / place).resolve().name] = page.name
    there = {file.name for file in FOLDER.glob("*.png")}
    assert there == {f"{one.name}.png" for one in PICTURES}
    assert there == set(shown)
