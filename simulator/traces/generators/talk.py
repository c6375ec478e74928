"""Conversations that take turns, many at a time, in order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from simulator.traces.generators.segments import span
from simulator.traces.job import Job


@dataclass(slots=True)
class Talk:
    """One conversation: a shared head, then its own words. Lifetime: from first to last turn."""

    serial: int
    shared_part: int
    shared_blocks: int
    own_part: int
    prompt_tokens: int  # of the turn that is next
    turns_left: int  # that one included
    think_ns: int = 0  # of the client before it
    tenant: str | None = None


class Turn(NamedTuple):
    """What happens in a turn and after it."""

    answer_tokens: int
    question_tokens: int  # of the next turn
    gap_ns: int  # from this turn's arrival to the next one's, in an open loop
    think_ns: int  # from the answer to the next turn, in a closed loop


def turns(
    starts: Iterator[tuple[int, Talk]], take: Callable[[Talk], Turn], block: int, most_tokens: int
) -> Iterator[Job]:
    """The turns of all talks, merged; holds the talks that are under way.

    `starts` gives (ns, talk), ascending. A talk ends early where a prompt would be longer than
    `most_tokens`. Every turn's answer is known, so that the next one finds it in the cache.
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
        talk.turns_left -= 1
        if talk.turns_left and talk.prompt_tokens <= most_tokens:
            heapreplace(due, (at_ns + turn.gap_ns, serial, talk))
        else:
            heappop(due)


def turn_job(talk: Talk, at_ns: int, answer: int, block: int) -> Job:
    """The turn of `talk` that is next, with the blocks that its answer completes."""
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
