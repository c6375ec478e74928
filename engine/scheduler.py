"""In-flight batching: what each step of an engine computes, and for whom.

Pure: no clock, no I/O, no randomness; `now_s` is passed in. One step is in flight at a time unless
asked for more (`scheduler_flight.py`): then the next is made before the tokens of one are known.
A step takes decodes first, then chunks of running prefills, then admissions, up to the token
budget. Requests are ordered by `priority * ageing_s + arrival_s`: everybody ages at the same pace,
so the key never changes, the queue is sorted on entry, and nothing stays in it for ever.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType

from engine.block_pool import BlockPool
from engine.request import FinishReason, Reason, Request, State
from engine.scheduler_admission import Admission
from engine.scheduler_blocks import RequestBlocks
from engine.scheduler_deadlines import Deadlines
from engine.scheduler_flight import Flight
from engine.scheduler_pace import Pace
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

NOBODY: Mapping[int, FinishReason] = MappingProxyType({})
_queue_key = attrgetter("queue_key")


class Scheduler:
    """The requests of one worker and their turns; lifetime: worker.

    Use: `add`, then `schedule` and `complete` in turn; `cancel` at any time. Every request
    that was added gets exactly one `Output` with `finished` set, unless it is cancelled.
    `steps_in_flight`, `runs_ahead`: see `Flight`; steps complete in the order of their start.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: BlockPool,
        *,
        steps_in_flight: int = 1,
        runs_ahead: bool = False,
    ) -> None:
        self.settings = settings
        self.pool = pool
        self.requests: dict[int, Request] = {}  # unfinished, by id
        self.steps_total = 0
        self.preemptions_total = 0
        self.prefix_query_tokens_total = 0  # prompt tokens of first admissions
        self.prefix_hit_tokens_total = 0  # those of them found in the cache
        self.recomputed_tokens_total = 0  # computed a second time after a preemption
        self._waiting: list[Request] = []  # by queue_key, as is `_running`
        self._running: list[Request] = []
        self._blocks = RequestBlocks(settings, pool)
        self.pins = self._blocks.pins
        self.max_sequence_tokens = min(settings.max_model_tokens, self.pins.spared_tokens)
        self._admission = Admission(settings, pool, self._blocks)
        self._deadlines = Deadlines()
        self._pace = Pace.of(settings)
        self._flight = Flight(self._blocks, steps_in_flight, runs_ahead=runs_ahead)
        self._serial = 0
        self.not_scheduled_total = self._admission.not_scheduled_total

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

    @property
    def has_room(self) -> bool:
        """Another step may start beside those in flight."""
        return not self._flight.is_full

    @property
    def wake_s(self) -> float | None:
        """When to call `expire` and `schedule` again if nothing happens before; None: no need."""
        known = (self._admission.filling_until_s, self._deadlines.next_s())
        return min((when_s for when_s in known if when_s is not None), default=None)

    def add(self, request: Request, now_s: float) -> None:
        """Queue a new request. Raises Refused, or ValueError for an id still in use."""
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
        aged += self.settings.length_ageing_s * request.prompt_tokens / 1000
        request.queue_key = (1, aged, self._serial)
        self._serial += 1
        self.requests[request.request_id] = request
        insort(self._waiting, request, key=_queue_key)
        self._deadlines.add(request, len(self.requests))

    def cancel(self, request_id: int) -> bool:
        """Forget a request and free its blocks; False if it is finished or was never added."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request)
        return request is not None

    def expire(self, now_s: float) -> list[Request]:
        """End the requests whose deadline has come; their `finish_reason` is "timeout".

        Waiting or running, a step in flight or not; there is no `Output` for them.
        """
        late = self._deadlines.passed(now_s)
        for request in late:
            request.finish_reason = "timeout"
            self._finish(request)
        return late

    def schedule(self, now_s: float) -> Step | None:
        """The next step, or None when there is no request at all, or only some that an idle engine
        keeps until `wake_s`; with steps in flight also where nothing can be done before one ends.

        Raises RuntimeError while as many steps as may be are not completed.
        """
        flight = self._flight
        if flight.is_full:
            raise RuntimeError(f"{len(flight)} steps are in flight: one must be completed first")
        self.pins.advance(now_s)
        is_filling = self._admission.is_filling(self._waiting, len(self._running), now_s)
        if is_filling or not self.requests:
            return None
        step = Step(self.steps_total)
        if not self._schedule_decodes(step):
            return None
        budget = self.settings.max_num_tokens - len(step.decodes)
        if self._pace is not None and step.decodes:
            budget = min(budget, self._pace.prefill_tokens)
        for request in self._running:
            if budget and request.scheduled_tokens < request.prefill_target:
                budget -= step.add_chunk(request, budget)
        totals = dict(self.not_scheduled_total) if flight else {}
        queues = self._waiting, self._running
        self._waiting = self._admission.admit(*queues, step, budget, now_s, self._start)
        if flight and not step.decodes and not step.chunks:
            self.not_scheduled_total.update(totals)  # there is no step that they wait for
            return None
        self.steps_total += 1
        flight.launch(step, now_s)
        return step

    def complete(
        self,
        step: Step,
        tokens: Mapping[int, int],
        now_s: float,
        ended: Mapping[int, FinishReason] = NOBODY,
    ) -> list[Output]:
        """Take in a computed step: `tokens` maps the ids of `step.sampled` to their new tokens,
        `ended` those that end with it to the reason: a stop string in their text, an error.

        Blocks filled by the step become visible. Requests cancelled meanwhile are passed over.
        Raises ValueError for another step than the oldest, KeyError for a missing token.
        """
        step_s = self._flight.land(step, now_s)
        if self._pace is not None and step.decodes:
            self._pace.observe(step.prefill_tokens, step_s)
        outputs: list[Output] = []
        block_size = self.pool.block_size
        for request in step.decodes:
            if request.state is State.RUNNING:
                request.computed_tokens += 1
                if not request.computed_tokens % block_size:
                    self._blocks.publish(request)
                outputs.append(self._take_token(request, tokens, now_s, ended))
        for request, start, count in step.chunks:
            if request.state is State.RUNNING:
                request.computed_tokens = start + count
                self._blocks.publish(request)
                if not request.is_prefilling:
                    outputs.append(self._take_token(request, tokens, now_s, ended))
        return outputs

    def _schedule_decodes(self, step: Step) -> bool:
        """Every running request past its prefill gets one token, or makes room for others.

        False: there is no room before steps in flight end; nobody is put back who is in one.
        """
        context_tokens, block_size, flight = 0, self.pool.block_size, self._flight
        left = flight.most_decodes(self._running)
        # The list may shrink from its end while it is walked: victims are the last in order,
        # so a request that already has its place in the step is never taken.
        for request in self._running:
            computed = request.scheduled_tokens
            if computed < request.prefill_target:
                continue
            if len(step.decodes) == left or (flight and not flight.may_decode(request)):
                continue
            if computed == len(request.block_ids) * block_size and not self._blocks.grow(request):
                if flight:
                    return False
                if not self._make_room(request, step):
                    continue
            step.decodes.append(request)
            context_tokens += computed + 1
        step.decode_ctx_tokens = context_tokens
        return True

    def _make_room(self, request: Request, step: Step) -> bool:
        """One more block, at the cost of the last in order; False if that is `request` itself."""
        while True:
            victim = self._running.pop()
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
            if self._blocks.grow(request):
                return True

    def _preempt(self, request: Request) -> None:
        """Back to the front of the queue; what it published stays cached."""
        self._blocks.leave(request)
        request.state = State.WAITING
        request.preemptions += 1
        self.preemptions_total += 1
        request.queue_key = (0, *request.queue_key[1:])
        insort(self._waiting, request, key=_queue_key)

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
        request.note(None, now_s)
        request.queue_key = (1, *request.queue_key[1:])
        insort(self._running, request, key=_queue_key)

    def _take_token(
        self,
        request: Request,
        tokens: Mapping[int, int],
        now_s: float,
        ended: Mapping[int, FinishReason],
    ) -> Output:
        token = tokens[request.request_id]
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.output.append(token)
        finished = ended.get(request.request_id) or request.end_with(token)
        if finished:
            request.finish_reason = finished
            self._finish(request)
        return Output(request, token, finished)

    def _finish(self, request: Request) -> None:
        queue = self._waiting
        if request.state is State.RUNNING:
            queue = self._running
            self._flight.leave(request)
        del queue[bisect_left(queue, request.queue_key, key=_queue_key)]
        del self.requests[request.request_id]
        request.state = State.FINISHED
        request.reason = None
