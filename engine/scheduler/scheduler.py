"""In-flight batching: decides which requests compute which tokens in each step of an engine.

Pure: no clock, no I/O, no randomness; `now_s` is passed in. One step is in flight at a time unless
the caller allows more; then the next step is made before the tokens of the current one are known. A
step takes decodes first, then chunks of running prefills, then admissions, up to the token budget.
Requests are ordered by `priority * ageing_s + arrival_s`: all of them age at the same pace, so the
key never changes, the queue is sorted on entry, and no request waits for ever.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import ceil, inf, isfinite
from operator import attrgetter
from types import MappingProxyType

from engine.block_pool import BlockPool
from engine.pins import Exports
from engine.scheduler.blocks import RequestBlocks
from engine.scheduler.request import FinishReason, Reason, Request, State
from engine.scheduler.types import (
    Output,
    Read,
    Refused,
    SchedulerSettings,
    Step,
    refuse_hopeless,
)


class Pace:
    """The number of prompt tokens allowed in steps that also decode; lifetime: worker.

    The number is adapted so that `target_s` seconds pass from one token of a request to its next.
    It is at least `least_tokens`, so that prompts advance even if decodes alone miss the target,
    and begins with `most_tokens`.
    """

    def __init__(self, target_s: float, least_tokens: int, most_tokens: int) -> None:
        self.prefill_tokens = most_tokens
        self._target_s = target_s
        self._least_tokens = least_tokens
        self._most_tokens = most_tokens

    @classmethod
    def of(cls, settings: SchedulerSettings) -> Pace | None:
        """Return a pace for the setting `tpot_target_ms`; None if the settings have no target."""
        if not settings.tpot_target_ms:
            return None
        return cls(
            settings.tpot_target_ms / 1e3, settings.min_chunk_tokens, settings.max_num_tokens
        )

    def observe(self, prefill_tokens: int, step_s: float) -> None:
        """Adapt the budget to a step with decodes and `prefill_tokens` prompt tokens, which took
        `step_s`.
        """
        if not prefill_tokens:
            return
        tokens = self.prefill_tokens
        if step_s > self._target_s:
            tokens = int(min(tokens, prefill_tokens) * max(0.5, self._target_s / step_s))
        elif prefill_tokens >= tokens and step_s < 0.9 * self._target_s:
            tokens += max(1, tokens // 16)
        self.prefill_tokens = min(self._most_tokens, max(self._least_tokens, tokens))


SLACK = 64  # finished requests that may linger among as many unfinished ones


class Deadlines:
    """A heap of deadlines; lifetime: worker. Requests without a deadline cost nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._serial = 0

    def add(self, request: Request, unfinished: int) -> None:
        """Watch `request` if it has a deadline. `unfinished` is the number of unfinished requests.
        A request that ends before its deadline need not be removed: finished requests are dropped
        once they outnumber the unfinished ones.
        """
        if not isfinite(request.deadline_s):
            return
        self._serial += 1
        heappush(self._heap, (request.deadline_s, self._serial, request))
        if len(self._heap) > 2 * unfinished + SLACK:
            self._heap = [one for one in self._heap if one[2].state is not State.FINISHED]
            heapify(self._heap)

    def next_s(self) -> float | None:
        """Return the time of the next deadline; None if none is watched."""
        heap = self._heap
        while heap and heap[0][2].state is State.FINISHED:
            heappop(heap)
        return heap[0][0] if heap else None

    def passed(self, now_s: float) -> list[Request]:
        """Return the unfinished requests whose deadline is at or before `now_s`, each once."""
        late: list[Request] = []
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            request = heappop(heap)[2]
            if request.state is not State.FINISHED:
                late.append(request)
        return late


MAX_STEPS_IN_FLIGHT = 16


# Reasons that hold up one request but not those behind it. For any other reason no request
# overtakes, or large requests would starve.
PASSED_BY = frozenset({Reason.PREFIX_IN_FLIGHT, Reason.TENANT_SHARE})
WAITS_FOR_ROOM = frozenset({Reason.KV_BLOCKS, Reason.RESERVE_POLICY})
NOBODY: Mapping[int, FinishReason] = MappingProxyType({})
_queue_key = attrgetter("queue_key")


class Scheduler:
    """Schedules the requests of one worker; lifetime: worker.

    Use: `add`, then `schedule` and `complete` in turn; `cancel` at any time. Every request that was
    added gets exactly one `Output` with `finished` set, unless it is cancelled. `steps_in_flight`
    steps may be scheduled and not yet complete; they complete in the order of their start. With
    `runs_ahead` a request decodes again although the token that it got from a step in flight is not
    known yet; otherwise it waits for that token, and decoding requests are spread over the steps.
    Raises ValueError for a number of steps out of range.

    A request with `imports` computes only its prompt's last token: the KV of the other tokens comes
    from another worker. When its turn has come and its whole prompt fits, its blocks are reserved
    and `take_reads` returns it once. By `end_read`, at any later time, the caller says that the
    blocks are no longer written, and whether they hold the KV. Until then no other request gets
    them, even if the request has ended. The same happens if the host has blocks of a prompt that
    the GPU lacks: other requests compute while these are loaded, and then the request computes the
    rest. A request with `exports` leaves its prompt's blocks in `exports`, under a lease, when it
    ends by length or stop; `Request.export` names them.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: BlockPool,
        *,
        steps_in_flight: int = 1,
        runs_ahead: bool = False,
    ) -> None:
        if not 1 <= steps_in_flight <= MAX_STEPS_IN_FLIGHT:
            raise ValueError(
                f"steps in flight must be 1..{MAX_STEPS_IN_FLIGHT}, got {steps_in_flight}"
            )
        self.settings = settings
        self.pool = pool
        self.requests: dict[int, Request] = {}  # unfinished, by id
        self.steps_total = 0
        self.preemptions_total = 0
        self.prefix_query_tokens_total = 0  # prompt tokens of first admissions
        self.prefix_hit_tokens_total = 0  # those of them found on the GPU
        self.host_hit_tokens_total = 0  # and those loaded from the host
        self.recomputed_tokens_total = 0  # computed a second time after a preemption
        self._waiting: list[Request] = []  # by queue_key, as is `_running`
        self._running: list[Request] = []
        self._blocks = RequestBlocks(settings, pool)
        self.pins = self._blocks.pins
        self.exports = Exports(pool, settings.export_lease_s, settings.max_exports)
        # By id: requests whose blocks are being written from elsewhere, even if they have ended.
        self._reading: dict[int, Request] = {}
        self._reads: list[Read] = []  # reads that `take_reads` has not returned yet
        working = 0 if pool.groups is None else pool.groups.working_blocks * pool.block_size
        self.max_sequence_tokens = min(settings.max_model_tokens, self.pins.spared_tokens - working)
        self.not_scheduled_total = dict.fromkeys(Reason, 0)  # request-steps spent waiting
        self._filling_until_s: float | None = None  # an idle engine waits for more to start with
        # Without eviction no request grows beyond its reservation, so no blocks are spared.
        watermark = 0.0 if settings.reserves_outputs else settings.watermark
        self._watermark_blocks = ceil(watermark * pool.blocks)
        self._share_blocks = max(1, int(settings.tenant_share * pool.blocks))
        self._deadlines = Deadlines()
        self._pace = Pace.of(settings)
        self._steps_in_flight = steps_in_flight
        self._runs_ahead = runs_ahead
        self._in_flight: deque[tuple[Step, float]] = deque()  # oldest first, with its start
        self._leaving: list[Request] = []  # ended, and still in a step in flight
        self._completed_s = -inf  # when the latest step completed
        self._serial = 0

    @property
    def running(self) -> int:
        """The number of requests that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The number of requests in the queue, with preempted requests and those whose KV is on its
        way.
        """
        return len(self._waiting) + self.reading

    @property
    def reading(self) -> int:
        """The number of requests whose prompt's KV is on its way from another worker or from the
        host.
        """
        return sum(one.state is State.READING for one in self._reading.values())

    @property
    def kv_used_blocks(self) -> int:
        """The number of blocks held by running requests, with reserved blocks that are not computed
        yet.
        """
        return self.pool.used_blocks

    @property
    def has_room(self) -> bool:
        """True if another step may start while the steps in flight compute."""
        return len(self._in_flight) < self._steps_in_flight

    @property
    def wake_s(self) -> float | None:
        """Return the time at which to call `expire` and `schedule` again if nothing happens before;
        None if no time is set.
        """
        lease_s = self.exports.next_s if self._waiting else None
        known = (self._filling_until_s, self._deadlines.next_s(), lease_s)
        return min((when_s for when_s in known if when_s is not None), default=None)

    def add(self, request: Request, now_s: float) -> None:
        """Queue a new request. Raises Refused if the request cannot run, or ValueError for an id
        still in use.
        """
        if request.request_id in self.requests or request.request_id in self._reading:
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
        """Drop a request and free its blocks; return False if it is finished or was never added."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request)
        return request is not None

    def expire(self, now_s: float) -> list[Request]:
        """End the requests whose deadline has come, and return them; their `finish_reason` is
        "timeout".

        Waiting and running requests end, also with a step in flight; they get no `Output`.
        """
        late = self._deadlines.passed(now_s)
        for request in late:
            request.finish_reason = "timeout"
            self._finish(request)
        return late

    def schedule(self, now_s: float) -> Step | None:
        """Return the next step; None if there is nothing to compute now.

        There is nothing without requests, or if an idle engine keeps its requests until `wake_s`.
        With steps in flight there is nothing, too, if no request can be advanced before a step
        ends, or if all requests wait for KV, or for blocks that other workers read. Raises
        RuntimeError if the maximum number of steps is in flight.
        """
        in_flight = len(self._in_flight)
        if in_flight >= self._steps_in_flight:
            raise RuntimeError(f"{in_flight} steps are in flight: one must be completed first")
        self.pins.advance(now_s)
        self.exports.advance(now_s)
        if self._is_filling(now_s) or not self.requests:
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
        totals = dict(self.not_scheduled_total)
        self._admit(step, budget, now_s)
        may_rest = in_flight or self._reading or self._reads or len(self.exports)
        if may_rest and not step.decodes and not step.chunks:
            self.not_scheduled_total.update(totals)  # there is no step that they wait for
            return None
        self.not_scheduled_total[Reason.KV_TRANSFER] += self.reading
        self.steps_total += 1
        self._launch(step, now_s)
        return step

    def complete(
        self,
        step: Step,
        tokens: Mapping[int, int],
        now_s: float,
        ended: Mapping[int, FinishReason] = NOBODY,
    ) -> list[Output]:
        """Record that `step` was computed.

        `tokens` maps the ids of `step.sampled` to their new tokens; `ended` maps the ids of
        requests that end with it to the reason, such as a stop string in their text, or an error.
        Blocks that the step filled become visible. Requests that were cancelled meanwhile are
        skipped. Raises ValueError if `step` is not the oldest one, KeyError for a missing token.
        """
        step_s = self._land(step, now_s)
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
                if request.export is not None:
                    request.export.ready_tokens = request.computed_tokens
                if not request.is_prefilling:
                    outputs.append(self._take_token(request, tokens, now_s, ended))
        return outputs

    def take_reads(self) -> list[Read]:
        """Return the reads of KV from other workers or from the host that became due since the last
        call; call this after each `schedule`.
        """
        reads, self._reads = self._reads, []
        return reads

    def forget_import(self, request_id: int) -> None:
        """Let a waiting request compute its prompt on this worker, because there will be no KV to
        read for it.
        """
        request = self.requests.get(request_id)
        if request is not None:
            request.imports = False

    def end_read(self, request_id: int, now_s: float, *, arrived: bool) -> None:
        """End the read of a request's KV: nobody writes to the request's blocks any more.

        `arrived` says whether they hold its prompt's KV. If not, the request waits for its turn
        again and computes its prompt on this worker. Raises KeyError for a request that does not
        read.
        """
        request = self._reading.pop(request_id)
        if request.state is State.FINISHED:
            self._blocks.leave(request)
            return
        if not arrived:
            self._blocks.leave(request)
            request.state = State.WAITING
            insort(self._waiting, request, key=_queue_key)
            return
        self._blocks.end_load(request)
        request.computed_tokens = request.scheduled_tokens = request.read_target
        self._blocks.publish(request)
        self._run(request, now_s)

    def _admit(self, step: Step, budget: int, now_s: float) -> None:
        """Start waiting requests in order, with `budget` tokens left in `step`; record the reason
        of each request that does not start.
        """
        waiting, kept = self._waiting, list[Request]()
        over: set[str] = set()  # tenants of which a request waits for the tenant's share
        for position, request in enumerate(waiting):
            hit = self._blocks.hit(request)
            host_hit = self._blocks.host_hit(request, hit)
            reason = Reason.TENANT_SHARE if request.tenant in over else None
            if reason is None:
                reason = self._obstacle(request, hit, host_hit, step, budget, now_s)
            if reason is None:
                self._start(request, hit, host_hit, now_s)
                if request.state is State.RUNNING:
                    budget -= step.add_chunk(request, budget)
                continue
            kept.append(request)
            self._note_wait((request,), reason, now_s)
            if reason is Reason.TENANT_SHARE:
                over.add(request.tenant)
            if reason not in PASSED_BY:
                behind = waiting[position + 1 :]
                shared = Reason.PRIORITY if reason in WAITS_FOR_ROOM else reason
                self._note_wait(behind, shared, now_s)
                kept += behind
                break
        self._waiting = kept

    def _note_wait(self, requests: Sequence[Request], reason: Reason, now_s: float) -> None:
        self.not_scheduled_total[reason] += len(requests)
        for request in requests:
            request.note(reason, now_s)

    def _obstacle(
        self, request: Request, hit: int, host_hit: int, step: Step, budget: int, now_s: float
    ) -> Reason | None:
        """Return why `request` cannot start now; None if it can.

        It has `hit` cached blocks and the next `host_hit` blocks in the host; `step` has `budget`
        tokens left.
        """
        settings, running = self.settings, len(self._running) + len(self._reading)
        if running >= settings.max_batch_size:
            return Reason.MAX_BATCH_SIZE
        uncached_tokens = request.total_tokens - hit * self.pool.block_size
        computes = not host_hit and (not request.imports or uncached_tokens == 1)
        if computes and budget < min(settings.min_chunk_tokens, uncached_tokens):
            return Reason.TOKEN_BUDGET
        if self._waits_for_prefix(request, hit, uncached_tokens, now_s):
            return Reason.PREFIX_IN_FLIGHT
        if self._exceeds_share(request, hit):
            return Reason.TENANT_SHARE
        # An empty engine takes all that fits: the watermark protects decodes, and there are none.
        spare_blocks = self._watermark_blocks if running else 0
        if step.preempted or not self._blocks.fits(request, hit, spare_blocks):
            return Reason.KV_BLOCKS
        if not self._blocks.fits_whole(request, hit):
            return Reason.RESERVE_POLICY
        return None

    def _is_filling(self, now_s: float) -> bool:
        """Return whether an idle engine waits for more requests, as Triton does with
        `max_queue_delay_microseconds`.

        It does not once the oldest request has waited that long, or if the waiting requests fill a
        step.
        """
        until_s = None if self._running or self._reading else self._full_at_s()
        self._filling_until_s = until_s if until_s is not None and now_s < until_s else None
        if self._filling_until_s is None:
            return False
        for request in self._waiting:
            request.note(Reason.QUEUE_DELAY, now_s)
        return True

    def _full_at_s(self) -> float | None:
        settings, waiting = self.settings, self._waiting
        delay_s = settings.max_queue_delay_microseconds / 1e6
        if not delay_s or not waiting or len(waiting) >= settings.max_batch_size:
            return None
        if any(request.preemptions for request in waiting):
            return None
        if sum(request.total_tokens for request in waiting) >= settings.max_num_tokens:
            return None
        return min(request.arrival_s for request in waiting) + delay_s

    def _waits_for_prefix(
        self, request: Request, hit: int, uncached_tokens: int, now_s: float
    ) -> bool:
        """Return whether `request` waits because a running request is computing most of its missing
        prefix.

        The running request comes first in every step. So if `request` computed the same blocks
        itself, it would end no earlier, and the steps of both requests would be longer (measured in
        tests/engine/scheduler/test_prefix_wait.py). A request does not wait for a short prefix,
        where one more step costs more than the saved tokens, nor once it has waited for `ageing_s`.
        """
        least_tokens = self.settings.prefix_wait_tokens
        if not least_tokens or now_s - request.arrival_s >= self.settings.ageing_s:
            return False
        shared_tokens = self._blocks.in_flight_tokens(request, hit)
        return shared_tokens >= least_tokens and 2 * shared_tokens >= uncached_tokens

    def _exceeds_share(self, request: Request, hit: int) -> bool:
        """Return whether the request would give its tenant too many blocks. A tenant's only request
        never does.
        """
        if self.settings.tenant_share >= 1.0:
            return False
        held = self._blocks.held_by(request.tenant)
        return held > 0 and held + self._blocks.fresh(request, hit) > self._share_blocks

    def _most_decodes(self) -> int:
        """Return how many running requests may decode in one step, so that each of the steps in
        flight gets its share.
        """
        if self._runs_ahead or self._steps_in_flight == 1:
            return len(self._running)
        decoding = sum(one.scheduled_tokens >= one.prefill_target for one in self._running)
        return -(-decoding // self._steps_in_flight)

    def _may_decode(self, request: Request) -> bool:
        """Return whether `request`, whose prefill has ended, may compute one more token while other
        steps are in flight.
        """
        after = request.scheduled_tokens + 1  # its tokens, those in flight included
        if after == request.total_tokens:
            return True
        # A request that reaches its longest output in the steps in flight will end.
        return self._runs_ahead and after < request.token_limit

    def _launch(self, step: Step, now_s: float) -> None:
        """Start `step`: advance its requests by what they will have computed when it ends."""
        number = step.number
        for request in step.decodes:
            request.scheduled_tokens += 1
            request.last_step = number
        for request, start, tokens in step.chunks:
            request.scheduled_tokens = start + tokens
            request.last_step = number
        self._in_flight.append((step, now_s))

    def _land(self, step: Step, now_s: float) -> float:
        """End the oldest step, and return its duration in seconds after the previous step.

        Blocks that only ended requests wrote in it become free. Raises ValueError for another step.
        """
        if not self._in_flight or self._in_flight[0][0] is not step:
            raise ValueError(f"step {step.number} is not the oldest one in flight")
        _, begun_s = self._in_flight.popleft()
        begun_s, self._completed_s = max(begun_s, self._completed_s), now_s
        if self._leaving:
            for request in self._leaving:
                if request.last_step <= step.number:
                    self._blocks.leave(request)
            self._leaving = [one for one in self._leaving if one.last_step > step.number]
        return now_s - begun_s

    def _leave(self, request: Request) -> None:
        """Remove a running request; its blocks become free when no step in flight writes them.

        With one step in flight that is at once, because no request gets blocks before the step has
        ended.
        """
        oldest = self._in_flight[0][0].number if self._in_flight else None
        if self._steps_in_flight > 1 and oldest is not None and request.last_step >= oldest:
            self._leaving.append(request)
        else:
            self._blocks.leave(request)

    def _leave_read(self, request: Request) -> None:
        """End the read of a request's KV; the request's blocks become free once nobody writes to
        them, at once if the read never began.
        """
        if self._reads and any(read.request is request for read in self._reads):
            self._reads = [read for read in self._reads if read.request is not request]
            del self._reading[request.request_id]
            self._blocks.leave(request)

    def _schedule_decodes(self, step: Step) -> bool:
        """Give one token to every running request whose prefill has ended, or preempt it for
        others. Return False if there is no room before steps in flight end; a request that is in
        such a step is not preempted.
        """
        context_tokens, block_size, in_flight = 0, self.pool.block_size, bool(self._in_flight)
        most = self._most_decodes()
        # The list may shrink from its end while it is walked: victims are the last in order,
        # so a request that already has its place in the step is never taken.
        for request in self._running:
            computed = request.scheduled_tokens
            if computed < request.prefill_target:
                continue
            if len(step.decodes) == most or (in_flight and not self._may_decode(request)):
                continue
            if computed == len(request.block_ids) * block_size and not self._blocks.grow(request):
                if in_flight:
                    return False
                if not self._make_room(request, step):
                    continue
            step.decodes.append(request)
            context_tokens += computed + 1
        step.decode_ctx_tokens = context_tokens
        return True

    def _make_room(self, request: Request, step: Step) -> bool:
        """Take one more block for `request`, if need be by preempting the last request in order;
        return False if that is `request` itself.
        """
        while True:
            victim = self._running.pop()
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
            if self._blocks.grow(request):
                return True

    def _preempt(self, request: Request) -> None:
        """Put a running request back at the front of the queue; its published blocks stay
        cached.
        """
        self._end_export(request)
        self._blocks.leave(request)
        request.state = State.WAITING
        request.preemptions += 1
        self.preemptions_total += 1
        request.queue_key = (0, *request.queue_key[1:])
        insort(self._waiting, request, key=_queue_key)

    def _start(self, request: Request, hit: int, host_hit: int, now_s: float) -> None:
        self._blocks.start(request, hit, host_hit)
        found_tokens = (hit + host_hit) * self.pool.block_size
        if request.preemptions:
            self.recomputed_tokens_total += request.total_tokens - found_tokens
        elif request.started_s is None:
            request.started_s = now_s
            request.cached_tokens = found_tokens
            self.prefix_query_tokens_total += request.prompt_tokens
            self.prefix_hit_tokens_total += request.computed_tokens
            self.host_hit_tokens_total += found_tokens - request.computed_tokens
        start = request.computed_tokens
        if request.imports:
            request.imports = False
            request.read_target = max(start, request.total_tokens - 1)
            self._reads.append(Read(request, start, request.total_tokens - 1))
        elif host_hit:
            request.read_target = found_tokens
            self._reads.append(Read(request, start, found_tokens, "host"))
        else:
            request.read_target = start
        if start < request.read_target:
            request.state = State.READING
            request.note(Reason.KV_TRANSFER, now_s)
            self._reading[request.request_id] = request
            return
        if request.exports_early and not request.preemptions:
            self._begin_export(request)
        self._run(request, now_s)

    def _run(self, request: Request, now_s: float) -> None:
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
            if request.exports and finished in ("length", "stop"):
                self._export(request, now_s)
            self._finish(request)
        return Output(request, token, finished)

    def _begin_export(self, request: Request) -> None:
        request.export = self.exports.begin(
            request.request_id,
            request.prompt,
            request.block_ids,
            request.cached_tokens,
            request.export_name,
        )

    def _export(self, request: Request, now_s: float) -> None:
        """Hold the blocks of a prompt for readers, independently of its request."""
        if request.export is None:
            self._begin_export(request)
        if request.export is not None:
            blocks = -(-request.prompt_tokens // self.pool.block_size)
            self.exports.keep(request.export, request.block_ids[:blocks], now_s)

    def _end_export(self, request: Request) -> None:
        """Tell the readers of a request's blocks that it loses them."""
        if request.export is not None and request.export.is_computing:
            self.exports.release(request.export)
            request.export = None

    def _finish(self, request: Request) -> None:
        queue = self._waiting
        self._end_export(request)
        if request.state is State.RUNNING:
            queue = self._running
            self._leave(request)
        if request.state is State.READING:
            self._leave_read(request)
        else:
            del queue[bisect_left(queue, request.queue_key, key=_queue_key)]
        del self.requests[request.request_id]
        request.state = State.FINISHED
        request.reason = None
