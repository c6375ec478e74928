"""Tests of the launcher: ready lines, failures that show their log, and no process left behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator.live.processes import Programs, StartError, log_tail, parse_ready
from tests.simulator.endpoint import until

READY = "print('ready http://127.0.0.1:{} model=demo events=tcp://127.0.0.1:9', flush=True)\n"
STAY = "import signal, time\n" + READY.format(1) + "time.sleep(600)\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAY
DIES = "import sys\nprint('cannot bind: port in use', file=sys.stderr)\nsys.exit(3)\n"
MUTE = "import time\ntime.sleep(600)\n"


Module = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Return a function that writes a module which the launcher can start, and returns the module's
    name.
    """
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(source: str) -> str:
        (tmp_path / "made_up_program.py").write_text(source)
        return "made_up_program"

    return write


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ready_lines_are_read() -> None:
    url, facts = parse_ready("ready http://127.0.0.1:80/ admin=http://127.0.0.1:81 model=a=b")
    assert url == "http://127.0.0.1:80"
    assert facts == {"admin": "http://127.0.0.1:81", "model": "a=b"}
    with pytest.raises(StartError, match="not a ready line"):
        parse_ready("ready to go")


async def test_programs_start_and_end_together(module: Module, tmp_path: Path) -> None:
    name = module(STAY)
    async with Programs(tmp_path / "logs") as programs:
        started = [await programs.start(f"p{n}", name, []) for n in range(2)]
        pids = [item.process.pid for item in started]
        assert all(map(alive, pids))
        assert started[0].facts["model"] == "demo"
        started[0].check()
    assert not any(map(alive, pids))
    with pytest.raises(StartError, match="p0 ended"):
        started[0].check()


@pytest.mark.parametrize("error", [RuntimeError("broke"), asyncio.CancelledError()])
async def test_programs_end_when_the_block_fails(
    module: Module, tmp_path: Path, error: BaseException
) -> None:
    name = module(STAY)
    pids = []

    async def block() -> None:
        async with Programs(tmp_path) as programs:
            pids.append((await programs.start("p", name, [])).process.pid)
            raise error

    with pytest.raises(type(error)):
        await block()
    assert not alive(pids[0])


async def test_a_program_that_ignores_termination_is_killed(module: Module, tmp_path: Path) -> None:
    name = module(STUBBORN)
    async with Programs(tmp_path, grace_s=0.2) as programs:
        pid = (await programs.start("p", name, [])).process.pid
    assert not alive(pid)


async def test_a_second_interrupt_kills_at_once(module: Module, tmp_path: Path) -> None:
    name = module(STUBBORN)
    inside, pids = asyncio.Event(), []

    async def block() -> None:
        async with Programs(tmp_path, grace_s=600) as programs:
            pids.append((await programs.start("p", name, [])).process.pid)
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(block())
    await inside.wait()
    task.cancel()
    await asyncio.sleep(0)  # one turn of the loop: the block has begun to reap
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not alive(pids[0]))


async def test_a_program_that_dies_shows_its_log(module: Module, tmp_path: Path) -> None:
    name = module(DIES)
    async with Programs(tmp_path) as programs:
        with pytest.raises(StartError, match="port in use") as caught:
            await programs.start("router", name, [])
    assert "router ended with status 3" in str(caught.value)


async def test_a_program_without_a_ready_line_times_out(module: Module, tmp_path: Path) -> None:
    name = module(MUTE)
    async with Programs(tmp_path, start_s=0.3) as programs:
        with pytest.raises(StartError, match=r"not ready after 0\.3 s"):
            await programs.start("router", name, [])


def test_log_tails_are_short(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)) + "half a li")
    tail = log_tail(log)
    assert "line 99" in tail
    assert "line 84" not in tail
    assert "half" not in tail
