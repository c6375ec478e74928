"""Tests that all requests are answered while workers join and leave a hundred times a minute, and
only by workers in the pool.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.wire.announcement import (
    Announcement,
    State,
    encode_announcement,
    entry_key,
    names_key,
)
from tests.live.light_engine import LightEngine
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.live.stack import Stack, running, until

pytestmark = pytest.mark.alone

FLEET = "default"
CHANGES_PER_S = 100 / 60
LEAST, MOST = 3, 10  # workers in the pool
CLIENTS = 6


@dataclass
class Pool:
    """The engines, and the Redis registry that lists them. Lifetime: test."""

    server: RedisServer
    stack: Stack
    rng: random.Random
    here: list[LightEngine] = field(default_factory=list)
    away: list[LightEngine] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    leaving: list[asyncio.Task[None]] = field(default_factory=list)

    def announce(self, engine: LightEngine, state: State = "ready") -> None:
        entry = encode_announcement(
            Announcement(engine.url, state, options={"kind": "openai", "events": "none"})
        )
        client = self.server.client()
        client.set(entry_key(FLEET, engine.url), entry, px=600_000)
        client.sadd(names_key(FLEET), engine.url)

    async def join(self) -> None:
        """Start and announce a new engine, or one that was in the pool before."""
        self.done["joined"] += 1
        again = self.away and self.rng.random() < 0.5
        engine = self.away.pop(self.rng.randrange(len(self.away))) if again else LightEngine()
        engine.closed = False
        if not engine.running:
            await engine.start()
        self.here.append(engine)
        self.announce(engine)

    async def leave(self) -> None:
        """Take an engine out of the pool: it announces that it stops, or it crashes."""
        engine = self.here.pop(self.rng.randrange(len(self.here)))
        if self.rng.random() < 0.3:
            self.done["crashed"] += 1
            self.server.client().delete(entry_key(FLEET, engine.url))
            await engine.stop()
            self.away.append(engine)
        else:
            self.done["left"] += 1
            self.announce(engine, "stopping")
            self.leaving.append(asyncio.create_task(self._see_off(engine)))

    async def _see_off(self, engine: LightEngine) -> None:
        """Wait until the router has removed the engine; the engine then keeps listening to count
        requests that should not come.
        """

        async def gone() -> bool:
            return all(row["url"] != engine.url for row in await self.stack.rows())

        await until(gone, f"{engine.url} to be gone")
        engine.closed = True
        self.away.append(engine)


@asynccontextmanager
async def pool(tmp_path: Path, server: RedisServer, seed: int) -> AsyncIterator[Pool]:
    """Yield a router that discovers its workers in Redis; the pool starts with `LEAST` engines."""
    flags = ["--state", server.url, "--discover", "redis", "--slow-start-s", "1"]
    async with running(tmp_path, workers=0, router=flags) as stack:
        one = Pool(server, stack, random.Random(seed))
        try:
            for _ in range(LEAST):
                await one.join()

            async def ready() -> bool:
                return sum(row["state"] == "ready" for row in await stack.rows()) >= LEAST

            await until(ready, "the first workers")
            yield one
        finally:
            for task in one.leaving:
                task.cancel()
            for engine in one.here + one.away:
                await engine.stop()


@needs_redis
@pytest.mark.parametrize(
    "seconds", [6, pytest.param(60, marks=[pytest.mark.full, pytest.mark.timeout(300)])]
)
async def test_every_request_is_answered_by_a_worker_of_the_pool(tmp_path, seconds) -> None:
    with redis_server(tmp_path / "redis") as server:
        async with pool(tmp_path, server, seed=seconds) as one:
            decoy = LightEngine()  # it listens, but its entry describes another engine
            await decoy.start()
            client = server.client()
            client.sadd(names_key(FLEET), decoy.url)
            client.set(entry_key(FLEET, decoy.url), encode_announcement(Announcement("http://x")))
            answers: Counter[int] = Counter()
            over = asyncio.Event()

            async def ask(number: int) -> None:
                rng = random.Random(number)
                while not over.is_set():
                    prompt = [rng.randrange(5) for _ in range(rng.randrange(1, 60))]
                    status, said = await one.stack.complete(prompt)
                    answers[status] += 1
                    assert status == 200, said

            clients = [asyncio.create_task(ask(number)) for number in range(CLIENTS)]
            for _ in range(int(seconds * CHANGES_PER_S)):
                await asyncio.sleep(1 / CHANGES_PER_S)  # sets the pace of changes
                full, thin = len(one.here) >= MOST, len(one.here) <= LEAST
                await (one.join() if thin or (not full and one.rng.random() < 0.5) else one.leave())
            over.set()
            await asyncio.gather(*clients)
            await asyncio.gather(*one.leaving)
            await one.stack.assert_idle()
            engines = one.here + one.away
            print(f"{dict(one.done)}, {answers[200]} answers by {len(engines)} engines")
            assert set(answers) == {200}
            assert sum(engine.asked.total() for engine in engines) >= answers[200]
            assert [engine.url for engine in engines if engine.wrong] == []
            assert decoy.asked.total() == 0
            await decoy.stop()
            assert sum(engine.asked.total() > 0 for engine in engines) > LEAST
            assert await one.stack.metric("warmroute_discovery_refused_entries") == 1


@needs_redis
async def test_a_flapping_heartbeat_costs_no_request_and_no_sessions_placement(tmp_path) -> None:
    """A worker whose heartbeat is lost again and again costs no request and no session's placement:
    the router removes it at the first loss and waits longer at the next ones.
    """
    with redis_server(tmp_path / "redis") as server:
        async with pool(tmp_path, server, seed=1) as one:
            ill, client = one.here[0], server.client()
            before = {row["url"]: row["id"] for row in await one.stack.rows()}
            steps = []

            async def standing() -> str:
                async with one.stack.http.get(f"{one.stack.admin}/workers") as reply:
                    told = await reply.json()
                rows = {row["url"]: row for row in told["workers"]}
                if ill.url not in rows:
                    return "gone"
                if ill.url in told["sources"][0]["lingering"]:
                    return "lingering"
                return "leaving" if rows[ill.url]["leaving"] else "in"

            async def until_is(*states: str) -> None:
                async def reached() -> bool:
                    return await standing() in states

                await until(reached, f"the worker to be {states}")
                steps.append(await standing())

            for _ in range(4):
                client.delete(entry_key(FLEET, ill.url))
                await until_is("leaving", "lingering", "gone")
                assert (await one.stack.complete([1, 2, 3]))[0] == 200
                one.announce(ill)
                await until_is("in")
            assert [steps[0] in ("leaving", "gone"), *steps[2::2]] == [True] + ["lingering"] * 3
            after = {row["url"]: row["id"] for row in await one.stack.rows() if not row["leaving"]}
            assert len(after) == LEAST
            assert {url: after[url] for url in after if url != ill.url} == {
                url: before[url] for url in before if url != ill.url
            }
            assert sum(engine.wrong for engine in one.here) == 0


async def test_requests_find_the_models_and_adapters_of_workers_listed_in_a_file(tmp_path) -> None:
    """Requests for two base models, an adapter of one worker and an adapter of both go to the right
    workers, which a file lists.
    """
    engines = [
        LightEngine("base", ("tone", "shared")),
        LightEngine("base", ("shared",)),
        LightEngine("other"),
    ]
    for engine in engines:
        await engine.start()
    names = tmp_path / "workers.txt"
    names.write_text("".join(f"{one.url},kind=openai,events=none\n" for one in engines))
    async with running(tmp_path, workers=0, router=["--discover", f"file:{names}"]) as stack:

        async def ready() -> bool:
            return [row["state"] for row in await stack.rows()] == ["ready"] * 3

        await until(ready, "three workers")
        for model, may in (("base", (0, 1)), ("tone", (0,)), ("shared", (0, 1)), ("other", (2,))):
            for number in range(12):
                status, said = await stack.complete([number] * 40, model=model)
                assert status == 200, said
                url = said["choices"][0]["text"]
                assert url in {engines[place].url for place in may}, model
        assert (await stack.complete([1], model="nobody's"))[0] == 404

        names.write_text(f"{engines[1].url},kind=openai,events=none\n")

        async def alone() -> bool:
            return [row["url"] for row in await stack.rows()] == [engines[1].url]

        await until(alone, "the worker that is left")
        assert (await stack.complete([1], model="shared"))[0] == 200
        assert (await stack.complete([1], model="tone"))[0] == 404
    for engine in engines:
        await engine.stop()
