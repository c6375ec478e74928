"""Explains why a request waits, and for how long at least; it reads the scheduler and changes
nothing.

The estimate goes through the queue in its order, and through the running requests in the order of
their ends. It assumes that each request uses all of its `max_output_tokens` and shares no blocks: a
request that stops earlier frees blocks sooner; a preemption or a request of higher priority makes
the wait longer.
"""

from __future__ import annotations

import heapq
from collections import Counter
from operator import attrgetter

import msgspec

from engine.scheduler.request import Reason, Request, State
from engine.scheduler.scheduler import Scheduler

_queue_key = attrgetter("queue_key")


class Wait(msgspec.Struct, frozen=True):
    """The time for which one reason kept a request waiting."""

    reason: str  # `engine.scheduler.request.Reason`, or "running"
    wait_s: float


class Explanation(msgspec.Struct, frozen=True):
    """The state of one unfinished request."""

    request_id: int
    state: str
    prompt_tokens: int
    cached_tokens: int  # found in the cache when it was admitted
    computed_tokens: int
    output_tokens: int
    output_limit_tokens: int
    preemptions: int
    age_s: float
    queue_position: int | None  # 0 is looked at next; None: it runs
    reason: str | None
    waits: list[Wait]  # the latest reasons, oldest first
    admission_steps: int | None  # the step that may take it in, 1 for the next; None: it runs
    admission_s: float | None  # the same at the pace of the last step


def explain(scheduler: Scheduler, request: Request, step_s: float, now_s: float) -> Explanation:
    """Return the state of an unfinished `request`. The last step took `step_s` seconds, by which
    the wait is estimated.
    """
    queue = waiting(scheduler)
    is_waiting = request.state is State.WAITING
    position = queue.index(request) if is_waiting else None
    steps = None if position is None else admission_steps(scheduler, queue[: position + 1])
    return Explanation(
        request_id=request.request_id,
        state=request.state.value,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        computed_tokens=request.computed_tokens,
        output_tokens=len(request.output),
        output_limit_tokens=request.token_limit - request.prompt_tokens,
        preemptions=request.preemptions,
        age_s=now_s - request.arrival_s,
        queue_position=position,
        reason=request.reason.value if request.reason else None,
        waits=_waits(request, now_s),
        admission_steps=steps,
        admission_s=None if steps is None else steps * step_s,
    )


class RequestSummary(msgspec.Struct, frozen=True):
    """A short description of one unfinished request, for a list of requests."""

    request: str  # the id in its answer
    state: str
    reason: str | None  # why it waits; None: it does not, or was not looked at yet
    queue_position: int | None
    age_s: float
    prompt_tokens: int
    output_tokens: int


def request_summary(
    request: Request, name: str, position: int | None, now_s: float
) -> RequestSummary:
    """Return the short description of `request`, whose answer has the id `name`."""
    return RequestSummary(
        name,
        request.state.value,
        request.reason.value if request.reason else None,
        position,
        now_s - request.arrival_s,
        request.prompt_tokens,
        len(request.output),
    )


def waiting(scheduler: Scheduler) -> list[Request]:
    """Return the waiting requests in the order in which the scheduler considers them."""
    found = [one for one in scheduler.requests.values() if one.state is State.WAITING]
    return sorted(found, key=_queue_key)


def reasons(scheduler: Scheduler) -> Counter[Reason]:
    """Return the number of waiting requests by reason; requests that the scheduler has not
    considered yet are left out.
    """
    if not scheduler.waiting:
        return Counter()
    return Counter(one.reason for one in scheduler.requests.values() if one.reason)


def dominant(scheduler: Scheduler) -> Reason | None:
    """Return the reason for which most requests wait; None if none waits, or none was considered
    yet.
    """
    found = reasons(scheduler).most_common(1)
    return found[0][0] if found else None


def admission_steps(scheduler: Scheduler, queue: list[Request]) -> int:
    """Return the number of the step that admits the last request of `queue`, which is the beginning
    of the scheduler's queue; 1 is the next step.

    A request starts when enough requests before it have ended, and the tokens to compute before it
    are used up at `max_num_tokens` a step.
    """
    settings, pool = scheduler.settings, scheduler.pool
    running = [one for one in scheduler.requests.values() if one.state is State.RUNNING]
    counted = [_counted_blocks(scheduler, one) for one in running]
    ends = [_free_step(one, settings.max_num_tokens) for one in running]
    free_at = list(zip(ends, counted, strict=True))
    heapq.heapify(free_at)
    free_slots = settings.max_batch_size - len(running)
    free_blocks = pool.blocks - pool.used_blocks
    # No other request may use promised blocks, nor those that may still be pinned.
    if settings.reserves_outputs:
        free_blocks -= sum(counted) - sum(len(one.block_ids) for one in running)
        free_blocks -= scheduler.pins.max_blocks - scheduler.pins.held_blocks
    tokens = sum(max(0, one.prefill_target - one.computed_tokens) for one in running)
    step = 1
    for request in queue:
        hit = pool.reusable(request.chain, (request.total_tokens - 1) // pool.block_size)
        need_blocks = _counted_blocks(scheduler, request) - hit
        while free_at and (free_slots < 1 or free_blocks < need_blocks):
            freed_step, blocks = heapq.heappop(free_at)
            step = max(step, freed_step)
            free_slots += 1
            free_blocks += blocks
        step = max(step, 1 + tokens // settings.max_num_tokens)
        own_tokens = request.total_tokens - hit * pool.block_size
        tokens += own_tokens
        free_slots -= 1
        free_blocks -= need_blocks
        prefill_steps = -(-own_tokens // settings.max_num_tokens)
        left_tokens = request.token_limit - request.total_tokens
        heapq.heappush(free_at, (step + prefill_steps - 1 + left_tokens, need_blocks))
    return step


def _counted_blocks(scheduler: Scheduler, request: Request) -> int:
    """Return how many blocks admission counts for a request: those that it holds or starts with,
    or, if outputs are reserved, those of its longest output.
    """
    if not scheduler.settings.reserves_outputs:
        return len(request.block_ids) or -(-request.total_tokens // scheduler.pool.block_size)
    return -(-(request.token_limit - 1) // scheduler.pool.block_size)


def _free_step(request: Request, step_tokens: int) -> int:
    """Return the number of the step after which a running request has left its place to others; 1
    is the next step.
    """
    prefill_tokens = request.prefill_target - request.computed_tokens
    prefill_steps = -(-prefill_tokens // step_tokens) if prefill_tokens > 0 else 1
    return prefill_steps + request.token_limit - request.total_tokens


def _waits(request: Request, now_s: float) -> list[Wait]:
    """Return how long each of the request's latest reasons to wait applied, and how long it ran in
    between.
    """
    starts = [since_s for _, since_s in request.reasons]
    return [
        Wait(reason.value if reason else "running", end_s - since_s)
        for (reason, since_s), end_s in zip(request.reasons, [*starts[1:], now_s], strict=True)
    ]
