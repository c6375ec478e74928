"""Tests of what a router records of real traffic: everything except prompts and other secrets."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from kvkernels import chain_hashes
from policies.facts import Stored
from router.record.facts import Player, fact_of, records
from router.record.request_line import Header, RequestLine, hashes_of
from router.record.salt import salt_in
from simulator.traces.files import opened
from simulator.traces.job import ErrorLog
from simulator.traces.request_log import read_recorded
from tests.live.commands import output_of
from tests.live.stack import MODEL, Stack, engine_arguments, metric_sum, running, until

TRUNK = list(range(23_001, 23_001 + 320))  # 20 blocks; no file may hold these token ids
SECRETS = ("the launch code is swordfish", "alice@example.org", "team-orca", "sk-do-not-log")
ROUTER = ["--intervals-health-s", "0.1", "--timeouts-probe-s", "0.5"]


def families(number: int) -> list[int]:
    """Return a prompt that shares a prefix with all others, and a longer one with every fourth."""
    return [*TRUNK, *([24_000 + number % 4] * 64), 25_000 + number]


async def ask(stack: Stack, number: int, **fields: Any) -> int:
    """Send a request and read its answer until it ends or breaks off; return the status."""
    headers = {"x-session-id": f"{SECRETS[1]}-{number % 4}", "Authorization": SECRETS[3]}
    body = {"model": MODEL, "prompt": families(number), "max_tokens": 6} | fields
    try:
        async with stack.http.post(
            f"{stack.url}/v1/completions", json=body, headers=headers
        ) as reply:
            await reply.read()
    except aiohttp.ClientPayloadError:
        pass
    return reply.status


async def leave(stack: Stack, number: int) -> None:
    """Ask for a long stream, and disconnect after its first line."""
    body = {"model": MODEL, "prompt": families(number), "max_tokens": 5_000, "stream": True}
    reply = await stack.http.post(f"{stack.url}/v1/completions", json=body)
    await reply.content.readline()
    reply.close()


async def traffic(stack: Stack) -> int:
    """Send requests of every kind while a worker dies and returns; return how many were sent."""
    await asyncio.gather(*(ask(stack, n, stream=n % 2 == 0) for n in range(24)))
    victim = stack.workers[0].process
    asked = [asyncio.create_task(ask(stack, 100 + n, stream=n % 3 == 0)) for n in range(24)]
    await asyncio.sleep(0)
    victim.send_signal(signal.SIGKILL)
    await victim.wait()
    await asyncio.gather(*asked)
    await stack.until_state(0, "down")
    port = int(stack.workers[0].url.rpartition(":")[2])
    again = await stack.programs.start("again", "engine", engine_arguments(port=port))
    stack.workers[0] = again
    await stack.until_state(0, "ready")
    await asyncio.gather(leave(stack, 200), *(ask(stack, 201 + n, stream=True) for n in range(11)))
    assert await ask(stack, 300, model=SECRETS[0]) == 404
    for n in range(4):
        assert await ask(stack, n, prompt=f"{SECRETS[0]} " * 20, user=SECRETS[2]) == 200
    await stack.assert_idle()
    return 24 + 24 + 12 + 1 + 4


async def stop(stack: Stack) -> None:
    stack.router.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(stack.router.process.wait(), 20) == 0


def read(path: Path) -> list[RequestLine]:
    head, *lines = path.read_bytes().splitlines()
    header = msgspec.json.decode(head, type=Header)
    assert (header.format, header.version, header.workers) == ("warmroute-requests", 1, 3)
    assert header.policy.startswith("warmset?")
    return [msgspec.json.decode(line, type=RequestLine) for line in lines]


async def test_a_real_runs_log_and_facts_are_complete_and_contain_no_secret(tmp_path: Path) -> None:
    log, facts = tmp_path / "requests.jsonl", tmp_path / "facts"
    flags = [*ROUTER, "--request-log", str(log), "--record-facts", str(facts)]
    async with running(tmp_path, workers=3, router=flags, speed=5) as stack:
        asked = await traffic(stack)
        metrics = {
            name: await stack.metric(f"warmroute_{name}_total")
            for name in (
                *("decisions", "rejections", "reported_hit_tokens", "expected_hit_tokens"),
                *("retries", "replies"),
            )
        }
        answered = await metric_sum(stack.http, stack.admin, "warmroute_request_seconds_count")
        await stop(stack)
    lines = read(log)
    assert len(lines) == asked
    assert sum(line.attempts for line in lines) == metrics["decisions"]
    assert sum(line.status == 404 for line in lines) == metrics["rejections"] == 1
    assert sum(line.cached_tokens or 0 for line in lines) == metrics["reported_hit_tokens"] > 0
    assert sum(line.error is None and line.attempts > 0 for line in lines) == answered
    assert sum(line.error == "client" for line in lines) == 1
    once = sum(line.hit_tokens or 0 for line in lines if line.attempts == 1)
    assert once <= metrics["expected_hit_tokens"]
    assert sum(line.attempts > 1 for line in lines) <= metrics["retries"]
    families_of = Counter(line.session for line in lines if not line.approximate)
    assert len(families_of) == 5  # four sessions, and the client that left without one
    chains = {hashes_of(line.chain).tobytes() for line in lines if line.block_size == 16}
    plain = chain_hashes(np.array(TRUNK, dtype=np.int32), 16, 0)
    assert plain.tobytes()[:8] not in b"".join(chains)  # without the salt, no guess can be checked
    trunk = salt_in(tmp_path / "requests.jsonl.salt").keyed(plain).tobytes()
    assert sum(chain.startswith(trunk) for chain in chains) == 4
    assert_played(facts)
    assert_secret(log.read_bytes(), facts.read_bytes())


def assert_played(facts: Path) -> None:
    player = Player(facts)
    assert [str(difference) for difference in player.differences()] == []
    assert player.ended == "the router ended"
    assert player.actions >= 65
    kinds = Counter(r[1] for r in records(facts) if isinstance(r, list) and r[0] == "fact")
    assert min(kinds[kind] for kind in ("KvEvents", "Progress", "Failure", "LoadReport")) > 0
    stored = [
        event
        for r in records(facts)
        if isinstance(r, list) and r[:1] == ["fact"] and r[1] == "KvEvents"
        for event in fact_of(r[1], r[2]).events
        if isinstance(event, Stored)
    ]
    late = sum(isinstance(r, list) and r[0] == "late" for r in records(facts))
    chains = [event.chain for event in stored if event.chain is not None]
    assert len(chains) == len(stored) > 0
    assert sum(len(chain) == 0 for chain in chains) == late
    assert not any(event.tokens for event in stored)


def assert_secret(*files: bytes) -> None:
    """Check that the files have no prompt, header or key, and no run of token ids in any
    spelling.
    """
    pair = TRUNK[40:42]
    spelled = [
        *(secret.encode() for secret in SECRETS),
        msgspec.json.encode(pair)[1:-1],
        b", ".join(b"%d" % token for token in pair),
        msgspec.msgpack.encode(pair)[1:],
        np.array(pair, dtype="<i4").tobytes(),
        np.array(pair, dtype="<i8").tobytes(),
    ]
    for data in files:
        assert len(data) > 1_000
        assert [text for text in spelled if text in data] == []


async def test_the_request_log_can_be_moved_while_requests_run(tmp_path: Path) -> None:
    log, moved = tmp_path / "requests.jsonl", tmp_path / "moved"
    async with running(tmp_path, workers=3, router=["--request-log", str(log)]) as stack:
        for n in range(5):
            await stack.complete(families(n))

        async def written() -> bool:
            return await stack.metric("warmroute_request_log_lines_total") == 5

        await until(written, "five lines")
        log.rename(moved)
        stack.router.process.send_signal(signal.SIGHUP)

        async def begun() -> bool:
            return log.exists()

        await until(begun, "the file to be begun anew")
        for n in range(4):
            await stack.complete(families(n))
        await stop(stack)
    assert (len(read(moved)), len(read(log))) == (5, 4)


async def test_a_reload_to_another_policy_writes_a_new_header(tmp_path: Path) -> None:
    """A reload to another policy writes a new header to the log, whose readers take the last header
    for the running configuration.
    """
    log, file = tmp_path / "requests.jsonl", tmp_path / "router.yaml"
    keys = f"request_log: {log}\npolicy: "
    file.write_text(f"{keys}kv_prefix\n")
    async with running(tmp_path, workers=2, router=["--config", str(file)]) as stack:
        for policy in ("kv_prefix", "round_robin", "kv_prefix"):
            file.write_text(f"{keys}{policy}\n")
            stack.router.process.send_signal(signal.SIGHUP)

            async def decides(policy: str = policy) -> bool:
                async with stack.http.get(f"{stack.admin}/policy") as reply:
                    return (await reply.json())["policy"].startswith(f"{policy}?")

            await until(decides, policy)
            for n in range(3):
                await stack.complete(families(n))
        await stop(stack)
    found: list[tuple[str, int]] = []  # policy of each header, and lines below it
    for raw in log.read_bytes().splitlines():
        if b'"format"' in raw:
            found.append((msgspec.json.decode(raw, type=Header).policy.partition("?")[0], 0))
        else:
            found[-1] = (found[-1][0], found[-1][1] + 1)
    assert found == [("kv_prefix", 3), ("round_robin", 3), ("kv_prefix", 3)]
    recorded = read_recorded(opened(log).lines(ErrorLog(str(log))))
    assert [name.partition("?")[0] for name in recorded.policies] == ["round_robin", "kv_prefix"]
    assert (recorded.requests, recorded.under_last) == (9, 3)


@pytest.mark.parametrize("flag", ["--request-log", "--record-facts"])
async def test_an_unwritable_file_ends_the_start(tmp_path: Path, flag: str) -> None:
    place = Path("/proc/version/log") if flag == "--request-log" else Path("/proc/warmroute-facts")
    status, said = await output_of("serve", "--port", "0", "--admin-port", "0", flag, str(place))
    assert status in (1, 2)
    assert str(place.parent) in said
    assert flag.strip("-").replace("-", "_") in said
    assert len(said.splitlines()) == 1
