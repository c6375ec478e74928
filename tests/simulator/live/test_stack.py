"""Tests of the real programs: one small run with them, and a router with workers that runs until
Ctrl-C.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from simulator.live import processes
from simulator.live.outcome import Outcome
from simulator.live.processes import StartError
from simulator.live.stack import StackSettings, run_scenario
from tests.forks.starting import really_start
from tests.simulator.made_up import shared_prompt
from tests.told_decision import decision_in

TIMEOUT_S = 60.0
PROGRAM = re.compile(rb"\0-m\0(engine|router)\0")  # in the command line of a program of ours


@pytest.fixture(autouse=True)
def children_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the programs of a run as children of this process, as they are for users."""
    monkeypatch.setattr(processes, "launch", really_start)


async def test_a_run_counts_each_request_once_and_leaves_none_in_flight(tmp_path: Path) -> None:
    work = shared_prompt(24, 600, 70, 6, 40.0)
    settings = StackSettings("round_robin", workers=2, speed=2.0)
    seen: list[Outcome] = []
    async with asyncio.timeout(TIMEOUT_S):
        result = await run_scenario(work, settings, tmp_path, seen.append)
    assert len(seen) == 24
    assert [o.error for o in seen if o.error] == []
    assert result.leftovers == ()
    row = result.row
    assert (row.requests, row.completed, row.failed) == (24, 24, 0)
    assert row.requests_per_worker == (12, 12)
    assert {o.output_tokens for o in result.outcomes} == {6}
    # Cold caches: each worker computes the shared prompt at least once, and finds it later.
    assert row.hit_rate_tokens is not None
    assert 0.2 < row.hit_rate_tokens < 0.9
    cached = sum(o.cached_tokens or 0 for o in result.outcomes)
    assert row.hit_rate_tokens == pytest.approx(cached / (24 * 670), abs=1e-4)


async def test_the_error_of_a_run_names_the_worker_that_died(tmp_path: Path) -> None:
    work = shared_prompt(60, 600, 70, 6, 10.0)
    settings = StackSettings("round_robin", workers=2)
    killed: list[int] = []

    def kill_a_worker(_: Outcome) -> None:
        if not killed:
            killed.append(children()[0])
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(StartError, match=r"worker-\d ended with status -9"):
        async with asyncio.timeout(TIMEOUT_S):
            await run_scenario(work, settings, tmp_path, kill_a_worker)
    assert children() == []


def children() -> list[int]:
    """Return the process ids of workers and routers that this process started, oldest first.

    Other tests may leave helper processes in this process; they are not counted. A program that has
    ended, but whose exit status was not collected, has no command line.
    """
    pid = os.getpid()
    found = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [one for one in found if PROGRAM.search(command_line(one))]


def command_line(pid: int) -> bytes:
    """Return the command line of a process, or b"" if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_the_error_of_a_stack_that_cannot_start_names_the_reason(tmp_path: Path) -> None:
    work = shared_prompt(2, 60, 7, 2, 10.0)
    settings = StackSettings("round_robin", workers=1, profile="abacus")
    with pytest.raises(StartError, match="abacus"):
        async with asyncio.timeout(TIMEOUT_S):
            await run_scenario(work, settings, tmp_path, lambda _: None)
    with pytest.raises(StartError, match="no_such_policy"):
        async with asyncio.timeout(TIMEOUT_S):
            await run_scenario(
                work, StackSettings("no_such_policy", workers=1), tmp_path, lambda _: None
            )


async def expected_hit_tokens(line: str) -> int:
    """Send the request of a curl line as a shell parses it; return the hit tokens that the router
    expected.
    """
    shell = await asyncio.create_subprocess_exec(
        *("sh", "-c", f"""curl() {{ printf '%s\\n' "$@"; }}; {line}"""),
        stdout=asyncio.subprocess.PIPE,
    )
    words = (await shell.communicate())[0].decode().splitlines()
    url = next(word for word in words if word.startswith("http://"))
    headers = dict(re.findall(r"^([a-z-]+): (.*)$", "\n".join(words), re.MULTILINE))
    sent = json.loads(words[words.index("-d") + 1])
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url, json=sent) as reply,
    ):
        body = await reply.json()
        assert reply.status == 200, body
        assert body["usage"]["completion_tokens"] == sent["max_tokens"]
        return int(decision_in(reply.headers["x-warmroute-explain"])["expected_hit_tokens"])


async def test_the_stack_prints_a_working_request_and_keeps_running(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        # SIGINT ignored, as a shell without job control leaves it to its background.
        *("sh", "-c", """trap '' INT; exec "$@" """, "sh"),
        *(sys.executable, "-m", "simulator", "stack", "--workers", "2"),
        *("--port", "0", "--admin-port", "0", "--out", str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    text = ""
    async with asyncio.timeout(TIMEOUT_S):
        while "Ctrl-C" not in text:
            line = await process.stdout.readline()
            assert line, text
            text += line.decode()
        curl = re.search(r"^curl .*$", text, re.MULTILINE)
        assert curl is not None, text
        assert len(curl[0]) < 300, "it pastes well"
        hits = [await expected_hit_tokens(curl[0]) for _ in range(2)]
        assert hits[0] == 0
        assert hits[1] >= 8 * 16, "the second one finds its blocks"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
    async with aiohttp.ClientSession() as session:
        for url in re.findall(r"http://127\.0\.0\.1:\d+", text):
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(url)
