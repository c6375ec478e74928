"""Tests of the page at `/ui` when a router sends it nonsense: it shows what it can and
never stops.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router.admin.ui.page import page as real_page
from tests.live.browser import CHROMIUM, opened
from tests.live.stack import until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

WORKERS: dict[str, Any] = {
    "states": ["ready", "on holiday", 7],
    "state": [0, 1, 2, 99],
    "requests": [1e308, None, "many", -1],
    "waiting": [],
    "wait_ms": {"0": 1},
    "kv": [5e9, -1, None, 500],
    "hits": "all",
    "index": 5,
}
DECISION = {"request": {}, "best": [{"cost": None, "terms": {"x_s": "?"}}, 3], "now_s": "then"}
FRAME: dict[str, Any] = {
    "sample": 3,
    "version": 1,
    "now_s": None,
    "unix_s": 1e300,
    "workers": WORKERS,
    "troubles": ["x"],
    "exactness": {"kinds": [{"mode": 5, "reason": {}, "lift": []}, None], "rows": [0, 1, 7]},
    "policy": 4,
    "readiness": {"ready": "yes", "reasons": "because"},
    "trunks": {"followed": True, "rows": [None, {"hash": "ff", "holders": "zz", "tokens": []}, 4]},
    "decisions": {"added": 2, "rows": [DECISION, None], "outcomes": [5, ["x", {}], None]},
    "replicas": [{"name": [1, {"a": 2}], "age_s": "old"}, None, 5],
}
WHOLE: dict[str, Any] = {
    "boot": "b",
    "columns": ["requests_per_s", "ttft_mean_s"],
    "history": [[1, None], "x", None, [1e308, -5], []],
    "names": [[0, "http://a", None, None, None, None, None, None], [], None, ["x", 4, {}, [], 5]],
    "frame": FRAME,
}
NONSENSE: list[Any] = [
    *([], None, 3, "x", {}, {"frame": []}, {"names": {}, "history": {}, "columns": 5}),
    *({**WHOLE, "frame": {**FRAME, part: bad}} for part in FRAME for bad in (None, [], {}, "x", 9)),
    *({**WHOLE, part: bad} for part in WHOLE for bad in (None, [], {}, "x", 9)),
]


@pytest.mark.timeout(240)
async def test_invalid_state_does_not_break_the_page(tmp_path: Path) -> None:
    body, headers = real_page()
    left = [*NONSENSE, WHOLE]
    told = 0

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=body, headers=headers)

    async def state(request: web.Request) -> web.Response:
        nonlocal told
        answer = left[min(told, len(left) - 1)]
        told += 1
        return web.json_response(text=json.dumps(answer))

    app = web.Application()
    app.router.add_get("/ui", show)
    app.router.add_get("/ui/state", state)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with opened(tmp_path / "profile") as page:
            await page.screen(1280, 900)
            # A clock 100 times as fast, since otherwise each answer would take a second.
            await page.call(
                "Page.addScriptToEvaluateOnNewDocument",
                source="const wait = setTimeout; setTimeout = (f, ms) => wait(f, ms / 100);",
            )
            await page.go(f"http://127.0.0.1:{runner.addresses[0][1]}/ui")
            await page.until("document.querySelector('#main') && !main.hidden", "the page")

            async def all_served() -> bool:  # one more than there are: all were processed
                return told > len(left)

            await until(all_served, "the page to ask so often")
            await page.picture(tmp_path / "nonsense.png")
            assert page.complaints == []
            said = await page.text("#fleet-said")
            assert said.startswith("4 workers: ")
            assert "1 on holiday" in said
            assert "NaN" not in await page.run("document.body.innerText")
            assert "undefined" not in await page.run("document.body.innerText")
            assert "[object" not in await page.run("document.body.innerText")
            assert await page.run("document.documentElement.scrollWidth") <= 1280
    finally:
        await runner.cleanup()
