"""Tests of shared prefixes ("trunks") in the core: the data that policies see of them, the
explanations, and what a burst of requests computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Arrival, Finish, FirstToken, WorkerChange, WorkerFacts
from router.assembly import Router
from router.core.contract.actions import Dispatch
from router.core.core import RouterCore
from router.settings.schema import Config
from tests.policies.pool import Job, Pool, shared_prompt
from tests.router.core.core_world import BLOCK, World, chain_of
from tests.router.fleet.fleet_support import admin_port

TRUNK, OWN = list(range(1, 101)), 25  # blocks of 4 tokens
WATCHING = "tests.router.core.placement.test_trunk_copies:Watching"


@dataclass(frozen=True, slots=True)
class Watching:
    """A policy that chooses worker 0 while there are enough copies of a shared prefix, and
    otherwise the first worker that lacks it.
    """

    needs_sessions: ClassVar[bool] = True

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        costs = np.arange(len(fleet), dtype=np.float64) + 1_000.0 * fleet.hot_trunk_tokens
        if fleet.copies_missing > 0:
            costs -= 100.0 * fleet.lacking_trunk()
        return costs


def ask(world: World, session: int) -> Dispatch:
    own = list(range(1_000 * (session + 1), 1_000 * (session + 1) + OWN))
    (action,) = world.core.on_arrival(world.arrival(TRUNK + own, session=f"s{session}"))
    assert isinstance(action, Dispatch)
    return action


def test_a_policy_sees_a_trunk_until_enough_workers_hold_it() -> None:
    world = World(workers=3, policy=WATCHING)
    workers = [ask(world, session).worker_id for session in range(12)]
    assert world.core.session_tracking.sessions is not None
    (trunk,) = world.core.session_tracking.sessions.trunks.table()
    assert trunk.tokens == len(TRUNK) * BLOCK
    assert trunk.wanted_copies == 3  # all there are
    # The first knows of no trunk. One is wanted on more workers as the backlog grows.
    assert sorted(set(workers)) == [0, 1, 2]
    assert workers.index(1) < workers.index(2)
    assert workers[workers.index(2) + 1 :] == [0] * (11 - workers.index(2))
    assert world.core.caches.copies(trunk.last_hash) == 3


def test_trunks_are_not_tracked_for_policies_that_do_not_use_them() -> None:
    world = World(workers=3, policy="hybrid")
    for session in range(4):
        ask(world, session)
    assert world.core.session_tracking.sessions is None


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_cold_burst_of_siblings_computes_the_trunk_once_per_copy(workers: int, seed: int) -> None:
    """Of 64 requests at once with 6,000 shared and 704 own tokens, only one for each copy computes
    the shared prefix; schedulers run on virtual time.
    """
    jobs = [
        Job(1.0, job.chain, job.prompt_tokens, job.output_tokens)
        for job in shared_prompt(64, 60.0, 6_000, 704, 24, seed)
    ]
    pool = Pool("warmset", "qwen3-32b-h100-tp2", workers, 269_000, 16, seed)
    wanted: list[int] = []
    on_arrival = pool.core.on_arrival

    def arrived(fact: Arrival) -> list[Any]:
        actions = on_arrival(fact)
        assert pool.core.session_tracking.sessions is not None
        table = pool.core.session_tracking.sessions.trunks.table()
        wanted.extend(trunk.wanted_copies for trunk in table if trunk.tokens == 6_000)
        return actions

    pool.core.on_arrival = arrived  # type: ignore[method-assign]
    pool.run(jobs)
    query_tokens = sum(each.prefix_query_tokens_total for each in pool.schedulers)
    hit = sum(each.prefix_hit_tokens_total for each in pool.schedulers)
    computations = (query_tokens - hit - 64 * 704) / 6_000
    assert 1 <= max(wanted) <= workers
    assert computations <= max(wanted) + 1


def served(core: RouterCore, requests: int) -> None:
    for number in range(requests):
        own = list(range(1_000 * (number + 1), 1_000 * (number + 1) + OWN))
        chain = chain_of(TRUNK + own)
        tokens = len(chain) * BLOCK
        core.on_arrival(Arrival(1.0, number, "m", tokens, {BLOCK: chain}, session=f"s{number}"))
        core.on_first_token(FirstToken(1.0, number))
        core.on_finish(Finish(1.0, number))


async def test_trunks_are_listed_by_the_admin_port_and_counted_in_metrics() -> None:
    async with aiohttp.ClientSession() as http:
        router = Router(Config(policy=WATCHING), http)
        facts = WorkerFacts(name="w", models=("m",), block_size=BLOCK, has_events=False)
        router.dispatcher.handle_fact(WorkerChange(0.0, 0, "ready", facts))
        served(router.dispatcher.core, 5)
        try:
            async with admin_port(router) as url:
                async with http.get(f"{url}/trunks") as reply:
                    shown = await reply.json()
                async with http.get(f"{url}/trunks?most=0") as reply:
                    assert reply.status == 400
                    assert "`most` must be 1..1000" in await reply.text()
        finally:
            text = router.metrics.exposition().decode()
            await router.aclose()
    (row,) = shown.pop("trunks")
    assert shown == {"followed": True, "kept": 1}
    assert row["hash"] == f"{int(chain_of(TRUNK)[-1]):016x}"
    assert (row["tokens"], row["share"], row["requests_per_s"]) == (400, 0.8, 0.4)
    assert (row["copies"], row["wanted_copies"], row["saved_tokens_per_s"]) == (1, 1, 160)
    figures = {
        (sample.name, sample.labels.get("rank")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert figures["warmroute_trunks", None] == 1
    assert figures["warmroute_hot_trunks", None] == 0
    assert figures["warmroute_replaced_trunks_total", None] == 0
    assert figures["warmroute_trunk_copies", "1"] == figures["warmroute_trunk_wanted_copies", "1"]
    assert figures["warmroute_trunk_copies", "2"] == 0
    assert figures["warmroute_trunk_demand", "1"] > 0


async def test_trunk_metrics_are_0_if_sessions_are_not_tracked() -> None:
    async with aiohttp.ClientSession() as http:
        router = Router(Config(policy="hybrid"), http)
        try:
            text = router.metrics.exposition().decode()
        finally:
            await router.aclose()
    assert "warmroute_trunks 0.0" in text
    assert 'warmroute_trunk_copies{rank="1"} 0.0' in text
