"""The pictures of README and docs, made from the product by a headless browser: `make pictures`.

Moving content is recorded: `--record` starts a real router and workers, puts load on them, kills
one, and keeps what the router answered. The pictures show these recorded answers, so that they are
the same each time. To add a picture, write its function below and name it in `PICTURES`; the test
beside this module makes all of them again and compares.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import html
import io
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import ClientError, web
from PIL import Image

from router.admin.ui.page import page as ui_page
from router.cli.admin import AdminClient
from router.cli.top import Look, View, frame, look
from tests.live.browser import Page, opened
from tests.live.stack import MODEL, Stack, running

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/images"
_RECORDED = ROOT / "tests/data/pictures.json.gz"
_WORKERS, _KILLED = 6, 4
_LOAD_S = 118.0  # the page then shows two minutes
_EVERY_S = 0.1  # a request
_DECISIONS = 60  # kept of the recorded ones
_REPLAY = (
    *("replay", "simulator/data/conversation_sample.jsonl.gz", "--seconds", "240"),
    *("--policy", "warmset", "--policy", "round_robin"),
)
# The page measures the age of its figures with this clock, which stands still.
_STILL = "performance.now = () => 0;"
_VISIBLE = 40  # of 255: by how much a colour must differ to count
_TERMINAL = """<!doctype html><meta charset="utf-8"><title>warmroute top</title>
<style>body {{ margin: 0; background: #16191f; color: #e6e8eb; }}
pre {{ margin: 0; padding: 14px 18px; font: 13px/1.4 "DejaVu Sans Mono", monospace; }}</style>
<pre>$ warmroute top
{}</pre>"""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of the docs, in `docs/images/NAME.png`. Lifetime: process."""

    name: str
    width: int  # CSS pixels of the window
    height: int
    show: Callable[[Page, Path], AbstractAsyncContextManager[None]]  # a folder for its files


@asynccontextmanager
async def ui(page: Page, folder: Path) -> AsyncIterator[None]:
    """Show the page `/ui` with one worker down, from a router's recorded answer."""
    body, headers = ui_page()
    told = json.dumps(_recorded()["ui"])

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=body, headers=headers)

    async def state(request: web.Request) -> web.Response:
        if request.query.get("boot"):  # the page has everything already
            return web.Response(status=204)
        return web.json_response(text=told)

    app = web.Application()
    app.router.add_get("/ui", show)
    app.router.add_get("/ui/state", state)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=_STILL)
        await page.go(f"http://127.0.0.1:{runner.addresses[0][1]}/ui")
        await page.until("document.querySelector('#problem-rows > li')", "what is wrong")
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def top(page: Page, folder: Path) -> AsyncIterator[None]:
    """Show `warmroute top` of the same router, a second or two later."""
    before, now = (Look(**one) for one in _recorded()["top"])
    lines = frame("http://127.0.0.1:8081", before, now, View(columns=140, lines=24))
    await _open(page, folder / "top.html", _TERMINAL.format(html.escape("\n".join(lines))))
    yield


@asynccontextmanager
async def report(page: Page, folder: Path) -> AsyncIterator[None]:
    """Show the report page of a replay on virtual time."""
    file = folder / "report.html"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "simulator", *_REPLAY, "--html", str(file)),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0
    await page.go(file.as_uri())
    await page.until("document.readyState === 'complete'", "the report")
    await page.run("document.querySelector('h2').scrollIntoView()")
    yield


PICTURES = (
    Picture("ui", 1280, 830, ui),
    Picture("top", 1140, 440, top),
    Picture("report", 1000, 1120, report),
)


async def draw(picture: Picture, folder: Path) -> bytes:
    """Return the picture as PNG; its temporary files are written to `folder`."""
    async with opened(folder / f"profile-{picture.name}") as page:
        await page.screen(picture.width, picture.height, still=True)
        await page.call("Emulation.setTimezoneOverride", timezoneId="UTC")
        async with picture.show(page, folder):
            shot = await page.picture(folder / f"{picture.name}.png", whole=False)
    with Image.open(io.BytesIO(shot)) as image:
        small = io.BytesIO()
        image.convert("RGB").save(small, "PNG", optimize=True)
    return small.getvalue()


def differing(one: bytes, other: bytes) -> float:
    """Return the share of pixels that differ visibly, 0..1, or 1 if the sizes differ."""
    pixels = []
    for shot in (one, other):
        with Image.open(io.BytesIO(shot)) as image:
            pixels.append(np.asarray(image.convert("RGB")).astype(int))
    if pixels[0].shape != pixels[1].shape:
        return 1.0
    return float((np.abs(pixels[0] - pixels[1]).max(axis=2) > _VISIBLE).mean())


async def record(folder: Path) -> None:
    """Record the answers of a real router under load, one of whose workers is killed."""
    async with running(folder, workers=_WORKERS, speed=1) as stack:
        load = asyncio.create_task(_load(stack))
        await asyncio.sleep(_LOAD_S - 25.0)
        stack.workers[_KILLED].process.kill()
        await asyncio.sleep(20.0)
        admin = AdminClient(stack.admin, None)
        looks = [await asyncio.to_thread(look, admin)]
        await asyncio.sleep(3.0)
        looks.append(await asyncio.to_thread(look, admin))
        async with stack.http.get(f"{stack.admin}/ui/state") as reply:
            told = await reply.json()
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load
    kept = [
        {name: getattr(one, name) for name in Look.__slots__}
        | {"decisions": one.decisions[:_DECISIONS]}
        for one in looks
    ]
    text = json.dumps({"ui": told, "top": kept})
    _RECORDED.write_bytes(gzip.compress(text.encode(), mtime=0))


async def _load(stack: Stack) -> None:
    """Send streams whose prompts begin with one of six prefixes, most often the first of them."""
    tasks = set()

    async def ask(number: int) -> None:
        prefix = [100 + number % 9 if number % 9 < 6 else 100] * 4000
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": [*prefix, *range(number % 500, number % 500 + 400)],
        }
        body |= {"max_tokens": 48, "stream": True, "stream_options": {"include_usage": True}}
        with suppress(ClientError):  # the killed worker's streams break off
            async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
                await reply.read()

    try:
        for number in range(100_000):
            task = asyncio.create_task(ask(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(_EVERY_S)
    finally:
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _open(page: Page, file: Path, text: str) -> None:
    await asyncio.to_thread(file.write_text, text, encoding="utf-8")
    await page.go(file.as_uri())
    await page.until("document.readyState === 'complete'", "the page")


def _recorded() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(gzip.decompress(_RECORDED.read_bytes()))
    return recorded


def main() -> None:
    """Make all pictures, or those that are named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.live.pictures")
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--record", action="store_true", help="ask a real router anew before")
    asked = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if asked.record:
            asyncio.run(record(Path(folder)))
        for picture in PICTURES:
            if not asked.names or picture.name in asked.names:
                shot = asyncio.run(draw(picture, Path(folder)))
                (FOLDER / f"{picture.name}.png").write_bytes(shot)
                print(f"docs/images/{picture.name}.png: {len(shot) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
