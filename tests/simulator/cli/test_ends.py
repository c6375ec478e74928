"""Tests of replays that end early: after signals and closed pipes, no process is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.simulator.cli_support import trace
from tests.simulator.endpoint import until

TIMEOUT_S = 60.0
# Python dies of SIGINT, which shells show as 130, if the signal arrives during an exec.
INTERRUPTED = (130, -signal.SIGINT)
# Minutes of work, which no test waits for.
LONG = ("replay", "gen:zipf?requests=3000000&rate=20", "--policy", "round_robin")
# TERM and HUP have the same handler, so CI runs each test with only one of them.
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
full = pytest.mark.full


async def start(*arguments: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "simulator", *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_heed_hangup,
    )


def _heed_hangup() -> None:
    """Restore the default of SIGHUP: programs that `nohup` starts ignore this signal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


async def finish(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    async with asyncio.timeout(TIMEOUT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def in_session(leader: int) -> dict[int, str]:
    """Return the live processes of a session by their id, with the signals that each one
    catches.
    """
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            status = (folder / "status").read_text()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found[int(folder.name)] = status.partition("SigCgt:")[2].split()[0]
    return found


def caught(signals: str, number: int) -> bool:
    return bool(int(signals, 16) >> (number - 1) & 1)


@contextmanager
def no_process_left(leader: int) -> Iterator[None]:
    """Assert that no process of the session is left; kill those that a failed test left behind."""
    try:
        yield
        assert in_session(leader) == {}
    finally:
        for process_id in in_session(leader):
            os.kill(process_id, signal.SIGKILL)


@pytest.mark.parametrize("number", [INT, TERM, pytest.param(HUP, marks=full)])
async def test_a_signal_ends_a_replay(number: signal.Signals) -> None:
    process = await start(*LONG)
    with no_process_left(process.pid):
        await until(lambda: caught(in_session(process.pid).get(process.pid, "0"), signal.SIGTERM))
        process.send_signal(number)
        status, _, err = await finish(process)
    assert status in INTERRUPTED
    assert err == "warmroute-sim: stopped; everything it started has ended\n"


@pytest.mark.parametrize("number", [INT, HUP, pytest.param(TERM, marks=full)])
async def test_a_signal_ends_all_processes_of_a_replay(number: signal.Signals) -> None:
    process = await start(*LONG, "--seed", 1, "--seed", 2, "--jobs", 2)
    with no_process_left(process.pid):
        # The two processes that replay, and Python's tracker of shared resources.
        await until(lambda: len(in_session(process.pid)) == 4)
        if number == signal.SIGINT:  # a terminal sends it to all processes
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        status, _, err = await finish(process)
        await until(lambda: not in_session(process.pid))
    assert status in INTERRUPTED
    assert err == "warmroute-sim: stopped; everything it started has ended\n"


async def test_child_processes_end_when_the_main_process_is_killed() -> None:
    process = await start(*LONG, "--seed", 1, "--seed", 2, "--jobs", 2)
    with no_process_left(process.pid):
        await until(lambda: len(in_session(process.pid)) == 4)
        process.kill()
        await process.wait()
        await until(lambda: not in_session(process.pid))


async def test_a_killed_child_process_is_reported() -> None:
    process = await start(*LONG, "--seed", 1, "--seed", 2, "--jobs", 2)
    with no_process_left(process.pid):
        ended = asyncio.ensure_future(finish(process))
        while not ended.done():  # each run is tried twice
            for process_id in replaying(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            await asyncio.sleep(0.1)
        status, _, err = ended.result()
        await until(lambda: not in_session(process.pid))
    assert status == 1
    assert "its process was killed by SIGKILL, 2 times; too little memory?; fewer --jobs" in err


def replaying(leader: int) -> list[int]:
    """Return the ids of the processes that replay: the leader's children except Python's resource
    tracker.
    """
    found = []
    for process_id in in_session(leader):
        try:
            command = Path(f"/proc/{process_id}/cmdline").read_bytes()
        except OSError:
            continue
        if b"spawn_main" in command:
            found.append(process_id)
    return found


async def test_a_closed_output_pipe_exits_with_1_and_without_a_message(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "simulator", "replay", str(trace(tmp_path)), "--workers", "2"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    transport = process._transport.get_pipe_transport(1)  # type: ignore[attr-defined]
    transport.close()
    async with asyncio.timeout(TIMEOUT_S):
        assert process.stderr is not None
        err = await process.stderr.read()
        status = await process.wait()
    assert (status, err) == (1, b"")
