"""Tests of clients that disconnect once they have their whole answer, before the router knows that
they have it.
"""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from router.http.messages import Answer, Request
from router.http.reply import Outcome, Timeouts
from router.upstream.client_reply import ClientReply, upstream_request
from router.upstream.native import NativeRelay
from tests.router import relay_support
from tests.router.relay_support import EVENT, OK, STREAM, post, served, until, upstreams_to

pytestmark = pytest.mark.skipif(not NativeRelay.usable(), reason="the native relay was not built")


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_support, "PATH", "native")


def read_until(sock: socket.socket, end: bytes) -> None:
    """Read from the socket until the data ends with `end`."""
    got = b""
    while not got.endswith(end):
        data = sock.recv(65_536)
        assert data, got
        got += data


@pytest.mark.parametrize("cancels", [1, 3])
@pytest.mark.parametrize("reply", [OK, STREAM + EVENT + b"0\r\n\r\n", b"HTTP/1.1 204 No\r\n\r\n"])
async def test_a_client_with_its_whole_answer_counts_as_answered(
    reply: bytes, cancels: int
) -> None:
    """A client that has its whole answer counts as answered, however soon it disconnects, although
    its handler is cancelled. The event loop is blocked from before the worker answers until the
    client has read everything; then the handler is cancelled, before the loop has seen the reply's
    end.
    """
    rounds = 20
    outcomes: list[Outcome] = []
    engine = socket.create_server(("127.0.0.1", 0))
    go, seen, counted = (threading.Semaphore(0) for _ in range(3))

    def work() -> None:
        sock, _ = engine.accept()
        with sock:
            for _ in range(rounds):
                read_until(sock, b"\r\n\r\n{}")
                go.acquire()
                sock.sendall(reply)

    def client(port: int) -> None:
        for _ in range(rounds):
            with socket.create_connection(("127.0.0.1", port), relay_support.DEADLINE_S) as sock:
                sock.sendall(post(close=False))
                read_until(sock, reply[-4:])
                seen.release()
                counted.acquire()

    async def handle(request: Request) -> Answer:
        answer = ClientReply(request)
        sent = upstream_request(request, request.body)
        sending = asyncio.create_task(upstream.send(sent, answer, Timeouts()))
        await asyncio.sleep(0)
        go.release()
        assert seen.acquire(timeout=relay_support.DEADLINE_S)
        sending.cancel()
        for _ in range(cancels - 1):  # its deadline, the router's end: each cancels once more
            asyncio.get_running_loop().call_soon(sending.cancel)
        outcomes.append(await sending)
        counted.release()
        return answer

    threads = [threading.Thread(target=work, daemon=True)]
    threads[0].start()
    with engine:
        async with served(handle) as port, upstreams_to(engine.getsockname()[1]) as (upstream,):
            threads.append(threading.Thread(target=client, args=(port,), daemon=True))
            threads[1].start()
            await until(lambda: len(outcomes) == rounds, "all were answered")
            await asyncio.to_thread(threads[1].join)
    threads[0].join()
    assert [outcome.error for outcome in outcomes] == [None] * rounds
    assert len({outcome.bytes_to_client for outcome in outcomes}) == 1
