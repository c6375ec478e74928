"""Tests of a pair of routers whose Redis refuses commands, forgets data, restarts, or holds foreign
data.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from tests.live.redis_server import RedisServer, redis_server
from tests.live.router_pair import Pair, pair, until_equal, until_metric
from tests.live.stack import Stack, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

REGISTRY = "warmroute:{default}:replicas"
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not on this machine")
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory, server: RedisServer) -> AsyncIterator[Pair]:
    async with pair(tmp_path_factory.mktemp("logs"), server.url, speed=5) as both:
        yield both


@dataclass
class Spoiled:
    """A Redis that a test damages, with the commands that undo the damage. Lifetime: test."""

    server: RedisServer
    password: str | None = None
    undo: list[list[Any]] = field(default_factory=list)

    def do(self, *words: Any) -> Any:
        with self.server.client(password=self.password) as client:
            return client.execute_command(*words)

    def heal(self) -> None:
        for words in self.undo:
            self.do(*words)


@pytest.fixture
def redis(server: RedisServer) -> Iterator[Spoiled]:
    spoiled = Spoiled(server)
    yield spoiled
    spoiled.heal()


async def until_logged(stack: Stack, words: str, from_char: int) -> None:
    """Wait until the router's log has these words after its first `from_char` characters."""

    async def is_logged() -> bool:
        return words in stack.router.log.read_text()[from_char:]

    await until(is_logged, f"{stack.router.name} to say {words!r}")


async def all_is_well(both: Pair) -> None:
    """Check that both links to Redis are up, the routers are in sync, and no request failed."""
    for stack in both.stacks:
        await until_metric(stack, "replicas_link_up", lambda n: n == 1)
        await until_metric(stack, "replicas_peers", lambda n: n == 1)
        await until_metric(stack, "replicas_peer_in_sync", lambda n: n == 1)
        await until_metric(stack, "replicas_disagreements", lambda n: n == 0)
    await until_equal(both)
    assert both.failed == []
    for stack in both.stacks:
        await stack.assert_idle()


REFUSALS = {
    "read-only replica": (["replicaof", "127.0.0.1", 1], ["replicaof", "no", "one"]),
    "is out of memory": (["config", "set", "maxmemory", 1], ["config", "set", "maxmemory", 0]),
    "lets this user not do": (
        ["acl", "setuser", "default", "-xadd"],
        ["acl", "setuser", "default", "+xadd"],
    ),
}


@pytest.mark.parametrize("words", REFUSALS)
async def test_a_refusal_of_redis_is_logged_and_costs_no_request(
    both: Pair, redis: Spoiled, words: str
) -> None:
    spoil, mend = REFUSALS[words]
    before = [len(stack.router.log.read_text()) for stack in both.stacks]
    redis.undo.append(mend)
    async with both.traffic():
        redis.do(*spoil)
        for stack, from_char in zip(both.stacks, before, strict=True):
            await until_metric(stack, "replicas_link_up", lambda n: n == 0)
            await until_logged(stack, words, from_char)
        served = both.answered
        await _until_served(both, served + 20)
        redis.do(*mend)
        await _until_served(both, both.answered + 20)
    await all_is_well(both)


async def _until_served(both: Pair, count: int) -> None:
    async def reached() -> bool:
        return both.answered >= count

    await until(reached, "requests to be answered")


async def test_a_redis_that_evicts_the_routers_messages_costs_no_request(
    both: Pair, redis: Spoiled
) -> None:
    limit = int(redis.do("info", "memory")["used_memory"]) + 3 * MEGABYTE
    redis.undo += [
        ["config", "set", "maxmemory", 0],
        ["config", "set", "maxmemory-policy", "noeviction"],
    ]
    redis.do("config", "set", "maxmemory-policy", "allkeys-random")
    redis.do("config", "set", "maxmemory", limit)
    ours = ["lapses_total", "connects_total", "trouble_total", "malformed_total"]
    before = [
        await stack.metric(f"warmroute_replicas_{name}") for stack in both.stacks for name in ours
    ]
    async with both.traffic():
        noticed = False
        for number in range(400):  # each pushes out a key, sooner or later one of ours
            redis.do("set", f"somebody-elses-{number}", bytes(MEGABYTE // 4))
            if number % 20 == 19:
                now = [
                    await stack.metric(f"warmroute_replicas_{name}")
                    for stack in both.stacks
                    for name in ours
                ]
                noticed = noticed or now != before
            if noticed:
                break
        assert noticed, "nothing of theirs was evicted"
        redis.heal()
        redis.do("flushall")
        await _until_served(both, both.answered + 20)
    await all_is_well(both)


async def test_a_redis_that_flaps_costs_no_request(both: Pair, server: RedisServer) -> None:
    connects = [await stack.metric("warmroute_replicas_connects_total") for stack in both.stacks]
    async with both.traffic():
        for _ in range(3):
            await asyncio.to_thread(server.pause)
            for stack in both.stacks:
                await until_metric(stack, "replicas_link_up", lambda n: n == 0)
            server.go_on()
            for stack in both.stacks:
                await until_metric(stack, "replicas_link_up", lambda n: n == 1)
        await _until_served(both, both.answered + 20)
    for stack, before in zip(both.stacks, connects, strict=True):
        assert await stack.metric("warmroute_replicas_connects_total") >= before + 3
    await all_is_well(both)


async def test_a_flapping_registry_entry_costs_no_request(both: Pair, redis: Spoiled) -> None:
    lapses = [await stack.metric("warmroute_replicas_lapses_total") for stack in both.stacks]
    async with both.traffic():
        for turn in range(1, 4):
            redis.do("del", REGISTRY)
            for stack, before in zip(both.stacks, lapses, strict=True):
                least = before + turn
                await until_metric(stack, "replicas_lapses_total", lambda n, m=least: n >= m)
    await all_is_well(both)


def _spoilt(payload: bytes, draw: random.Random) -> bytes:
    """Return a spoilt payload: cut short, with changed bytes, or random."""
    kind = draw.randrange(3)
    if kind == 0:
        return payload[: draw.randrange(len(payload))]
    if kind == 1:
        return draw.randbytes(draw.randrange(200))
    changed = bytearray(payload)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


async def test_forged_messages_are_counted_logged_and_leave_no_state(
    both: Pair, redis: Spoiled
) -> None:
    """Messages that no router sent are counted, reported and leave nothing behind; the test writes
    noise and damaged messages to the streams, the arrivals and the registry.
    """
    draw = random.Random(5)
    before = [len(stack.router.log.read_text()) for stack in both.stacks]
    async with both.traffic():
        names = [name.decode() for name in redis.do("hkeys", REGISTRY)]
        assert sorted(name.partition("@")[0] for name in names) == ["one", "two"]
        for turn in range(40):
            stream = f"warmroute:{{default}}:stream:{names[turn % 2]}"
            (_, fields), *_ = redis.do("xrevrange", stream, "+", "-", "count", 1)
            (payload,) = list(fields.values()) if isinstance(fields, dict) else fields[1::2]
            redis.do("xadd", stream, "*", "m", _spoilt(payload, draw))
            redis.do("xadd", stream, "*", "m", payload)  # sent twice with the same number
            redis.do("xadd", stream, "*", "x", b"y")
        redis.do("hset", REGISTRY, "stranger", "nothing", "a@0123456789abcdef", "[" * 10_000)
        redis.do("xadd", "warmroute:{default}:arrivals", "*", "a@0123456789abcdef", b"{}")
        for stack, from_char in zip(both.stacks, before, strict=True):
            await until_metric(stack, "replicas_malformed_total", lambda n: n > 0)
            await until_logged(stack, "ignored entries in redis under", from_char)
            await until_logged(stack, "sent an unreadable message", from_char)
        redis.do("hdel", REGISTRY, "stranger", "a@0123456789abcdef")
        await _until_served(both, both.answered + 20)
    await all_is_well(both)
    for stack in both.stacks:
        async with stack.http.get(f"{stack.admin}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        (told,) = [
            one for one in lines if 'replicas_message_errors_total{reason="malformed"}' in one
        ]
        assert float(told.rsplit(" ", 1)[1]) > 0
        assert "Traceback" not in stack.router.log.read_text()
