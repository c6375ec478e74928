"""Tests that the files and commands of docs/replicas.md, as printed, turn one router into
a pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from simulator.live.processes import Program, Programs
from tests.live.ports import lasting_port
from tests.live.stack import MODEL, Stack, engine_arguments, until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "replicas.md").read_text(encoding="utf-8")
WALK = PAGE.partition("\n## From one router to a pair\n")[2].partition("\n## ")[0]
FILE = "/etc/warmroute/router.yaml"
ROUTERS = "10.0.0.1", "10.0.0.2"
REDIS = "10.0.0.5"
CLIENTS = 4


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of docs/replicas.md in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", WALK, re.MULTILINE | re.DOTALL)


class Here:
    """Maps the page's hosts, ports and files to those of this machine. Lifetime: test."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "router.yaml"
        self.redis_port = lasting_port()
        self.ports = {host: (lasting_port(), lasting_port()) for host in ROUTERS}
        self._names = {FILE: str(self.file), "0.0.0.0": "127.0.0.1"}
        self._names |= {f"--port {6379}": f"--port {self.redis_port}"}
        self._names |= {f"{REDIS}:6379": f"127.0.0.1:{self.redis_port}"}
        for host, (_, admin) in self.ports.items():
            self._names |= {f"{host}:8081": f"127.0.0.1:{admin}"}

    def engine(self, host: str, program: Program) -> None:
        """Map the page's engine at the host's port 8000 to this program."""
        self._names[f"http://{host}:8000"] = program.url

    def localized(self, text: str) -> str:
        """Return the page's text with this machine's addresses and files."""
        for there, here in self._names.items():
            text = text.replace(there, here)
        return text

    def command(self, host: str, folder: Path) -> list[str]:
        """Return the arguments of the router on a host: the page's, and those that two routers on
        one machine need.
        """
        (line,) = [one for block in blocks("sh") for one in block.splitlines() if " serve " in one]
        port, admin = map(str, self.ports[host])
        own = ["--port", port, "--admin-port", admin, "--replicas-name", host]
        hot_restart = ["--hot-restart", str(folder / f"{host}.sock")]  # as in the shipped unit
        return [*self.localized(line).split()[1:], *own, *hot_restart]


@contextlib.asynccontextmanager
async def clients(url: str, http: aiohttp.ClientSession) -> AsyncIterator[list[int]]:
    """Run clients that send requests without a pause; yield the list of their answers' statuses."""
    statuses: list[int] = []

    async def ask(number: int) -> None:
        body = {"model": MODEL, "prompt": [number] * 40, "max_tokens": 4}
        while True:
            async with http.post(f"{url}/v1/completions", json=body) as reply:
                await reply.read()
                statuses.append(reply.status)

    tasks = [asyncio.create_task(ask(number)) for number in range(CLIENTS)]
    try:
        yield statuses
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [end for end in ends if not isinstance(end, asyncio.CancelledError)] == []


def run(command: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def stack_of(programs: Programs, router: Program, http: aiohttp.ClientSession) -> Stack:
    return Stack(programs, router, [], http)


@contextlib.contextmanager
def documented_redis(here: Here, folder: Path):
    """Run redis-server with the page's command during the block."""
    (line,) = [one for block in blocks("sh") for one in block.splitlines() if "redis-server" in one]
    with (folder / "redis.log").open("wb") as log:
        program = ["sh", "-c", f"exec {here.localized(line)}"]
        process = subprocess.Popen(program, stdout=log, cwd=folder)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(
    not (shutil.which("redis-server") and shutil.which("curl")),
    reason="needs redis-server and curl",
)
async def test_the_documented_steps_from_one_router_to_a_pair_lose_no_request(
    tmp_path: Path,
) -> None:
    here = Here(tmp_path)
    began_s = time.monotonic()
    first_yaml, targets = blocks("yaml")
    checks = [one for block in blocks("sh") for one in block.splitlines() if one.startswith("curl")]
    assert len(checks) == len(ROUTERS)
    async with Programs(tmp_path / "logs") as programs, aiohttp.ClientSession() as http:
        for host in ROUTERS:
            here.engine(host, await programs.start(f"at-{host}", "engine", engine_arguments()))
        alone = "workers: [http://10.0.0.1:8000]\n"
        here.file.write_text(here.localized(alone))
        command = here.command(ROUTERS[0], tmp_path)
        before = stack_of(programs, await programs.start("before", "router", command), http)
        await before.until_state(0, "ready")
        with documented_redis(here, tmp_path):
            here.file.write_text(here.localized(first_yaml))
            run(here.localized(f"warmroute config --check {FILE}"))
            async with clients(before.url, http) as statuses:
                after = await programs.start("first", "router", command)
                assert await before.router.process.wait() == 0
                first = stack_of(programs, after, http)
                served = len(statuses)
                second = stack_of(
                    programs,
                    await programs.start("second", "router", here.command(ROUTERS[1], tmp_path)),
                    http,
                )
                for stack in (first, second):
                    await _until_peer_is_known(stack)
                assert len(statuses) > served
            assert set(statuses) == {200}
            for line in checks:
                told = dict(one.rsplit(" ", 1) for one in run(here.localized(line)).splitlines())
                assert len(told) == 3, told
                assert set(told.values()) == {"1.0"}, told
            print(f"from one router to a pair: {time.monotonic() - began_s:.0f} s of the machine's")
            first.router.process.send_signal(signal.SIGKILL)
            for turn in range(10):
                assert (await second.complete([turn] * 40))[0] == 200
            await _metric(second, "peers", 0)
        await _metric(second, "link_up", 0)
        assert (await second.complete([1] * 40))[0] == 200
    (group,) = yaml.safe_load(targets)
    assert group["targets"] == [f"{host}:8081" for host in ROUTERS]
    own = yaml.safe_load((ROOT / "grafana/prometheus/targets/routers.yml").read_text())
    assert own[0].keys() == group.keys()


async def _metric(stack: Stack, name: str, value: float) -> None:
    async def reached() -> bool:
        return await stack.metric(f"warmroute_replicas_{name}") == value

    await until(reached, f"{name} to be {value:g}")


async def _until_peer_is_known(stack: Stack) -> None:
    for worker_id in range(len(ROUTERS)):
        await stack.until_state(worker_id, "ready")
    await _metric(stack, "peer_in_sync", 1)


def test_the_documented_files_and_commands_are_those_that_the_test_expects() -> None:
    assert len(blocks("yaml")) == 2
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert [line.split()[0] for line in lines] == [
        *("redis-server", "warmroute", "warmroute"),
        *("curl", "curl"),
    ]
