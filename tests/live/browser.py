"""Drives Chromium through its DevTools protocol, and reads what a page shows, logs and requests."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium")
_START_S, _ANSWER_S, _UNTIL_S = 60.0, 60.0, 30.0
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--hide-scrollbars", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0"),
)


class Page:
    """One tab of the browser. Lifetime: the `async with` of `opened`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []  # errors and warnings of the console, exceptions, CSP
        self.asked: list[str] = []  # URLs of all requests
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._reading = asyncio.create_task(self._read())

    async def begin(self) -> None:
        """Open a new tab and attach to it."""
        target = await self.call("Target.createTarget", url="about:blank")
        there = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = there["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its result.

        Raises AssertionError if the browser answers with an error.
        """
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        told = await asyncio.wait_for(answer, _ANSWER_S)
        assert "error" not in told, (method, told["error"])
        result: dict[str, Any] = told["result"]
        return result

    async def screen(
        self, width: int, height: int, dark: bool = False, still: bool = False
    ) -> None:
        """Set the window's size in CSS pixels, its colour scheme and whether it asks for less
        motion.
        """
        phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def go(self, url: str) -> None:
        """Open the page at `url`."""
        told = await self.call("Page.navigate", url=url)
        assert "errorText" not in told, told

    async def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, decoded from JSON."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, (expression, told["exceptionDetails"])
        return told["result"].get("value")

    async def until(self, expression: str, what: str) -> None:
        """Poll until the JavaScript expression is true; the failure message names `what`."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + _UNTIL_S
        while not await self.run(f"Boolean({expression})"):
            assert clock() < deadline_s, f"waited {_UNTIL_S:g} s for {what}; {self.complaints}"
            await asyncio.sleep(0.05)

    async def text(self, selector: str) -> str:
        """Return the text of the first element that matches the selector."""
        found: str = await self.run(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    async def point(self, x: float, y: float, click: bool = False) -> None:
        """Move the mouse to (x, y) and click there if `click`."""
        where = {"x": x, "y": y}
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", **where)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                await self.call(
                    "Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where
                )

    async def press(self, key: str) -> None:
        """Press a key; its name is a value of `KeyboardEvent.key`."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def picture(self, file: Path, whole: bool = True) -> bytes:
        """Write a PNG screenshot of the whole page, or only of what the window shows."""
        told = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        shot = base64.b64decode(told["data"])
        await asyncio.to_thread(file.write_bytes, shot)
        return shot

    async def end(self) -> None:
        """Stop reading the browser's messages."""
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                waiting = self._waiting.pop(told["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(told)
            else:
                self._on_event(told["method"], told["params"])

    def _on_event(self, event: str, told: dict[str, Any]) -> None:
        if event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            said = [part.get("value", part.get("description")) for part in told["args"]]
            self.complaints.append(f"{told['type']}: {said}")
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])


@asynccontextmanager
async def opened(profile: Path, flags: Sequence[str] = ()) -> AsyncIterator[Page]:
    """Start a browser and yield its one tab; the browser ends with the block."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, *_FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        place = await asyncio.wait_for(_place(profile / "DevToolsActivePort", process), _START_S)
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(place, max_msg_size=0) as socket,
        ):
            page = Page(socket)
            try:
                await page.begin()
                yield page
            finally:
                await page.end()
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _place(file: Path, process: asyncio.subprocess.Process) -> str:
    """Wait until the browser has written its DevTools address to the file; return the address."""
    while True:
        assert process.returncode is None, f"chromium ended with {process.returncode}"
        lines = _lines(file)
        if len(lines) >= 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        await asyncio.sleep(0.05)


def _lines(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
