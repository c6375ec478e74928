"""Tests of `serve --instances 2` as a program: both instances serve, one that was killed is
restarted, and all end together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from engine.model.tiny import make_tiny
from tests.engine.harness import eventually

BODY = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
LONG = BODY | {"max_tokens": 1500, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory)
    return directory


class Ready:
    """The fields of a program's ready line."""

    def __init__(self, line: bytes) -> None:
        words = line.decode().split()
        assert words[0] == "ready", line
        self.url = words[1]
        facts = dict(word.partition("=")[::2] for word in words[2:])
        self.instance, self.pid, self.events = facts["instance"], int(facts["pid"]), facts["events"]


@contextlib.asynccontextmanager
async def two_instances(model: Path, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine", "serve", str(model), "--instances", "2", "--port", "0"),
        *("--model-name", "tiny", "--grace-s", "60", *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield program
    finally:
        with contextlib.suppress(ProcessLookupError):
            program.kill()
        await program.wait()


async def ready(program: asyncio.subprocess.Process) -> Ready:
    assert program.stdout is not None
    return Ready(await program.stdout.readline())


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, or is a zombie that its parent has not collected."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


async def test_a_killed_instance_restarts_at_its_ports_while_the_other_serves(model: Path) -> None:
    async with two_instances(model) as program, aiohttp.ClientSession() as http:
        one, other = await ready(program), await ready(program)
        assert {one.instance, other.instance} == {"1/2", "2/2"}
        for each in (one, other):
            async with http.post(f"{each.url}/v1/completions", json=BODY) as reply:
                assert reply.status == 200
        async with http.post(f"{other.url}/v1/completions", json=LONG) as stream:
            await stream.content.readline()
            os.kill(one.pid, signal.SIGKILL)
            again = await ready(program)
            assert (again.url, again.events, again.instance) == (one.url, one.events, one.instance)
            async with http.post(f"{again.url}/v1/completions", json=BODY) as reply:
                assert reply.status == 200
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        async with http.post(f"{other.url}/v1/completions", json=LONG) as stream:
            await stream.content.readline()
            program.terminate()
            assert (await stream.read()).endswith(b"data: [DONE]\n\n"), "cut instead of drained"
        assert await program.wait() == 0
        assert is_gone(again.pid)
        assert is_gone(other.pid)


async def test_a_killed_supervisor_leaves_no_instance_behind(model: Path) -> None:
    async with two_instances(model) as program:
        pids = [(await ready(program)).pid for _ in range(2)]
        program.kill()
        await eventually(lambda: all(map(is_gone, pids)), "the instances end")


async def test_an_instance_that_cannot_start_ends_all_instances(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with two_instances(model, "--port", str(port)) as program:
            assert await program.wait() == 1
