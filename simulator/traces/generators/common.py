"""Parts that generators share: types of keys, times of arrival, ids of prompts, turns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate
from random import Random
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta

from policies.contract import Hashes
from simulator.traces.job import Job, Stage, TraceError
from simulator.traces.mooncake import MAX_PROMPT_TOKENS
from simulator.traces.options import Size
from simulator.traces.timing import NS

BLOCK_BITS = 22  # more blocks than the longest prompt has tokens
USUAL_BLOCK = 16


def span(part: int, first: int, end: int) -> Hashes:
    """Return the ids of the blocks `first` to `end - 1` of a prompt; these blocks end within
    `part`.
    """
    base = part << BLOCK_BITS
    return np.arange(base + first, base + max(first, end), dtype=np.uint64)


def block_for(shared: list[Size]) -> int:
    """Return the number of tokens per block with which a block ends where each of the `shared`
    parts ends, if possible.

    It is 16, as engines have it, or the largest smaller power of two that divides the parts, down
    to 1. Engines' blocks are powers of two, so they are a multiple of it.
    """
    if not all(size.fixed for size in shared):
        return USUAL_BLOCK
    return math.gcd(USUAL_BLOCK, *accumulate(size.mean for size in shared))


MAX_REQUESTS = 1_000_000_000
MAX_CORPUS = 10_000_000  # different prompts, where they are held

Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Requests = Annotated[int, Meta(ge=1, le=MAX_REQUESTS)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Rate = Annotated[float, Meta(gt=0)]  # per second; inf: all at once
Ratio = Annotated[float, Meta(ge=0, le=1)]
Shape = Annotated[float, Meta(gt=0)]
Arrivals = Literal["poisson", "even"]


@dataclass(frozen=True, slots=True)
class Made:
    """The output of a generator: jobs that can be read once, with their number and their origin.
    Lifetime: stream.
    """

    jobs: Iterator[Job]
    block_tokens: int
    total: int | None
    origin: str  # one line for a report
    stages: tuple[Stage, ...] = ()


def check_prompt(*parts: Size) -> None:
    """Raise `TraceError` if a prompt of these parts may be too long or has no tokens."""
    most = sum(part.most for part in parts)
    if most > MAX_PROMPT_TOKENS:
        raise TraceError(f"a prompt of {most} tokens; expected {MAX_PROMPT_TOKENS} at most")
    if not any(part.mean for part in parts):
        raise TraceError("a prompt of no tokens")


def check_corpus(prompts: int) -> None:
    """Raise `TraceError` if more than `MAX_CORPUS` prompts would have to be held."""
    if prompts > MAX_CORPUS:
        raise TraceError(f"{prompts} different prompts; expected {MAX_CORPUS} at most")


def check_total(requests: int) -> int:
    """Return `requests`. Raises `TraceError` if there are more than `MAX_REQUESTS`."""
    if requests > MAX_REQUESTS:
        raise TraceError(f"{requests} requests; expected {MAX_REQUESTS} at most")
    return requests


MAX_STAGES = 1_000
STAGE = re.compile(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)")


def at_rate(rate_per_s: float, count: int, random: Random, shape: float = 1.0) -> Iterator[int]:
    """Yield `count` times in ns from 0, ascending; all are 0 at an infinite rate.

    Gaps follow a gamma distribution of this `shape` and mean `1 / rate_per_s`: shape 1 is a Poisson
    process, a lower one is burstier, an infinite one gives even gaps (as vLLM's bench_serving does,
    2024).
    """
    at_s = 0.0
    for _ in range(count):
        yield round(at_s * NS)
        if rate_per_s == math.inf:
            continue
        if shape == math.inf:
            at_s += 1 / rate_per_s
        elif shape == 1.0:
            at_s += random.expovariate(rate_per_s)
        else:
            at_s += random.gammavariate(shape, 1 / (rate_per_s * shape))


def parse_stages(text: str, pause_s: float = 0.0, warm_ups: int = 0) -> tuple[Stage, ...]:
    """Return the stages of `rate:seconds,rate:seconds`, one after the other with `pause_s` between.

    The first `warm_ups` stages are left out of reports. Raises `TraceError` for any other text, and
    for a stage without a request.
    """
    stages: list[Stage] = []
    start_ns = 0
    for part in text.split(","):
        match = STAGE.fullmatch(part.strip())
        if match is None:
            raise TraceError(f"stages: {part!r}: expected rate:seconds, as in 3:20,10:20")
        rate, seconds = float(match[1]), float(match[2])
        count = round(rate * seconds)
        if not count or seconds > 1e9 or count > 1e9 or len(stages) == MAX_STAGES:
            raise TraceError(f"stages: {part!r}: no request, or more than can be")
        end_ns = start_ns + round(seconds * NS)
        stages.append(Stage(start_ns, end_ns, rate, count, len(stages) < warm_ups))
        start_ns = end_ns + round(pause_s * NS)
    return tuple(stages)


def in_stages(stages: tuple[Stage, ...], random: Random, even: bool = False) -> Iterator[int]:
    """Yield times in ns, ascending: each stage has its number of requests, evenly or at random.

    A Poisson process whose count is known is as many uniform draws. They are drawn in order, each
    as the least of those that remain.
    """
    for stage in stages:
        span_ns = stage.end_ns - stage.start_ns
        share = 0.0
        for left in range(stage.requests, 0, -1):
            if not even:
                share += (1 - share) * (1 - (1 - random.random()) ** (1 / left))
            yield stage.start_ns + min(span_ns - 1, int(span_ns * share))
            if even:
                share += 1 / stage.requests


@dataclass(slots=True)
class Talk:
    """One conversation: a shared beginning, then text of its own. Lifetime: from first to last
    turn.
    """

    serial: int
    shared_part: int
    shared_blocks: int
    own_part: int
    prompt_tokens: int  # of the turn that is next
    remaining_turns: int  # that one included
    think_ns: int = 0  # of the client before it
    tenant: str | None = None


class Turn(NamedTuple):
    """The answer of one turn, and the pause and question that follow it."""

    answer_tokens: int
    question_tokens: int  # of the next turn
    gap_ns: int  # from this turn's arrival to the next one's, in an open loop
    think_ns: int  # from the answer to the next turn, in a closed loop


def turns(
    starts: Iterator[tuple[int, Talk]], take: Callable[[Talk], Turn], block: int, most_tokens: int
) -> Iterator[Job]:
    """Yield the turns of all conversations in order of time; only conversations in progress are
    held.

    `starts` gives (ns, talk), ascending. A conversation ends early if a prompt would be longer than
    `most_tokens`. Every turn's answer is known, so that the next turn finds it in the cache.
    """
    due: list[tuple[int, int, Talk]] = []
    upcoming = next(starts, None)
    while due or upcoming is not None:
        if upcoming is not None and (not due or upcoming[0] <= due[0][0]):
            heappush(due, (upcoming[0], upcoming[1].serial, upcoming[1]))
            upcoming = next(starts, None)
            continue
        at_ns, serial, talk = due[0]
        turn = take(talk)
        yield turn_job(talk, at_ns, turn.answer_tokens, block)
        talk.prompt_tokens += turn.answer_tokens + turn.question_tokens
        talk.think_ns = turn.think_ns
        talk.remaining_turns -= 1
        if talk.remaining_turns and talk.prompt_tokens <= most_tokens:
            heapreplace(due, (at_ns + turn.gap_ns, serial, talk))
        else:
            heappop(due)


def turn_job(talk: Talk, at_ns: int, answer: int, block: int) -> Job:
    """Return the job of the next turn of `talk`, with the blocks that its answer completes."""
    full = talk.prompt_tokens // block
    shared = min(talk.shared_blocks, full)
    head = span(talk.shared_part, 0, shared)
    return Job(
        at_ns,
        talk.prompt_tokens,
        answer,
        np.concatenate((head, span(talk.own_part, shared, full))),
        answer_ids=span(talk.own_part, full, (talk.prompt_tokens + answer) // block),
        session=str(talk.serial),
        think_ns=talk.think_ns,
        tenant=talk.tenant,
    )
