"""Tests of probes that the core asks for: sent at once, one at a time, answered, and cancelled with
their worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
import zmq.asyncio

from policies.facts import Probed
from router.engines.worker_spec import parse_worker_spec
from router.fleet.context import FleetContext, FleetTerms, WorkerFact
from router.fleet.manager import FleetManager
from router.http.reply import RelayLimits
from tests.router.engines.engine_pages import HANGS, MODELS, engine
from tests.router.waiting import until

NEVER_S = 3_600.0


@dataclass
class Fleet:
    """A fleet of one recognized worker whose regular probes are an hour away. Lifetime: test."""

    manager: FleetManager
    told: list[WorkerFact]

    def probe_results(self) -> list[bool]:
        return [fact.well for fact in self.told if isinstance(fact, Probed)]


@asynccontextmanager
async def fleet_of_worker(url: str, probe_s: float) -> AsyncIterator[Fleet]:
    told: list[WorkerFact] = []
    context = zmq.asyncio.Context()
    terms = FleetTerms(probe_s, NEVER_S, NEVER_S, 100, RelayLimits())
    async with aiohttp.ClientSession() as http:
        shared = FleetContext(http, context, time.monotonic, told.append, terms)
        manager = FleetManager(shared, 4)
        member = manager.add(parse_worker_spec(url + ",kind=vllm"))
        await until(lambda: member.ready, "the worker to be recognized")
        yield Fleet(manager, told)
        await manager.aclose()
    context.destroy(linger=0)


@pytest.mark.parametrize(("page", "well"), [("", True), (503, False), (500, False)])
async def test_a_probe_reports_the_result_of_the_health_page(page: object, well: bool) -> None:
    pages = {"/v1/models": MODELS, "/health": page}
    async with engine(pages) as url, fleet_of_worker(url, 5.0) as fleet:
        fleet.manager.probe(0, None)
        await until(lambda: fleet.probe_results() == [well], "the answer to be told")
        fleet.manager.probe(99, None)  # an unknown worker: no fact is told, no error is raised


async def test_a_probe_without_an_answer_in_time_reports_failure() -> None:
    pages = {"/v1/models": MODELS, "/health": ""}
    async with engine(pages) as url, fleet_of_worker(url, NEVER_S) as fleet:
        pages["/health"] = HANGS
        fleet.manager.probe(0, 0.05)
        await until(lambda: fleet.probe_results() == [False], "the answer to be told")


async def test_one_probe_runs_at_a_time_and_removal_cancels_it() -> None:
    pages, asked = {"/v1/models": MODELS, "/health": ""}, []
    async with engine(pages, asked) as url, fleet_of_worker(url, NEVER_S) as fleet:
        pages["/health"] = HANGS
        asked.clear()
        for _ in range(5):
            fleet.manager.probe(0, None)
        await until(lambda: asked.count("/health") == 1, "the question to arrive")
        member = fleet.manager.members[0]
        await fleet.manager.remove(member, "forced")
        await until(
            lambda: not [t for t in asyncio.all_tasks() if t.get_name() == "probe 0"],
            "the question to be dropped",
        )
        assert fleet.probe_results() == []
        assert asked.count("/health") == 1
