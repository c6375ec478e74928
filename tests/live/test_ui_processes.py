"""The page of a router of several processes, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.browser import CHROMIUM, opened
from tests.live.stack import running

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.mark.timeout(240)
async def test_it_shows_every_process_of_a_router_as_one(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2, router=["--processes", "2"]) as stack:
        for n in range(8):
            assert (await stack.complete([n] * 64))[0] == 200
        async with opened(tmp_path / "profile") as page:
            await page.screen(1280, 900)
            await page.go(f"{stack.admin}/ui")
            await page.until(
                "document.querySelectorAll('#decision-rows tbody tr').length === 8",
                "the decisions of both processes",
            )
            assert page.complaints == []
