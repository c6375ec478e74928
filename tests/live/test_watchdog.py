"""Tests that systemd's watchdog and liveness probes notice a router that hangs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import yaml

from simulator.live.processes import environment
from tests.deploy.parsed import DEPLOY
from tests.frozen import freeze, runs, thread_frozen
from tests.live.ports import lasting_port
from tests.live.stack import Stack, running, until
from tests.pauses import measured

WATCHDOG_S = 0.6
HANGS = "tests.live.bad_policies:hangs_in_c"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@dataclass
class Manager:
    """Stands in for systemd: a notify socket that keeps the messages of services.
    Lifetime: test.
    """

    line: socket.socket
    notices: list[tuple[float, int, dict[str, str]]] = field(default_factory=list)  # when, by whom

    def receive(self) -> None:
        while True:
            try:
                data, more, _, _ = self.line.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            (pid, _, _) = _CREDENTIALS.unpack(more[0][2])
            lines = dict(line.split("=", 1) for line in data.decode().splitlines())
            self.notices.append((time.monotonic(), pid, lines))

    def times(self, word: str, pid: int | None = None) -> list[float]:
        """Return the times of messages with this word, from one process or from all."""
        return [at for at, by, lines in self.notices if word in lines and pid in (None, by)]

    async def until_received(self, word: str, count: int = 1, pid: int | None = None) -> None:
        async def is_received() -> bool:
            return len(self.times(word, pid)) >= count

        await until(is_received, f"{count} x {word}: {self.notices[-3:]}")

    async def silent(self, pid: int) -> bool:
        """Return whether a process sends no watchdog message for twice systemd's waiting time."""
        before = len(self.times("WATCHDOG", pid))
        await asyncio.sleep(2 * WATCHDOG_S)
        return len(self.times("WATCHDOG", pid)) == before


@pytest_asyncio.fixture
async def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Manager]:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    line.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))
    one, loop = Manager(line), asyncio.get_running_loop()
    loop.add_reader(line, one.receive)
    yield one
    loop.remove_reader(line)
    line.close()


async def lives(stack: Stack) -> bool:
    """Return whether the liveness probe of the sample deployment succeeds."""
    parts = yaml.safe_load_all((DEPLOY / "kubernetes" / "central.yaml").read_text())
    deployments = [part for part in parts if part["kind"] == "Deployment"]
    containers = [c for d in deployments for c in d["spec"]["template"]["spec"]["containers"]]
    (router,) = [container for container in containers if container["name"] == "router"]
    probe = router["livenessProbe"]
    url = {"http": stack.url, "admin": stack.admin}[probe["httpGet"]["port"]]
    timeout = aiohttp.ClientTimeout(total=probe["timeoutSeconds"])
    try:
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
            http.get(url + probe["httpGet"]["path"]) as reply,
        ):
            return 200 <= reply.status < 400
    except (aiohttp.ClientError, TimeoutError):
        return False


async def test_systemd_is_notified_of_start_reload_and_stop(
    tmp_path: Path, manager: Manager
) -> None:
    async with running(tmp_path, workers=1) as stack:
        pid = stack.router.process.pid

        async def between_s() -> float:
            before = len(manager.times("WATCHDOG"))
            await manager.until_received("WATCHDOG", before + 5)
            beats = manager.times("WATCHDOG")[before:]
            return (beats[-1] - beats[0]) / (len(beats) - 1)

        def often(found_s: float) -> bool:
            return found_s < 0.75 * WATCHDOG_S  # the router notifies at half of it

        assert often(await measured(between_s, often))
        assert {by for _, by, _ in manager.notices} == {pid}
        stack.router.process.send_signal(signal.SIGHUP)
        await manager.until_received("READY", 2)
        (reload,) = [lines for _, _, lines in manager.notices if "RELOADING" in lines]
        assert 0 <= time.monotonic() - int(reload["MONOTONIC_USEC"]) / 1e6 < 20
        stack.router.process.send_signal(signal.SIGTERM)
        await manager.until_received("STOPPING")
        words = [word for _, _, lines in manager.notices for word in lines if word != "WATCHDOG"]
        assert words.index("READY") < words.index("RELOADING") < words.index("STOPPING")
        assert await stack.router.process.wait() == 0


async def test_the_watchdog_notices_a_policy_that_loops_in_c_and_logs_it(
    tmp_path: Path, manager: Manager
) -> None:
    router = ["--policy", HANGS, "--policy-hang-s", "3600"]  # the router's own check is too slow
    async with running(tmp_path, workers=1, router=router) as stack:
        pid = stack.router.process.pid
        await until(partial(lives, stack), "the probe to succeed")
        await manager.until_received("WATCHDOG", pid=pid)
        asking = asyncio.ensure_future(stack.complete([1]))
        assert await manager.silent(pid)
        assert not await lives(stack)
        stack.router.process.send_signal(signal.SIGABRT)  # as systemd does in this case
        assert await asyncio.wait_for(stack.router.process.wait(), 20) == -signal.SIGABRT
        with pytest.raises(aiohttp.ClientError):
            await asking
        assert re.search(r'bad_policies.py", line \d+ in hangs_in_c', stack.router.log.read_text())


async def test_the_watchdog_notices_a_stopped_router_that_recovers_when_continued(
    tmp_path: Path, manager: Manager
) -> None:
    async with running(tmp_path, workers=1) as stack:
        pid = stack.router.process.pid
        await until(partial(lives, stack), "the probe to succeed")
        freeze(pid)
        assert await manager.silent(pid)
        assert not await lives(stack)
        stack.router.process.send_signal(signal.SIGCONT)
        await manager.until_received("WATCHDOG", len(manager.times("WATCHDOG")) + 2)
        await until(partial(lives, stack), "the probe to succeed")
        assert (await stack.complete([1]))[0] == 200


async def test_the_watchdog_notices_a_relay_that_hangs_while_python_runs(
    tmp_path: Path, manager: Manager
) -> None:
    async with running(tmp_path, workers=1) as stack:
        pid = stack.router.process.pid
        assert (await stack.complete([1]))[0] == 200
        await until(partial(lives, stack), "the probe to succeed")
        with thread_frozen(pid, "warmroute-relay"):
            assert await manager.silent(pid)

            async def noticed() -> bool:
                return not await lives(stack)

            await until(noticed, "the probe to fail")
            async with stack.http.get(f"{stack.url}/health") as reply:
                assert (await reply.json())["status"] == "the relay's thread hangs"
        await manager.until_received("WATCHDOG", len(manager.times("WATCHDOG")) + 1)
        await until(partial(lives, stack), "the probe to succeed")


async def test_after_a_hot_restart_the_watchdog_watches_the_new_router(
    tmp_path: Path, manager: Manager
) -> None:
    """After a hot restart, systemd's watchdog watches the new router, which is not the process that
    systemd started and whose number WATCHDOG_PID has.
    """
    ports = "--port", str(lasting_port()), "--admin-port", str(lasting_port())
    place = "--hot-restart", str(tmp_path / "next")
    command = sys.executable, "-m", "router", "serve", *ports, *place
    started = 'export WATCHDOG_PID=$$; exec "$@"'
    with (tmp_path / "log").open("wb") as log:
        before = await asyncio.create_subprocess_exec(
            *("sh", "-c", started, "sh", *command),
            stdout=log,
            stderr=log,
            env=environment(),
        )
        try:
            await manager.until_received("WATCHDOG", 2, before.pid)
            before.send_signal(signal.SIGUSR2)
            assert await asyncio.wait_for(before.wait(), 40) == 0
            main = [int(lines["MAINPID"]) for _, _, lines in manager.notices if "MAINPID" in lines]
            assert main[0] == before.pid != main[-1]
            served_s = manager.times("MAINPID", main[-1])[-1]
            await manager.until_received("WATCHDOG", 2, main[-1])
            assert manager.times("WATCHDOG", before.pid)[-1] <= served_s + WATCHDOG_S
        finally:
            for pid in {lines.get("MAINPID") for _, _, lines in manager.notices} - {None}:
                if runs(int(pid)):
                    os.kill(int(pid), signal.SIGTERM)
