"""Tests of a router with a low limit of open files: excess clients get an error, and no worker is
blamed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from simulator.live.processes import Programs, StartError
from tests.live.stack import Stack, until

ALONE = {"Connection": "close"}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Holding:
    """A worker that begins every stream at once and ends it when the test says so.
    Lifetime: test.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.gate = asyncio.Event()
        self.connections = 0
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Holding]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            self.gate.set()
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    card = b'{"object":"list","data":[{"id":"%s"}]}' % self.model.encode()
                    found = head.startswith((b"GET /v1/models", b"GET /health"))
                    status = b"200 OK" if found else b"404 Not Found"
                    sized = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n" % (status, len(card))
                    writer.write(sized + b"Connection: close\r\n\r\n" + card)
                    break
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(_HEAD + b"9\r\ndata: 1\n\n\r\n")
                await self.gate.wait()
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.connections -= 1
            writer.close()


@asynccontextmanager
async def routed(
    log_dir: Path, files: int, workers: list[Holding], *flags: str
) -> AsyncIterator[Stack]:
    """Yield a router with these workers that may open `files` files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8_192)), hard))
    async with Programs(log_dir) as programs, aiohttp.ClientSession() as http:
        arguments = [str(files), "serve", "--port", "0", "--admin-port", "0", *flags]
        for worker in workers:
            arguments += ["--worker", worker.url]
        router = await programs.start("router", "tests.live.few_files", arguments)
        stack = Stack(programs, router, [], http)
        for worker_id in range(len(workers)):
            await stack.until_state(worker_id, "ready")
        yield stack


def open_files(stack: Stack) -> int:
    return len(os.listdir(f"/proc/{stack.router.process.pid}/fd"))


class Client:
    """One client that reads one stream. Lifetime: test."""

    def __init__(self) -> None:
        self.status = 0
        self.head = self.rest = b""
        self.begun = asyncio.Event()

    async def ask(self, stack: Stack, model: str) -> None:
        """Send a request and read the answer to its end. Raises OSError or IncompleteReadError if
        it breaks off.
        """
        body = json.dumps({"model": model, "prompt": [1, 2], "stream": True}).encode()
        port = int(stack.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            self.head = await reader.readuntil(b"\r\n\r\n")
            self.status = int(self.head.split()[1])
            if self.status == 200:  # the body of a refusal may come after its head
                self.begun.set()
            self.rest = await reader.read()
            self.begun.set()
        finally:
            writer.close()


async def started_clients(
    stack: Stack, model: str, count: int, group: asyncio.TaskGroup
) -> tuple[list[Client], list[asyncio.Task[None]]]:
    """Start `count` clients; return them and their tasks once their answers have begun."""
    clients = [Client() for _ in range(count)]
    tasks = [group.create_task(client.ask(stack, model)) for client in clients]
    async with asyncio.timeout(30):
        await asyncio.gather(*(client.begun.wait() for client in clients))
    return clients, tasks


async def test_at_the_open_files_limit_every_client_gets_an_answer(
    tmp_path: Path,
) -> None:
    files, streams, beyond = 2_048, 760, 60
    async with (
        Holding("held").serving() as worker,
        routed(tmp_path, files, [worker], "--intervals-health-s", "0.2") as stack,
        asyncio.TaskGroup() as group,
    ):
        inside, streaming = await started_clients(stack, "held", streams, group)
        assert [client.status for client in inside] == [200] * streams
        assert open_files(stack) < files - 256
        outside, tasks = await started_clients(stack, "held", beyond, group)
        turned_away = [client for client in outside if client.status == 503]
        assert len(turned_away) >= beyond - (768 - streams)
        assert all(b"Retry-After: 1" in client.head for client in turned_away)
        assert all(b'"too_many_connections"' in client.rest for client in turned_away)
        # The admin port accepts new connections, and the worker is healthy.
        async with stack.http.get(f"{stack.admin}/health", headers=ALONE) as reply:
            assert reply.status == 200
        assert (await stack.row(0))["state"] == "ready"
        assert await stack.metric("warmroute_ejections_total") == 0
        worker.gate.set()
        await asyncio.gather(*streaming, *tasks)
        assert all(c.rest.endswith(b"0\r\n\r\n") for c in inside + outside if c.status == 200)


async def test_idle_connections_are_closed_for_connections_to_other_workers(
    tmp_path: Path,
) -> None:
    async with (
        Holding("one").serving() as one,
        Holding("two").serving() as two,
        routed(tmp_path, 256, [one, two]) as stack,
        asyncio.TaskGroup() as group,
    ):
        for worker in (one, two):
            clients, tasks = await started_clients(stack, worker.model, 50, group)
            assert [client.status for client in clients] == [200] * 50
            assert open_files(stack) < 256 - 64
            worker.gate.set()
            await asyncio.gather(*tasks)


async def test_a_router_without_free_file_descriptors_ejects_no_worker(tmp_path: Path) -> None:
    async with (
        Holding("held").serving() as worker,
        routed(tmp_path, 512, [worker], "--intervals-health-s", "0.1") as stack,
        asyncio.TaskGroup() as group,
    ):
        await started_clients(stack, "held", 1, group)  # uses its connection to the worker
        pid = stack.router.process.pid
        url, body = f"{stack.url}/v1/completions", {"model": "held", "prompt": [1, 2]}
        # Connections of clients that exist before files run short.
        async with stack.http.get(f"{stack.url}/health") as reply:
            assert reply.status == 200
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 512))  # only those already open
        for _ in range(10):  # twice as many as would eject a worker
            async with stack.http.post(url, json=body) as reply:
                assert reply.status == 503
                assert reply.headers["Retry-After"]
                assert (await reply.json())["error"]["code"] == "out_of_files"
        log = stack.router.log

        async def probed() -> bool:
            return log.read_text().count("not probed:") >= 3

        await until(probed, "three probes that found no file")
        line = r"not sent to worker 0 \(http://\S+\), no more files may be open here"
        assert re.search(line, log.read_text())
        assert (await stack.row(0))["state"] == "ready"
        assert await stack.metric("warmroute_ejections_total") == 0
        assert await stack.metric("warmroute_rejections_total") == 10
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (512, 512))
        worker.gate.set()
        async with stack.http.post(url, json=body) as reply:
            assert reply.status == 200
            await reply.read()


async def test_the_error_for_a_too_low_open_files_limit_names_the_remedy(tmp_path: Path) -> None:
    async with Programs(tmp_path) as programs:
        with pytest.raises(StartError, match=r"only 64 files may be open.*at least 256.*ulimit -n"):
            await programs.start("router", "tests.live.few_files", ["64", "serve", "--port", "0"])
