"""In-flight batching: what each step of an engine computes, and for whom.

Pure: no clock, no I/O, no randomness; `now_s` is passed in, one step is in flight at a time.
A step takes decodes first, then chunks of running prefills, then admissions, up to the token
budget. Requests are ordered by `priority * ageing_s + arrival_s`: waiting `ageing_s` is worth
one priority level, and because everybody ages at the same pace the key never changes, so the
queue is sorted once, on entry, and nothing can stay in it for ever.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from math import ceil
from operator import attrgetter

from engine.block_pool import BlockPool
from engine.request import FinishReason, Reason, Request, State
from engine.scheduler_blocks import RequestBlocks
from engine.scheduler_types import (
    Chunk,
    Output,
    Refusal,
    Refused,
    SchedulerSettings,
    Step,
    refuse_hopeless,
)

__all__ = [
    "Chunk",
    "FinishReason",
    "Output",
    "Reason",
    "Refusal",
    "Refused",
    "Request",
    "Scheduler",
    "SchedulerSettings",
    "State",
    "Step",
]

_queue_key = attrgetter("queue_key")


class Scheduler:
    """The requests of one worker and their turns; lifetime: worker.

    Use: `add`, then `schedule` and `complete` in turn; `cancel` at any time. Every request
    that was added gets exactly one `Output` with `finished` set, unless it is cancelled.
    """

    def __init__(self, settings: SchedulerSettings, pool: BlockPool) -> None:
        self.settings = settings
        self.pool = pool
        self.requests: dict[int, Request] = {}  # unfinished, by id
        self.not_scheduled_total = dict.fromkeys(Reason, 0)  # request-steps spent waiting
        self.steps_total = 0
        self.preemptions_total = 0
        self.prefix_query_tokens_total = 0  # prompt tokens of first admissions
        self.prefix_hit_tokens_total = 0  # those of them found in the cache
        self.recomputed_tokens_total = 0  # computed a second time after a preemption
        self.max_sequence_tokens = min(settings.max_model_tokens, pool.blocks * pool.block_size)
        self._watermark_blocks = ceil(settings.watermark * pool.blocks)
        self._waiting: list[Request] = []  # by queue_key
        self._running: list[Request] = []  # by queue_key
        self._blocks = RequestBlocks(pool)
        self._serial = 0
        self._step: Step | None = None  # scheduled, not yet completed

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def kv_used_blocks(self) -> int:
        """Blocks held by running requests, reserved ones not yet computed included."""
        return self.pool.used_blocks

    def add(self, request: Request, now_s: float) -> None:
        """Queue a new request. Raises Refused, or ValueError for an id that is still in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id} is in use")
        refuse_hopeless(request, self.settings, self.max_sequence_tokens)
        if len(self._waiting) >= self.settings.max_queue:
            raise Refused("queue_full", f"{len(self._waiting)} requests wait (max_queue); retry")
        request.arrival_s = now_s
        request.token_limit = min(
            request.prompt_tokens + request.max_output_tokens, self.max_sequence_tokens
        )
        request.extend_chain(request.prompt_tokens // self.pool.block_size, self.pool.block_size)
        aged = request.priority * self.settings.ageing_s + now_s
        request.queue_key = (1, aged, self._serial)
        self._serial += 1
        self.requests[request.request_id] = request
        insort(self._waiting, request, key=_queue_key)

    def cancel(self, request_id: int) -> bool:
        """Forget a request and free its blocks; False if it is finished or was never added."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request)
        return True

    def schedule(self, now_s: float) -> Step | None:
        """The next step, or None when there is no request at all.

        Raises RuntimeError while the step before it is not completed.
        """
        if self._step is not None:
            raise RuntimeError(f"step {self._step.number} must be completed first")
        if not self.requests:
            return None
        step = Step(self.steps_total)
        self._schedule_decodes(step)
        budget = self.settings.max_num_tokens - len(step.decodes)
        for request in self._running:
            if request.is_prefilling and budget:
                budget -= self._add_chunk(step, request, budget)
        self._admit(step, budget, now_s)
        self.steps_total += 1
        self._step = step
        return step

    def complete(self, step: Step, tokens: Mapping[int, int], now_s: float) -> list[Output]:
        """Take in a computed step: `tokens` maps the ids of `step.sampled` to their new tokens.

        Blocks filled by the step become visible. Requests cancelled meanwhile are passed over.
        Raises ValueError for another step than the last, KeyError for a missing token.
        """
        if step is not self._step:
            raise ValueError(f"step {step.number} is not the one in flight")
        self._step = None
        outputs: list[Output] = []
        block_size = self.pool.block_size
        for request in step.decodes:
            if request.state is State.RUNNING:
                request.computed_tokens += 1
                if not request.computed_tokens % block_size:
                    self._blocks.publish(request)
                outputs.append(self._take_token(request, tokens[request.request_id], now_s))
        for request, start, count in step.chunks:
            if request.state is State.RUNNING:
                request.computed_tokens = start + count
                self._blocks.publish(request)
                if not request.is_prefilling:
                    outputs.append(self._take_token(request, tokens[request.request_id], now_s))
        return outputs

    def _schedule_decodes(self, step: Step) -> None:
        """Every running request past its prefill gets one token, or makes room for others."""
        context_tokens, block_size = 0, self.pool.block_size
        # The list may shrink from its end while it is walked: victims are the last in order,
        # so a request that already has its place in the step is never taken.
        for request in self._running:
            computed = request.computed_tokens
            if computed < request.prefill_target:
                continue
            if computed < len(request.block_ids) * block_size or self._make_room(request, step):
                step.decodes.append(request)
                context_tokens += computed + 1
        step.decode_ctx_tokens = context_tokens

    def _make_room(self, request: Request, step: Step) -> bool:
        """One more block, at the cost of the last in order; False if that is `request` itself."""
        while not self._blocks.grow(request):
            victim = self._running.pop()
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the front of the queue; what it published stays cached."""
        self._blocks.leave(request)
        request.state = State.WAITING
        request.preemptions += 1
        self.preemptions_total += 1
        request.queue_key = (0, *request.queue_key[1:])
        insort(self._waiting, request, key=_queue_key)

    def _add_chunk(self, step: Step, request: Request, budget: int) -> int:
        start = request.computed_tokens
        tokens = min(budget, request.prefill_target - start)
        step.chunks.append(Chunk(request, start, tokens))
        step.prefill_tokens += tokens
        step.attention_pairs += tokens * (start + tokens / 2)
        return tokens

    def _admit(self, step: Step, budget: int, now_s: float) -> None:
        """Start waiting requests in order; those that stay get their reason."""
        kept: list[Request] = []
        for place, request in enumerate(self._waiting):
            hit = self._blocks.hit(request)
            reason = self._obstacle(request, hit, step, budget, now_s)
            if reason is None:
                self._start(request, hit, now_s)
                budget -= self._add_chunk(step, request, budget)
                continue
            kept.append(request)
            self._note_wait((request,), reason)
            if reason is not Reason.PREFIX_IN_FLIGHT:
                # Nobody overtakes a request that waits for room, or large ones would starve.
                behind = self._waiting[place + 1 :]
                self._note_wait(behind, Reason.PRIORITY if reason is Reason.KV_BLOCKS else reason)
                kept += behind
                break
        self._waiting = kept

    def _note_wait(self, requests: Sequence[Request], reason: Reason) -> None:
        self.not_scheduled_total[reason] += len(requests)
        for request in requests:
            request.reason = reason

    def _obstacle(
        self, request: Request, hit: int, step: Step, budget: int, now_s: float
    ) -> Reason | None:
        """Why `request`, with `hit` blocks cached, cannot start in `step`; None if it can."""
        settings = self.settings
        if len(self._running) >= settings.max_batch_size:
            return Reason.MAX_BATCH_SIZE
        uncached_tokens = request.total_tokens - hit * self.pool.block_size
        if budget < min(settings.min_chunk_tokens, uncached_tokens):
            return Reason.TOKEN_BUDGET
        if self._waits_for_prefix(request, hit, uncached_tokens, now_s):
            return Reason.PREFIX_IN_FLIGHT
        # An empty engine takes whatever fits: the watermark protects decodes, and there are none.
        spare_blocks = self._watermark_blocks if self._running else 0
        if step.preempted or not self._blocks.fits(request, hit, spare_blocks):
            return Reason.KV_BLOCKS
        return None

    def _waits_for_prefix(
        self, request: Request, hit: int, uncached_tokens: int, now_s: float
    ) -> bool:
        """Is most of what `request` lacks being computed by a running request?

        Then it waits: the other stands before it in every step, so computing the same blocks
        beside it ends no earlier and makes both their steps longer (measured in
        tests/engine/test_scheduler_prefix_wait.py). Not for a short prefix, where one more step
        costs more than the tokens saved, and not once it has waited for `ageing_s`.
        """
        least_tokens = self.settings.prefix_wait_tokens
        if not least_tokens or now_s - request.arrival_s >= self.settings.ageing_s:
            return False
        shared_tokens = self._blocks.in_flight_tokens(request, hit)
        return shared_tokens >= least_tokens and 2 * shared_tokens >= uncached_tokens

    def _start(self, request: Request, hit: int, now_s: float) -> None:
        self._blocks.start(request, hit)
        if request.preemptions:
            self.recomputed_tokens_total += request.total_tokens - request.computed_tokens
        else:
            request.started_s = now_s
            request.cached_tokens = request.computed_tokens
            self.prefix_query_tokens_total += request.prompt_tokens
            self.prefix_hit_tokens_total += request.cached_tokens
        request.state = State.RUNNING
        request.reason = None
        request.queue_key = (1, *request.queue_key[1:])
        insort(self._running, request, key=_queue_key)

    def _take_token(self, request: Request, token: int, now_s: float) -> Output:
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.output.append(token)
        finished: FinishReason | None = None
        if token in request.stop_tokens:
            finished = "stop"
        elif request.computed_tokens + 1 >= request.token_limit:
            finished = "length"
        if finished:
            request.finish_reason = finished
            self._finish(request)
        return Output(request, token, finished)

    def _finish(self, request: Request) -> None:
        queue = self._waiting
        if request.state is State.RUNNING:
            queue = self._running
            self._blocks.leave(request)
        del queue[bisect_left(queue, request.queue_key, key=_queue_key)]
        del self.requests[request.request_id]
        request.state = State.FINISHED
        request.reason = None
