"""One worker's load, told to the core as its engine tells it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from functools import partial

import aiohttp

from engine.wire import WireError
from policies.facts import LoadReport
from router.fleet_io.context import FRESH, End, FleetContext, refused
from router.fleet_io.engines.adapter import RankLoad, total
from router.fleet_io.recognize import Recognized

log = logging.getLogger(__name__)


async def report_loads(
    worker_id: int,
    rank: int | None,
    worker: Recognized,
    told_ranks: set[int],
    context: FleetContext,
) -> tuple[End, str]:
    """Report until the figures show that its engine began anew, sleeps or is gone: how, and why.

    Ranks of one engine share its answers. `rank` None: all ranks together. `told_ranks`: those in
    the latest answer, kept between two calls for the same worker: an engine whose figures are
    always of other ranks than it says it has is looked at again once, not for ever.
    """
    assert worker.loads is not None
    shared = context.answers.to(worker.loads)
    grown = 0
    while True:
        timeout = aiohttp.ClientTimeout(total=context.terms.probe_s)
        ask = partial(worker.loads.read, context.http, timeout)
        answer: Mapping[int, RankLoad] = {}
        try:
            answer = await shared.get(ask, context.clock, context.scrape_interval_s * FRESH)
        except (WireError, aiohttp.ClientError, TimeoutError) as error:
            log.debug("worker %d: no load report: %r", worker_id, error)
            if refused(error):
                return "down", f"load: {error}"
        if answer and told_ranks != answer.keys():
            told_ranks.clear()
            told_ranks.update(answer)
            if told_ranks != set(worker.ranks):
                return "anew", "its engine was started anew: it has other ranks"
        if (load := _own(answer, rank)) is not None:
            if load.grown < grown:
                return "anew", "its engine was started anew: its counters went back"
            if load.asleep:
                return "down", "its engine sleeps"
            if load.block_size and not worker.sized:
                return "anew", "it has run, and says now how large its blocks are"
            grown = load.grown
            used = _used_tokens(load, worker.facts.kv_capacity_tokens)
            context.tell(LoadReport(context.clock(), worker_id, load.running, load.waiting, used))
        await asyncio.sleep(context.scrape_interval_s)


def _own(loads: Mapping[int, RankLoad], rank: int | None) -> RankLoad | None:
    """The rank's load, or that of all together; None where nothing new is said."""
    if rank is not None:
        return loads.get(rank)
    return total(list(loads.values())) if loads else None


def _used_tokens(load: RankLoad, capacity_tokens: float) -> float:
    used = load.kv_used_tokens
    return load.kv_usage * capacity_tokens if math.isnan(used) else used
