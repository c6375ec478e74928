"""Examines the routing of requests: reads all pages, waits, reads them again, and judges.

report = await examine_routing(["http://127.0.0.1:8081"], RoutingOptions(seconds=10))
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import aiohttp

from router.doctor.fetch import check_url
from router.doctor.report import DoctorError
from router.doctor.routing.alone import examine_alone
from router.doctor.routing.catalogue import judge_routing
from router.doctor.routing.facts import (
    DecisionRow,
    EngineFacts,
    ExaminedWorker,
    PoolFacts,
    WorkerRow,
)
from router.doctor.routing.findings import RoutingReport
from router.doctor.routing.gather import (
    ATTRIBUTIONS,
    EVICTED,
    EXACT,
    FOREIGN,
    INFLIGHT,
    KV_EVENTS,
    MISMATCH,
    PEERS,
    REFUSALS,
    REPLIES,
    Counts,
    EnginePages,
    RouterPages,
)
from router.doctor.routing.prompts import GivenFileError, GivenPrompts, given_prompts
from router.doctor.routing.tokens import ComparedTokens, FixedPrompt, fixed_prompts

T = TypeVar("T")

LEAST_WATCHED_S, MOST_WATCHED_S = 0.1, 600.0
_ENOUGH_REQUESTS = 8  # requests seen while watching that suffix for a verdict
_LATEST_REQUESTS = 200  # latest requests that are judged if too few were seen while watching
_MOST_ENGINES = 64


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """The options of a routing examination, as the flags of the command give them."""

    seconds: float = 10.0
    timeout_s: float = 5.0  # of each page
    key: str | None = None  # of the admin port
    requests: Path | None = None  # bodies of clients, one a line
    tokenizer: Path | None = None  # the folder that the router has
    again: str = ""  # the command, for people


async def examine_routing(urls: Sequence[str], options: RoutingOptions) -> RoutingReport:
    """Return a report on why cache hits are low behind the router at the first URL. The other URLs
    may be those of further routers that use the same engines. If the first URL is that of an
    engine, all URLs must be, and only the engines are examined. Raises DoctorError if a page cannot
    be read.
    """
    for url in urls:
        check_url(url)
    if not LEAST_WATCHED_S <= options.seconds <= MOST_WATCHED_S:
        raise DoctorError(
            f"{options.seconds:g} s cannot be watched; {LEAST_WATCHED_S:g} to {MOST_WATCHED_S:g}"
        )
    given = _given(options.requests)
    prompts = _prompts(options.tokenizer)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:
        first, *others = (RouterPages(http, u, options.timeout_s, options.key) for u in urls)
        if not await first.is_there():
            engines = [EnginePages(http, u.rstrip("/"), "", options.timeout_s) for u in urls]
            facts = await examine_alone(engines, options.seconds, given, prompts)
            return RoutingReport(facts, judge_routing(facts), options.again)
        facts = await _Examined(http, first, options, given, prompts).facts()
        theirs = {}
        for other in others:
            rows = await other.workers()
            theirs[other.url] = frozenset(row.url for row in rows)
    facts = replace(facts, others=theirs)
    return RoutingReport(facts, judge_routing(facts), options.again)


@dataclass(slots=True)
class _Examined:
    """The state of one routing examination.

    Lifetime: one call of `examine_routing`.
    """

    http: aiohttp.ClientSession
    router: RouterPages
    options: RoutingOptions
    given: GivenPrompts | None
    prompts: Sequence[FixedPrompt]

    async def facts(self) -> PoolFacts:
        """Watch the router and its engines, and return the facts. Raises DoctorError if the router
        cannot be read.
        """
        rows = await self.router.workers()
        kinds = {row.url: row.kind for row in rows}
        engines = {
            url: EnginePages(self.http, url, kind, self.options.timeout_s)
            for url, kind in list(kinds.items())[:_MOST_ENGINES]
        }
        latest = await self.router.decisions(1)
        since_s = latest[0].now_s if latest else 0.0
        before = await self.router.counts()
        begun = await _all({url: one.counts() for url, one in engines.items()})
        await asyncio.sleep(self.options.seconds)
        told = await _all({url: one.facts(begun[url]) for url, one in engines.items()})
        tokens = await self._tokens(rows, engines)
        after = await self.router.counts()
        rows, decisions, policy = await asyncio.gather(
            self.router.workers(), self.router.decisions(), self.router.policy()
        )
        judged, of_when = _judged(decisions, since_s, self.options.seconds)
        unread = [f"engine {url}: {one.trouble}" for url, one in told.items() if one.trouble]
        unread += [f"{len(kinds) - len(engines)} more engines"] * (len(kinds) > len(engines))
        if self.given is None:
            unread.append("heads and salts of prompts (--requests FILE): salts, heads-differ")
        return PoolFacts(
            url=self.router.url,
            workers=tuple(_worker(row, told, before, after) for row in rows),
            decisions=judged,
            of_when=of_when,
            policy=policy,
            tokenizer_exact=after.by(EXACT, "model"),
            mismatches=after.by(MISMATCH, "model"),
            template_refusals=after.total(REFUSALS),
            same_attributions=after.total(ATTRIBUTIONS, line="same"),
            changed_attributions=after.total(ATTRIBUTIONS, line="changed"),
            index_evicted=after.total(EVICTED),
            sharing=after.has(PEERS),
            tokens=tokens,
            given=self.given,
            unread=tuple(unread),
        )

    async def _tokens(
        self, rows: Sequence[WorkerRow], engines: Mapping[str, EnginePages]
    ) -> ComparedTokens | None:
        """Compare the token ids that the engines make of the fixed prompts with those of the
        folder's tokenizer. Return None if the operator gave no folder.
        """
        if not self.prompts:
            return None
        first = {row.url: row.models[0] for row in rows if row.models and row.url in engines}
        asked = {url: engines[url].tokens(model, self.prompts) for url, model in first.items()}
        return sum((await _all(asked)).values(), ComparedTokens())


async def _all(waits: Mapping[str, Awaitable[T]]) -> dict[str, T]:
    return dict(zip(waits, await asyncio.gather(*waits.values()), strict=True))


def _worker(
    row: WorkerRow, told: Mapping[str, EngineFacts], before: Counts, after: Counts
) -> ExaminedWorker:
    """Return a worker with its row, its engine's facts, and the router's counts about it."""
    name = str(row.id)
    answered = after.total(REPLIES, worker=name) - before.total(REPLIES, worker=name)
    return ExaminedWorker(
        row,
        told.get(row.url, EngineFacts(trouble="not asked")),
        after.by(KV_EVENTS, "kind", worker=name),
        after.total(FOREIGN, worker=name),
        max(answered, 0.0),
        after.total(INFLIGHT, worker=name),
    )


def _judged(
    decisions: Sequence[DecisionRow], since_s: float, seconds: float
) -> tuple[tuple[DecisionRow, ...], str]:
    """Return the decisions made during the watch, or the latest decisions if these are too few.
    Also return a text that says when the decisions were made.
    """
    new = tuple(one for one in decisions if one.now_s > since_s)
    if len(new) >= _ENOUGH_REQUESTS:
        return new, f"sent in the {seconds:g} s that were watched"
    return tuple(decisions[:_LATEST_REQUESTS]), "the latest that were sent"


def _prompts(folder: Path | None) -> Sequence[FixedPrompt]:
    """Return the fixed prompts with the token ids of a folder's tokenizer; none if no folder is
    given.
    """
    if folder is None:
        return ()
    try:
        return fixed_prompts(folder, time.time())
    except ValueError as error:
        raise DoctorError(f"--tokenizer: {error}") from error


def _given(path: Path | None) -> GivenPrompts | None:
    if path is None:
        return None
    try:
        return given_prompts(path)
    except GivenFileError as error:
        raise DoctorError(f"--requests {error}") from error
