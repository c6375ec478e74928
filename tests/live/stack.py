"""Starts a router and its workers as real programs, and workers that misbehave on purpose."""

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
    """A running router with its workers, and an HTTP client for it. Lifetime: test module."""

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
        """Send a completion; return (status, JSON)."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2} | fields
        url = f"{self.url}/v1/completions"
        async with self.http.post(url, json=body, headers=headers) as reply:
            return reply.status, await reply.json()

    async def post(self, data: bytes, path: str = "/v1/completions") -> tuple[int, Any]:
        """Post raw bytes; return (status, JSON)."""
        headers = {"Content-Type": "application/json"}
        async with self.http.post(f"{self.url}{path}", data=data, headers=headers) as reply:
            return reply.status, await reply.json()

    async def rows(self) -> list[dict[str, Any]]:
        """Return the workers in the router's answer to `/workers`."""
        async with self.http.get(f"{self.admin}/workers") as reply:
            rows: list[dict[str, Any]] = (await reply.json())["workers"]
            return rows

    async def row(self, worker_id: int) -> dict[str, Any]:
        """Return one worker in the router's answer to `/workers`."""
        return next(row for row in await self.rows() if row["id"] == worker_id)

    async def add(self, spec: str) -> int:
        """Add a worker and wait until it takes requests."""
        async with self.http.post(f"{self.admin}/workers", json=spec) as reply:
            assert reply.status == 201, await reply.text()
            worker_id: int = (await reply.json())["id"]
        await self.until_state(worker_id, "ready")
        return worker_id

    async def remove(self, worker_id: int) -> None:
        """Remove a worker at once, without a drain."""
        async with self.http.delete(f"{self.admin}/workers/{worker_id}?force=true") as reply:
            assert reply.status == 200, await reply.text()

    async def until_state(self, worker_id: int, state: str) -> None:
        async def reached() -> bool:
            return bool((await self.row(worker_id))["state"] == state)

        await until(reached, f"worker {worker_id} to be {state}")

    async def metric(self, name: str) -> float:
        """Return the sum of all samples of a router metric."""
        return await metric_sum(self.http, self.admin, name)

    async def assert_idle(self) -> None:
        """Check that every load counter of the router and its workers is back at zero."""

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
    """Poll until the condition is true; after `within_s` seconds, fail with a message that names
    `what`.
    """
    deadline_s = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"waited {within_s:g} s for {what}"
        await asyncio.sleep(0.02)


def engine_arguments(**options: Any) -> list[str]:
    """Return the command-line arguments of a fast simulated worker with small blocks, at a port
    where it can be restarted.
    """
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
    """Return the arguments of a worker that computes with the model in a folder, at its
    own port.
    """
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
    """Yield a router with simulated workers that are ready.

    `headers` are sent with every request. With `model`, the workers compute with the model in that
    folder instead.
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
    """Send a request that no client library would send; return (status, body) of the first answer.

    `request` has all the bytes, or only method and path if `fields` give the head's fields.
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
    """Run a worker that looks healthy and answers every inference request with the raw bytes
    `answer`.

    Yields its URL and the bodies that it got; the requests' heads are added to `heads`. An empty
    `answer` closes the connection. `metrics` is the text of its metrics page, if it has one.
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
