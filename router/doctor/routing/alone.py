"""Examines engines without a router in front of them, or with one that cannot be read."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from engine.wire.metrics import PREFIX_HITS, PREFIX_QUERIES
from router.doctor.report import DoctorError
from router.doctor.routing.facts import EngineFacts, ExaminedWorker, PoolFacts, WorkerRow
from router.doctor.routing.gather import Counts, EnginePages
from router.doctor.routing.prompts import GivenPrompts
from router.doctor.routing.tokens import ComparedTokens, FixedPrompt

_NOT_EXAMINED = "KV events, the index, the policy and decisions: only a router knows them"


async def examine_alone(
    engines: Sequence[EnginePages],
    seconds: float,
    given: GivenPrompts | None,
    prompts: Sequence[FixedPrompt],
) -> PoolFacts:
    """Watch engines for `seconds` and return the facts that they report.

    Raises DoctorError if no engine answers at a URL.
    """
    rows = [await _row(number, engine) for number, engine in enumerate(engines)]
    before = await asyncio.gather(*(engine.counts() for engine in engines))
    await asyncio.sleep(seconds)
    told = await asyncio.gather(*(e.facts(b) for e, b in zip(engines, before, strict=True)))
    looked_up, found = _looked_up(before, told)
    of_when = f"in the {seconds:g} s that were watched"
    if not looked_up:  # no prompt was looked up meanwhile
        looked_up, found = _looked_up([Counts() for _ in before], told)
        of_when = "since they started"
    unread = [f"engine {e.url}: {one.trouble}" for e, one in zip(engines, told, strict=True)
              if one.trouble]  # fmt: skip
    unread.append(_NOT_EXAMINED)
    if given is None:
        unread.append("heads and salts of prompts (--requests FILE): salts, heads-differ")
    return PoolFacts(
        url="",
        alone=True,
        workers=tuple(ExaminedWorker(r, t) for r, t in zip(rows, told, strict=True)),
        of_when=of_when,
        looked_up_tokens=looked_up,
        found_tokens=found,
        tokens=await _tokens(rows, engines, prompts),
        given=given,
        unread=tuple(unread),
    )


async def _row(number: int, engine: EnginePages) -> WorkerRow:
    found = await engine.about()
    if found is None:
        raise DoctorError(
            f"--routing: GET {engine.url}/workers answered 404, and no engine tells of its cache "
            "there; is it the admin port? Give routers alone, or engines alone"
        )
    kind, model = found
    return WorkerRow(number, engine.url, state="ready", kind=kind, models=[model])


def _looked_up(before: Sequence[Counts], told: Sequence[EngineFacts]) -> tuple[float, float]:
    """Return how many prompt tokens the engines looked up in their caches since `before`, and how
    many of them they found.
    """
    looked_up = found = 0.0
    for counts, facts in zip(before, told, strict=True):
        if not math.isnan(facts.query_tokens):
            looked_up += max(facts.query_tokens - counts.total(PREFIX_QUERIES), 0.0)
            found += max(facts.hit_tokens - counts.total(PREFIX_HITS), 0.0)
    return looked_up, found


async def _tokens(
    rows: Sequence[WorkerRow], engines: Sequence[EnginePages], prompts: Sequence[FixedPrompt]
) -> ComparedTokens | None:
    """Compare the token ids that the engines make of the fixed prompts with those of the folder's
    tokenizer. Return None if the operator gave no folder.
    """
    if not prompts:
        return None
    asked = [e.tokens(row.models[0], prompts) for row, e in zip(rows, engines, strict=True)]
    return sum(await asyncio.gather(*asked), ComparedTokens())
