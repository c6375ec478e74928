"""Tests of data-parallel ranks: one URL with several workers, each with its own cache, load and
header.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from router.assembly import Router
from router.config.items import BadItemsError
from router.config.keys import keys_of
from router.core.placement.worker_caches import TableFullError
from router.core.workers.table import Worker
from router.engines.worker_spec import parse_worker_spec
from router.fleet.manager import DuplicateWorkerError, reconcile
from router.fleet.member import Member
from router.fleet.wanted import WantedWorker
from router.server.listener import ClientListener
from router.settings.ports import client_port_settings
from router.settings.rules import check_value
from router.settings.schema import Config, Intervals, Limits
from tests.router.engines.ranked_engine import BLOCK_TOKENS, BLOCKS, RankedEngine, ranked_engine
from tests.router.fleet.fleet_support import admin_port
from tests.router.waiting import DEADLINE_S, until

PROMPT = tuple(range(1, 8 * BLOCK_TOKENS + 1))
HEALTH_S, LOAD_S = 0.05, 0.05


@dataclass
class Front:
    """A router with its client port and its admin port. Lifetime: test."""

    router: Router
    client_url: str
    admin_url: str
    http: aiohttp.ClientSession

    @property
    def members(self) -> list[Member]:
        return [m for m in self.router.fleet.members.values() if not m.leaving]

    @property
    def ready(self) -> list[str]:
        """Return the names of the workers that take requests; a name includes the rank."""
        taking = [m for m in self.members if m.ready]
        assert all(m.rank == m.spec.rank for m in taking), taking
        return sorted(m.spec.name for m in taking)

    def core_worker(self, member: Member) -> Worker:
        worker = self.router.dispatcher.core.workers.get(member.worker_id)
        assert worker is not None
        return worker

    async def until_ready(self, *names: str) -> None:
        """Wait until exactly these workers are ready, and each has reported its load."""
        await until(lambda: self.ready == sorted(names), f"{names} to be ready")
        slots = [self.core_worker(member).slot for member in self.members]
        at_s = self.router.dispatcher.core.columns.report_s
        await until(lambda: bool(np.isfinite(at_s[slots]).all()), "their loads")

    async def complete(self, **headers: str) -> int:
        """Send a completion and return the number of the worker that answered it."""
        body = {"model": "m", "prompt": list(PROMPT), "max_tokens": 1}
        url = f"{self.client_url}/v1/completions"
        async with self.http.post(url, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            return int(reply.headers["x-warmroute-worker"])

    async def ask(self, method: str, path: str) -> tuple[int, Any]:
        async with self.http.request(method, self.admin_url + path) as reply:
            return reply.status, await reply.json()


@asynccontextmanager
async def front(workers: int = 8) -> AsyncIterator[Front]:
    times = Intervals(load_report_s=LOAD_S, health_s=HEALTH_S)
    async with aiohttp.ClientSession() as http:
        router = Router(Config(limits=Limits(workers=workers), intervals=times), http)
        config = msgspec.structs.replace(router.config, port=0, trusted_peers=("127.0.0.0/8",))
        client = ClientListener(lambda: client_port_settings(config), 1_024)
        try:
            async with admin_port(router) as url:
                yield Front(router, await client.listen(router.client_port()), url, http)
        finally:
            await client.aclose()
            await router.aclose()


@asynccontextmanager
async def router_with_ranks(
    options: str = "", ranks: int = 2
) -> AsyncIterator[tuple[Front, RankedEngine]]:
    async with ranked_engine(ranks) as engine, front() as one:
        one.router.fleet.add(parse_worker_spec(engine.url + options))
        yield one, engine


async def test_requests_go_to_the_rank_with_their_prefix_and_have_its_header() -> None:
    async with router_with_ranks() as (one, engine):
        engine.busy = 0
        await one.until_ready(f"{engine.url}#0", f"{engine.url}#1")
        member = next(m for m in one.members if m.spec.rank == 1)
        worker = one.core_worker(member)
        deadline_s = time.monotonic() + DEADLINE_S
        while worker.kv.resident_blocks < 8:  # until the subscription has taken hold
            assert time.monotonic() < deadline_s, "no event arrived"
            await engine.publish(1, PROMPT)
            await asyncio.sleep(0.01)
        for _ in range(3):
            answered = await one.complete(**{"X-Data-Parallel-Rank": "0"})
            assert (answered, engine.wanted[-1]) == (member.worker_id, "1")


async def test_each_rank_has_its_own_load_from_one_shared_poll() -> None:
    async with router_with_ranks(ranks=3) as (one, engine):
        names = [f"{engine.url}#{rank}" for rank in range(3)]
        await one.until_ready(*names)
        core = one.router.dispatcher.core
        slots = {}
        for member in one.members:
            worker = one.core_worker(member)
            assert worker.facts.kv_capacity_tokens == BLOCKS * BLOCK_TOKENS
            slots[member.rank] = worker.slot
        foreign = core.columns.foreign_running
        reported = {rank: 10 + rank for rank in range(3)}
        await until(
            lambda: {rank: int(foreign[slot]) for rank, slot in slots.items()} == reported,
            "each rank's load",
        )
        # Without an answer each asker keeps its request open: three ranks would have three.
        engine.answers.clear()
        paths = ("/health", "/metrics")
        await until(lambda: all(engine.open[path] for path in paths), "a probe of each path")
        await asyncio.sleep(5 * max(HEALTH_S, LOAD_S))
        assert [engine.open[path] for path in paths] == [1, 1]
        engine.answers.set()


async def test_ranks_are_added_and_removed_with_those_of_the_engine() -> None:
    async with router_with_ranks(ranks=1) as (one, engine):
        await one.until_ready(engine.url)
        engine.ranks = 3
        await one.until_ready(*(f"{engine.url}#{rank}" for rank in range(3)))
        engine.ranks = 2
        await one.until_ready(f"{engine.url}#0", f"{engine.url}#1")
        engine.ranks = 1
        await one.until_ready(engine.url)
        await one.complete()
        assert engine.wanted[-1] is None


async def test_a_clients_rank_header_is_kept_if_the_worker_has_a_single_rank() -> None:
    async with router_with_ranks(ranks=1) as (one, engine):
        await one.until_ready(engine.url)
        await one.complete(**{"X-Data-Parallel-Rank": "0"})
        assert engine.wanted == ["0"]


async def test_a_single_rank_may_be_configured() -> None:
    async with router_with_ranks(",rank=1") as (one, engine):
        await one.until_ready(f"{engine.url}#1")
        await one.complete()
        assert engine.wanted == ["1"]
        fleet = one.router.fleet
        for again in ("", ",rank=1"):
            with pytest.raises(DuplicateWorkerError):
                fleet.add(parse_worker_spec(engine.url + again))
        fleet.add(parse_worker_spec(f"{engine.url},rank=0"))
        await one.until_ready(f"{engine.url}#0", f"{engine.url}#1")
        lost = fleet.add(parse_worker_spec(f"{engine.url},rank=5"))
        await until(lambda: "no rank 5; its ranks: 0, 1" in lost.trouble, "the reason")


async def test_a_removed_rank_stays_removed_and_a_delete_by_url_removes_all() -> None:
    async with router_with_ranks() as (one, engine):
        await one.until_ready(f"{engine.url}#0", f"{engine.url}#1")
        with pytest.raises(DuplicateWorkerError):
            one.router.fleet.add(parse_worker_spec(engine.url))
        second = next(m for m in one.members if m.spec.rank == 1)
        status, _ = await one.ask("DELETE", f"/workers/{second.worker_id}?force=true")
        assert status == 200
        engine.ranks = 3
        await one.until_ready(f"{engine.url}#0", f"{engine.url}#2")
        status, shown = await one.ask("POST", f"/workers/drain?url={engine.url}")
        assert status == 200
        assert [row["rank"] for row in shown["workers"]] == [0, 2]
        assert one.ready == []
        status, shown = await one.ask("DELETE", f"/workers?url={engine.url}/&force=true")
        assert (status, [row["state"] for row in shown["workers"]]) == (200, ["gone", "gone"])
        assert one.members == []
        assert (await one.ask("DELETE", f"/workers?url={engine.url}"))[0] == 404
        assert (await one.ask("POST", "/workers/drain"))[0] == 404
        one.router.fleet.add(parse_worker_spec(engine.url))
        await one.until_ready(*(f"{engine.url}#{rank}" for rank in range(3)))


async def test_a_reload_keeps_the_ranks_of_an_unchanged_url() -> None:
    async with router_with_ranks() as (one, engine):
        names = (f"{engine.url}#0", f"{engine.url}#1")
        await one.until_ready(*names)
        ids = [m.worker_id for m in one.members]
        fleet = one.router.fleet
        assert reconcile(fleet, [WantedWorker(parse_worker_spec(engine.url))]) == []
        assert (
            reconcile(fleet, [WantedWorker(parse_worker_spec(f"{engine.url},max_requests=3"))])
            == []
        )
        assert [m.worker_id for m in one.members] == ids
        assert [m.spec.max_requests for m in one.members] == [3, 3]
        assert [m.spec.name for m in one.members] == list(names)
        reconcile(fleet, [WantedWorker(parse_worker_spec(f"{engine.url},rank=0"))])  # another line
        await one.until_ready(names[0])
        assert [m.worker_id for m in one.members] == ids[:1], "what runs there stays charged to it"
        reconcile(fleet, [])
        assert one.members == []


async def test_ranks_removed_by_hand_come_back_as_the_same_workers() -> None:
    async with ranked_engine(3) as engine, front() as one:
        fleet = one.router.fleet
        fleet.add(parse_worker_spec(engine.url), by_hand=True)
        names = [f"{engine.url}#{rank}" for rank in range(3)]
        await one.until_ready(*names)
        before = one.members
        assert (await one.ask("DELETE", f"/workers?url={engine.url}"))[0] == 202
        assert one.members == []
        fleet.add(parse_worker_spec(f"{engine.url},weight=2"), by_hand=True)
        assert one.members == before
        assert [m.spec.weight for m in before] == [2.0] * 3
        for again in (f"{engine.url},weight=2", f"{engine.url},weight=2,rank=1"):
            fleet.leave(before[1], "test")
            assert fleet.add(parse_worker_spec(again), by_hand=True) is before[1]
            assert one.members == before
        fleet.leave(before[1], "test")
        fleet.sweep(lambda worker_id: 0)
        await until(lambda: len(fleet.members) == 2, "its end")
        fleet.add(parse_worker_spec(f"{engine.url},weight=2"), by_hand=True)
        await one.until_ready(*(names[n] for n in (0, 2, 1)))
        assert [m.worker_id for m in one.members] == [0, 2, 3]
        for other in (engine.url, f"{engine.url},rank=1"):
            with pytest.raises(DuplicateWorkerError):
                fleet.add(parse_worker_spec(other), by_hand=True)


async def test_a_rank_that_returns_while_it_leaves_is_the_same_worker() -> None:
    async with ranked_engine(2) as engine, front() as one:
        fleet = one.router.fleet
        member = fleet.add(parse_worker_spec(engine.url))
        await one.until_ready(f"{engine.url}#0", f"{engine.url}#1")
        other = next(m for m in one.members if m is not member)
        assert fleet._fits(member, (0, 1, 2))  # one that never gets to be asked
        third = one.members[-1]
        assert fleet._fits(member, (0, 1))
        assert not fleet._fits(third, (0, 1))
        assert third.leaving
        assert fleet._fits(member, (0, 1, 2))
        assert one.members == [member, other, third]
        assert not third.draining


async def test_ranks_without_a_free_slot_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ranked_engine(3) as engine, front(workers=2) as one:
        one.router.fleet.add(parse_worker_spec(engine.url))
        await one.until_ready(f"{engine.url}#0", f"{engine.url}#1")
        assert f"{engine.url}: not all of its 3 ranks: all 2 worker slots" in caplog.text
        with pytest.raises(TableFullError):
            one.router.fleet.add(parse_worker_spec("http://127.0.0.1:9"))


async def test_event_ports_of_other_ranks_count_up_from_the_configured_ones() -> None:
    async with router_with_ranks(",events=tcp://127.0.0.1:20000,replay=tcp://127.0.0.1:21000") as (
        one,
        engine,
    ):
        await one.until_ready(f"{engine.url}#0", f"{engine.url}#1")
        assert [(m.spec.events, m.spec.replay) for m in one.members] == [
            ("tcp://127.0.0.1:20000", "tcp://127.0.0.1:21000"),
            ("tcp://127.0.0.1:20001", "tcp://127.0.0.1:21001"),
        ]


def test_a_url_is_configured_without_ranks_or_with_distinct_ranks() -> None:
    key, url = keys_of(Config)["workers"], "http://h:1"
    assert check_value(key, [f"{url},rank=0", f"{url},rank=1", "http://h:2"])
    for second in (url, f"{url},rank=0"):
        for workers in ([f"{url},rank=0", second], [second, f"{url},rank=0"]):
            with pytest.raises(BadItemsError, match="given twice"):
                check_value(key, workers)
