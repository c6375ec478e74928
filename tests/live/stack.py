"""A router and its workers as real programs, and workers that misbehave on purpose."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from simulator.live.processes import Program, Programs
from tests.live.ports import lasting_port

MODEL = "tiny"
PROFILE = "llama-3.1-8b-h100"
WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Stack:
    """Lifetime: test module."""

    programs: Programs
    router: Program
    workers: list[Program]
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.router.url

    @property
    def admin(self) -> str:
        return self.router.facts["admin"]

    async def complete(self, prompt: Any, headers: Any = None, **fields: Any) -> tuple[int, Any]:
        """(status, JSON) of a completion."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2} | fields
        url = f"{self.url}/v1/completions"
        async with self.http.post(url, json=body, headers=headers) as reply:
            return reply.status, await reply.json()

    async def post(self, data: bytes, path: str = "/v1/completions") -> tuple[int, Any]:
        """(status, JSON) of bytes posted as they are."""
        headers = {"Content-Type": "application/json"}
        async with self.http.post(f"{self.url}{path}", data=data, headers=headers) as reply:
            return reply.status, await reply.json()

    async def rows(self) -> list[dict[str, Any]]:
        """The router's workers."""
        async with self.http.get(f"{self.admin}/workers") as reply:
            rows: list[dict[str, Any]] = (await reply.json())["workers"]
            return rows

    async def row(self, worker_id: int) -> dict[str, Any]:
        """One of the router's workers."""
        return next(row for row in await self.rows() if row["id"] == worker_id)

    async def add(self, spec: str) -> int:
        """Add a worker and wait until it takes requests."""
        async with self.http.post(f"{self.admin}/workers", json=spec) as reply:
            assert reply.status == 201, await reply.text()
            worker_id: int = (await reply.json())["id"]
        await self.until_state(worker_id, "ready")
        return worker_id

    async def remove(self, worker_id: int) -> None:
        """Remove a worker at once."""
        async with self.http.delete(f"{self.admin}/workers/{worker_id}?force=true") as reply:
            assert reply.status == 200, await reply.text()

    async def until_state(self, worker_id: int, state: str) -> None:
        async def reached() -> bool:
            return bool((await self.row(worker_id))["state"] == state)

        await until(reached, f"worker {worker_id} to be {state}")

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples at the router."""
        return await metric_sum(self.http, self.admin, name)

    async def assert_idle(self) -> None:
        """Every load counter, of the router and of its workers, is back at zero."""

        async def idle() -> bool:
            rows = [r for r in await self.rows() if "inflight_requests" in r]
            busy = [r for r in rows if r["inflight_requests"] or r["context_tokens"]]
            queued = [r for r in rows if r["queued_prefill_tokens"]]
            inflight = await self.metric("warmroute_inflight_requests")
            engines = [
                await metric_sum(self.http, w.url, f"vllm:num_requests_{kind}")
                for w in self.workers
                if w.process.returncode is None
                for kind in ("running", "waiting")
            ]
            return not busy and not queued and inflight == 0 and not any(engines)

        await until(idle, "all load counters to be zero")


async def metric_sum(http: aiohttp.ClientSession, url: str, name: str) -> float:
    async with http.get(f"{url}/metrics") as reply:
        text = await reply.text()
    lines = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def until(
    condition: Callable[[], Awaitable[bool]], what: str, within_s: float = WAIT_S
) -> None:
    """Poll until true; fails by name after so long."""
    deadline_s = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"waited {within_s:g} s for {what}"
        await asyncio.sleep(0.02)


def engine_arguments(**options: Any) -> list[str]:
    """A quick timed worker with small blocks, at a port it can be started at again."""
    known = {
        "port": lasting_port(),
        "timed": PROFILE,
        "speed": 20,
        "block-size": 16,
        "model-name": MODEL,
    }
    arguments: list[str] = []
    for name, value in (known | options).items():
        arguments += [f"--{name}", str(value)]
    return arguments


def computing_arguments(model: Path) -> list[str]:
    """A worker that computes with the model in a folder, at a port of its own."""
    port = str(lasting_port())
    return ["serve", str(model), "--port", port, "--threads", "1", "--model-name", MODEL]


@asynccontextmanager
async def running(
    log_dir: Path,
    workers: int = 2,
    router: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    model: Path | None = None,
    **engine: Any,
) -> AsyncIterator[Stack]:
    """A router in front of timed workers, ready to serve; `headers` go with every request.

    `model`: the folder of one that the workers compute with instead.
    """
    flags = (lambda: computing_arguments(model)) if model else (lambda: engine_arguments(**engine))
    async with Programs(log_dir) as programs, aiohttp.ClientSession(headers=headers) as http:
        started = [await programs.start(f"worker-{n}", "engine", flags()) for n in range(workers)]
        arguments = ["serve", "--port", "0", "--admin-port", "0", *router]
        for worker in started:
            arguments += ["--worker", worker.url]
        stack = Stack(programs, await programs.start("router", "router", arguments), started, http)
        for worker_id in range(workers):
            await stack.until_state(worker_id, "ready")
        yield stack


async def exchanged(url: str, request: bytes | str, *fields: str) -> tuple[int, bytes]:
    """(status, body) of the first answer to a request that no client library would send.

    `request`: all its bytes, or method and path, where `fields` are the head's.
    """
    if isinstance(request, str):
        lines = (f"{request} HTTP/1.1", *fields, "Connection: close", "", "")
        request = "\r\n".join(lines).encode()
    host, _, port = url.removeprefix("http://").rpartition(":")
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            return int(head.split()[1]), await reader.readexactly(int(length[1]) if length else 0)
        finally:
            writer.close()


@asynccontextmanager
async def misbehaving(
    answer: bytes, models: str = MODEL, heads: list[bytes] | None = None, metrics: bytes = b""
) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A worker that says it is fine and answers every inference request with raw `answer`.

    Yields its URL and the bodies it was sent, whose heads go to `heads`; an empty `answer` closes
    the connection. `metrics`: of its gauges, where it has some.
    """
    seen: list[bytes] = []
    heads = [] if heads is None else heads

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = [
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            ]
            body = await reader.readexactly(length[0]) if length else b""
            if head.startswith(b"GET /v1/models"):
                writer.write(_ok(b'{"object":"list","data":[{"id":"%s"}]}' % models.encode()))
            elif head.startswith(b"GET /health"):
                writer.write(_ok(b"{}"))
            elif metrics and head.startswith(b"GET /metrics"):
                writer.write(_ok(metrics))
            elif head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            else:
                seen.append(body)
                heads.append(head)
                writer.write(answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


def _ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
