"""Tests of the handover between two routers at a hot restart: the old router passes its sockets and
state, and a handover that fails changes nothing in the old router.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from router.cli.serve import _follower
from router.restart import hot_restart
from router.restart.hot_restart import (
    GONE,
    HEAD,
    HELLO,
    MOST_BYTES,
    SERVING,
    HandoverServer,
    HandoverWorker,
    Predecessor,
    RestartHandover,
    Successor,
    take_over,
)
from router.settings.schema import Config
from tests.router.waiting import until

LEFT = RestartHandover(
    2, 1, ("http://10.0.0.9:8000",), (HandoverWorker("http://10.0.0.1:8000", False, True, True),)
)


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


class Router:
    """A running router that a new router may ask to hand over its sockets and state. Lifetime:
    test.
    """

    def __init__(self, path: Path, left: RestartHandover = LEFT) -> None:
        self.sockets = [listening() for _ in range(3)]
        self.handed = asyncio.Event()
        self._left = left
        self.server = HandoverServer(path, self._leave, self._hand_over)

    async def _leave(self) -> tuple[RestartHandover, list[socket.socket]]:
        return self._left, self.sockets

    async def _hand_over(self) -> None:
        self.handed.set()


@asynccontextmanager
async def running_router(path: Path, left: RestartHandover = LEFT) -> AsyncIterator[Router]:
    router = Router(path, left)
    router.server.start()
    try:
        yield router
    finally:
        await router.server.aclose()
        for one in router.sockets:
            one.close()


def close(before: Predecessor) -> None:
    for one in (*before.client, *before.admin):
        one.close()


async def take_over_at(path: Path) -> Predecessor:
    before = await asyncio.to_thread(take_over, path)
    assert before is not None
    return before


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    await until(lambda: text in caplog.text, f"the log to say {text!r}")


async def test_a_successor_gets_sockets_and_state_and_the_old_router_ends(
    tmp_path: Path,
) -> None:
    path = tmp_path / "next.sock"
    async with running_router(path) as router:
        assert path.stat().st_mode & 0o777 == 0o600
        before = await take_over_at(path)
        assert before.handover == LEFT
        names = [one.getsockname() for one in (*before.client, *before.admin)]
        assert names == [one.getsockname() for one in router.sockets]
        assert (len(before.client), len(before.admin)) == (2, 1)
        assert not any(one.getblocking() for one in before.client)
        assert not router.handed.is_set(), "nothing changes until the follower serves"
        await before.serving()
        assert router.handed.is_set()
        close(before)
    assert not path.exists()


async def test_a_starting_router_replaces_the_waiting_one(tmp_path: Path) -> None:
    path = tmp_path / "next.sock"
    async with running_router(path):
        async with running_router(path) as second:
            await (await take_over_at(path)).serving()
            assert second.handed.is_set()
        assert not path.exists()
    assert take_over(path) is None, "nobody is there"
    with pytest.raises(OSError, match=r"hot_restart: cannot listen at .*/none/next.sock"):
        HandoverServer(
            tmp_path / "none" / "next.sock", Router(path)._leave, Router(path)._hand_over
        ).start()


async def test_a_successor_that_leaves_or_sends_garbage_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "next.sock"
    async with running_router(path) as router:
        for said, why in ((b"GET / HTTP/1.1\r\n\r\n...", "which is not"), (b"warm", "hung up")):
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(str(path))
                line.sendall(said)
            await until_logged(caplog, why)
        (await take_over_at(path))._line.close()  # it never serves
        await until_logged(caplog, "the follower left (it hung up); this router goes on")
        assert not router.handed.is_set()
        before = await take_over_at(path)
        await before.serving()
        assert router.handed.is_set()
        close(before)


async def test_silent_successors_and_those_of_other_users_are_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "next.sock"
    monkeypatch.setattr(hot_restart, "_ASKS_S", 0.02)
    async with running_router(path) as router:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(path))
            await until_logged(caplog, "the follower was silent too long")
        monkeypatch.setattr(os, "geteuid", lambda: 4_321)
        monkeypatch.setattr(hot_restart, "_PEER", Stranger)
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(path))
            line.sendall(HELLO)
            await until_logged(caplog, "refused process 7, which is user 8")
        assert not router.handed.is_set()


class Stranger:
    """Stands in for the kernel's struct of credentials and reports a process of another user."""

    size = 12

    @staticmethod
    def unpack(data: bytes) -> tuple[int, int, int]:
        return 7, 8, 9


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "it hung up"),
        (HEAD.pack(MOST_BYTES + 1), f"a handover of {MOST_BYTES + 1} bytes"),
        (HEAD.pack(2) + b"{}", "Object missing required field"),
        (HEAD.pack(9) + b"{}", "it hung up"),
        ("none", "0 sockets"),
        ("fewer", "it hung up"),
    ],
)
async def test_the_error_of_a_failed_handover_has_its_path_and_reason(
    tmp_path: Path, answer: bytes | str, why: str
) -> None:
    path = tmp_path / "next.sock"
    left = msgspec.structs.replace(LEFT, client_sockets=0, admin_sockets=0)
    if answer == "fewer":  # one socket is sent, and then nothing
        left = LEFT
    data = msgspec.json.encode(left)
    if isinstance(answer, str):
        answer = HEAD.pack(len(data)) + data

    def send_answer(server: socket.socket) -> None:
        line, _ = server.accept()
        with line, listening() as one:
            assert line.recv(len(HELLO)) == HELLO
            line.sendall(answer)
            if left is LEFT:
                socket.send_fds(line, [b"."], [one.fileno()])

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        answering = asyncio.create_task(asyncio.to_thread(send_answer, server))
        with pytest.raises(OSError, match=f"{path} does not hand over: .*{why}"):
            await asyncio.to_thread(take_over, path)
        await answering


async def test_a_missing_socket_is_ignored_and_an_invalid_path_is_an_error(tmp_path: Path) -> None:
    assert take_over(tmp_path / "nobody") is None
    with pytest.raises(OSError, match="hot_restart: cannot ask at "):
        take_over(tmp_path / ("long" * 40))


async def test_a_serving_successor_does_not_wait_for_a_hanging_predecessor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hot_restart, "_GONE_S", 0.02)
    ours, theirs = socket.socketpair()
    with theirs:
        await Predecessor(ours, LEFT, [], []).serving()
        assert theirs.recv(64) == SERVING
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(GONE)
        await Predecessor(ours, LEFT, [], []).serving()
    assert ours.fileno() == -1


def test_only_one_successor_is_started_at_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _follower([], Config())()
    assert "no follower is started: the key `hot_restart` names no socket" in caplog.text
    with caplog.at_level("INFO"):
        follower = Successor(["serve", "--config", str(tmp_path / "none.yaml")])
        follower.start()
        follower.start()
        assert "is about to follow already" in caplog.text
        started = follower._process
        assert isinstance(started, subprocess.Popen)
        assert started.wait(30) == 2, "that configuration cannot be read"
    assert "is started to follow" in caplog.text
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    Successor([]).start()
    assert "no follower can be started: " in caplog.text
