"""Tests of `--record DIR`: live traffic is recorded in parts, and a replay of it gives the hits
that workers reported.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from router.record.log_files import parts_in
from router.record.request_line import RequestLine
from simulator.traces.files import opened
from simulator.traces.job import ErrorLog
from simulator.traces.request_log import read_recorded
from tests.live.stack import MODEL, PROFILE, Stack, running

WORKERS, SPEED = 3, 4
SESSIONS, TURNS = 12, 6
POLICY = "hybrid"


def lines_of(folder: Path) -> list[RequestLine]:
    import gzip

    data = b"".join(
        gzip.decompress(part.read_bytes()) if part.suffix == ".gz" else part.read_bytes()
        for part in parts_in(folder)
    )
    return [
        msgspec.json.decode(line, type=RequestLine)
        for line in data.splitlines()
        if b'"format"' not in line
    ]


async def converse(stack: Stack, number: int) -> None:
    """Run a conversation that grows by each answer; a third of the conversations share a prefix.

    Each turn is long compared with the few milliseconds by which a replay's load differs from the
    live one.
    """
    tokens = random.Random(number)
    prompt = [30_000 + number % 3] * 1_024
    for turn in range(TURNS):
        prompt += tokens.choices(range(1_000, 20_000), k=640)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 24}
        if turn % 2:  # streams report cached tokens only if they are asked to
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        url, headers = f"{stack.url}/v1/completions", {"x-session-id": f"session-{number}"}
        async with stack.http.post(url, json=body, headers=headers) as reply:
            assert reply.status == 200
            await reply.read()


async def replayed(folder: Path, source: str, *flags: str) -> dict[str, Any]:
    """Run the replay command in its own process and return its result as a dictionary."""
    found = folder / "replay.json"
    command = (*("-m", "simulator", "replay", source, "--policy", POLICY, "--json"), str(found))
    fleet = ("--workers", str(WORKERS), "--profile", PROFILE, "--speed", str(1 / SPEED))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, *fleet, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, said.decode()
    (row,) = json.loads(found.read_text())["results"]
    return dict(row)


async def test_a_replay_of_recorded_traffic_gives_the_reported_hits(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "recording"
    flags = ["--record", str(folder), "--recording-part-bytes", "16384", "--policy", POLICY]
    async with running(tmp_path, workers=WORKERS, router=flags, speed=SPEED) as stack:
        half = SESSIONS // 2
        await asyncio.gather(*(converse(stack, n) for n in range(half)))
        stack.router.process.send_signal(signal.SIGHUP)  # begins another part
        await asyncio.gather(*(converse(stack, n) for n in range(half, SESSIONS)))
        await stack.assert_idle()  # an answer is counted just after its last byte was sent
        reported = await stack.metric("warmroute_reported_hit_tokens_total")
        stack.router.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(stack.router.process.wait(), 20) == 0
    lines, parts = lines_of(folder), parts_in(folder)
    assert len(lines) == SESSIONS * TURNS
    assert len(parts) > 2
    assert sum(part.suffix == ".gz" for part in parts) == len(parts) - 1
    assert sum(line.cached_tokens or 0 for line in lines) == reported
    assert len({line.session for line in lines}) == SESSIONS, "the same names in all parts"
    live = reported / sum(line.prompt_tokens for line in lines)
    assert live > 0.5
    for source in (str(folder), str(folder / "requests-*")):
        recorded = read_recorded(opened(Path(source)).lines(ErrorLog(source)))
        assert (recorded.requests, recorded.cut) == (SESSIONS * TURNS, False)
    row = await replayed(tmp_path, str(folder))
    assert row["completed"] == SESSIONS * TURNS
    assert abs(row["hit_rate_tokens"] - live) <= 0.01, (live, row["hit_rate_tokens"])


async def test_a_full_disk_loses_lines_but_fails_no_request(tmp_path: Path) -> None:
    """When lines cannot be written, as on a full disk, the recording lacks lines and no request
    fails. The test removes the folder and creates it again.
    """
    folder = tmp_path / "recording"
    flags = ["--record", str(folder), "--recording-part-bytes", "4096"]
    async with running(tmp_path, router=flags) as stack:
        await stack.complete([1] * 40)
        lost = 'warmroute_request_log_lines_total{result="lost"}'
        folder.rename(tmp_path / "away")
        count = 0
        while await stack.metric(lost) == 0:  # the open file continues until it is full
            count += 1
            assert count < 400
            assert (await stack.complete([count] * 400))[0] == 200
        (tmp_path / "away").rename(folder)
        assert (await stack.complete([2] * 40))[0] == 200
        stack.router.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(stack.router.process.wait(), 20) == 0
    said = (tmp_path / "router.log").read_text()
    assert said.count("lines are lost: cannot write") == 1
    assert "request log goes on after" in said
    assert lines_of(folder)[-1].prompt_tokens == 40
