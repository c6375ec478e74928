"""Tests of a router that stops: requests that wait for a worker still get an answer."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

from tests.live.stack import MODEL, running, until

PAUSE_S = 0.05  # of a client between two requests


async def test_held_requests_are_refused_when_the_router_stops(tmp_path: Path) -> None:
    policy = ["--policy", "tests.live.holding:hold_all", "--timeouts-shutdown-s", "5"]
    async with running(tmp_path, workers=1, router=policy) as stack:
        body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 1}
        url = f"{stack.url}/v1/completions"
        asking = [asyncio.ensure_future(stack.http.post(url, json=body)) for _ in range(3)]

        async def wait() -> bool:
            return await stack.metric("warmroute_held_requests") == len(asking)

        await until(wait, "the requests to wait")
        stack.router.process.send_signal(signal.SIGTERM)
        for reply in await asyncio.gather(*asking):
            assert reply.status == 503
            assert reply.headers["Retry-After"] == "1"
            assert (await reply.json())["error"]["code"] == "shutting_down"
        assert await stack.router.process.wait() == 0


class Kept:
    """A client that sends requests again and again on one connection. Lifetime: test."""

    def __init__(self) -> None:
        self.answers = 0
        self.told = False  # whether the answer said that the connection ends

    async def ask(self, port: int) -> None:
        """Send requests until an answer says that the connection closes.

        Raises OSError or IncompleteReadError if an answer does not come.
        """
        body = json.dumps({"model": MODEL, "prompt": [1, 2], "max_tokens": 1}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while not self.told:
                writer.write(head % len(body) + body)
                said = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(said.partition(b"content-length: ")[2].split()[0]))
                assert said.startswith(b"http/1.1 200 ")
                self.answers += 1
                self.told = b"connection: close" in said
                await asyncio.sleep(PAUSE_S)
        finally:
            writer.close()


async def test_clients_on_kept_connections_get_connection_close_before_the_end(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=1) as stack:
        port = int(stack.url.rpartition(":")[2])
        clients = [Kept() for _ in range(36)]
        asking = [asyncio.create_task(client.ask(port)) for client in clients]

        async def all_answered() -> bool:
            return all(client.answers for client in clients)

        await until(all_answered, "an answer to each")
        stack.router.process.send_signal(signal.SIGTERM)
        ended = await asyncio.gather(*asking, return_exceptions=True)
        assert [end for end in ended if end is not None] == []
        assert all(client.told for client in clients)
        assert await stack.router.process.wait() == 0


async def test_requests_on_kept_connections_do_not_wait_during_shutdown(
    tmp_path: Path,
) -> None:
    policy = ["--policy", "tests.live.holding:hold_all", "--timeouts-shutdown-s", "15"]
    async with running(tmp_path, workers=1, router=policy) as stack:
        async with stack.http.get(f"{stack.url}/health") as reply:
            assert reply.status == 200  # its connection is kept
        stack.router.process.send_signal(signal.SIGTERM)

        async def stopping() -> bool:
            return "stopping:" in stack.router.log.read_text()

        await until(stopping, "the router to stop")
        body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 1}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
            assert reply.status == 503
            assert reply.headers["Connection"] == "close"
            assert (await reply.json())["error"]["code"] == "shutting_down"
        assert await stack.router.process.wait() == 0


async def test_no_object_of_the_native_code_outlives_the_router(tmp_path: Path) -> None:
    """No object of the native code outlives the router; the binding library checks this at exit and
    logs leaks.
    """
    async with running(tmp_path, workers=1) as stack:
        assert [(await stack.complete([n] * 40))[0] for n in range(4)] == [200] * 4
        stack.router.process.send_signal(signal.SIGTERM)
        assert await stack.router.process.wait() == 0
        assert "leaked" not in stack.router.log.read_text()
