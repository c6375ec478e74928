"""Reads a worker's load from its engine's metrics, which also show restarts and failures of the
engine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial

import aiohttp

from engine.wire.events import WireError
from policies.facts import LoadReport
from router.engines.adapter import RankLoad, total
from router.fleet.context import FRESH, End, FleetContext, refused
from router.fleet.recognize import Recognized

log = logging.getLogger(__name__)

_MISSED_MAX = 2  # reports in a row that may fail before this is shown as trouble
_SAID_CHARACTERS = 300  # of an error
_SAME_START_S = 0.5  # two start times that differ by no more are those of one process


class SeenFigures:
    """The history of a worker's metrics since it was first recognized: its engine's ranks, when its
    process began, and whether reports arrive at all. Lifetime: worker.
    """

    def __init__(self, worker_id: int, name: str) -> None:
        """Start without reports. `name` is the worker's name in log lines."""
        self.ranks: set[int] = set()  # those in the latest answer
        self.trouble = ""  # the reason why there are no figures now, for people
        self.missed = 0  # failed reports in a row
        self._who = worker_id, name
        self._started_s = math.nan
        self._several = False  # processes answer there: no start time is the engine's

    def failed(self, error: Exception, where: str, within_s: float) -> None:
        """Note that a load report could not be read. Only the first of several failures in a row is
        logged.
        """
        self.missed += 1
        silent = isinstance(error, TimeoutError | aiohttp.ClientConnectionError)
        if self.trouble or (silent and self.missed < _MISSED_MAX):
            return
        what = "its load figures do not come" if silent else "its load figures are of no use"
        why = str(error)[:_SAID_CHARACTERS] or type(error).__name__
        if isinstance(error, TimeoutError):
            why = f"no answer within {within_s:g} s"
        self.trouble = (
            f"{what}: {why}; only what is sent from here counts as its load until "
            f"GET {where} answers well, or the worker gets another metrics=URL"
        )
        log.warning("worker %d (%s): %s", *self._who, self.trouble)

    def note_readable_report(self) -> None:
        """Note that a load report could be read, which ends earlier trouble."""
        self.missed = 0
        if self.trouble:
            log.info("worker %d (%s): its load figures can be read again", *self._who)
            self.trouble = ""

    def start_of(self, load: RankLoad) -> float:
        """Return when the engine's process started according to this load report; NaN if it is
        unknown or several processes answer in turn.
        """
        if load.started_s < self._started_s - _SAME_START_S and not self._several:
            self._several = True
            log.warning(
                "worker %d (%s): several processes report its load in turn, so no start time shows "
                "whether its engine was restarted; give each engine a URL of its own",
                *self._who,
            )
        if not math.isnan(load.started_s):
            self._started_s = load.started_s
        return math.nan if self._several else load.started_s


async def report_loads(
    worker_id: int,
    rank: int | None,
    worker: Recognized,
    seen: SeenFigures,
    context: FleetContext,
    note: Callable[[RankLoad], None],
) -> tuple[End, str]:
    """Report a worker's load to the core until its metrics show that its engine restarted, sleeps
    or is gone. Return which of these happened, and the reason for people.

    All ranks of one engine share its answers; `rank` None means all ranks together. `seen` is kept
    between two calls for the same worker, so that an engine whose metrics always have other ranks
    than it announces is recognized again only once. `note` is called with each report of the
    worker's rank.
    """
    assert worker.loads is not None
    shared = context.answers.to(worker.loads)
    grown, started_s = 0, math.nan
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
            seen.failed(error, worker.loads.url, context.terms.probe_s)
        if answer and seen.ranks != answer.keys():
            seen.ranks = set(answer)
            if seen.ranks != set(worker.ranks):
                return "anew", "its engine was started anew: it has other ranks"
        if (load := _own(answer, rank)) is not None:
            seen.note_readable_report()
            if load.grown < grown:
                return "anew", "its engine was started anew: its counters went back"
            before_s, started_s = started_s, seen.start_of(load)
            if started_s > before_s + _SAME_START_S:
                return "anew", "its engine was started anew: its process is a later one"
            if load.asleep or load.paused:
                return "asleep" if load.asleep else "paused", "its engine sleeps"
            if load.block_size and not worker.sized:
                return "anew", "it has run, and says now how large its blocks are"
            grown = load.grown
            used = _used_tokens(load, worker.facts.kv_capacity_tokens)
            counts = load.running, load.waiting, used, load.emptied
            context.report_fact(LoadReport(context.clock(), worker_id, *counts, started_s))
            note(load)
        is_busy = load is None or load.running + load.waiting > 0  # or the load is unknown
        await context.until_scrape(is_busy)


def _own(loads: Mapping[int, RankLoad], rank: int | None) -> RankLoad | None:
    """Return the load of `rank`, or of all ranks together if `rank` is None; None if the answer
    does not contain it.
    """
    if rank is not None:
        return loads.get(rank)
    return total(list(loads.values())) if loads else None


def _used_tokens(load: RankLoad, capacity_tokens: float) -> float:
    used = load.kv_used_tokens
    return load.kv_usage * capacity_tokens if math.isnan(used) else used
