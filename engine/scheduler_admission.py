"""May a waiting request start now? If not, the reason that its client is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from engine.block_pool import BlockPool
from engine.request import Reason, Request
from engine.scheduler_blocks import RequestBlocks
from engine.scheduler_types import SchedulerSettings, Step

# What holds up one request and not those behind it; for anything else nobody overtakes, or
# large requests would starve.
PASSED_BY = frozenset({Reason.PREFIX_IN_FLIGHT, Reason.TENANT_SHARE})
WAITS_FOR_ROOM = frozenset({Reason.KV_BLOCKS, Reason.RESERVE_POLICY})


class Admission:
    """The rules by which requests leave the queue; lifetime: worker."""

    def __init__(self, settings: SchedulerSettings, pool: BlockPool, blocks: RequestBlocks) -> None:
        self._settings = settings
        self._block_size = pool.block_size
        self._blocks = blocks
        self.not_scheduled_total = dict.fromkeys(Reason, 0)  # request-steps spent waiting
        self.filling_until_s: float | None = None  # an idle engine waits for more to start with
        # Without eviction nobody grows beyond what was reserved, so nothing need be spared.
        watermark = 0.0 if settings.reserves_outputs else settings.watermark
        self._watermark_blocks = ceil(watermark * pool.blocks)
        self._share_blocks = max(1, int(settings.tenant_share * pool.blocks))

    def admit(
        self,
        waiting: Sequence[Request],
        running: Sequence[Request],
        step: Step,
        budget: int,
        now_s: float,
        start: Callable[[Request, int, float], None],
    ) -> list[Request]:
        """Start requests of `waiting`, in order; those that stay, with their reasons.

        `start(request, hit, now_s)` makes it one of `running`; `budget` tokens are left in `step`.
        """
        kept: list[Request] = []
        over: set[str] = set()  # tenants one of whose requests waits for their share
        for place, request in enumerate(waiting):
            hit = self._blocks.hit(request)
            reason = Reason.TENANT_SHARE if request.tenant in over else None
            if reason is None:
                reason = self.obstacle(request, hit, step, len(running), budget, now_s)
            if reason is None:
                start(request, hit, now_s)
                budget -= step.add_chunk(request, budget)
                continue
            kept.append(request)
            self._note_wait((request,), reason, now_s)
            if reason is Reason.TENANT_SHARE:
                over.add(request.tenant)
            if reason not in PASSED_BY:
                behind = waiting[place + 1 :]
                shared = Reason.PRIORITY if reason in WAITS_FOR_ROOM else reason
                self._note_wait(behind, shared, now_s)
                kept += behind
                break
        return kept

    def _note_wait(self, requests: Sequence[Request], reason: Reason, now_s: float) -> None:
        self.not_scheduled_total[reason] += len(requests)
        for request in requests:
            request.note(reason, now_s)

    def obstacle(
        self, request: Request, hit: int, step: Step, running: int, budget: int, now_s: float
    ) -> Reason | None:
        """Why `request`, with `hit` blocks cached, cannot start beside `running` others with
        `budget` tokens left in `step`; None if it can."""
        settings = self._settings
        if running >= settings.max_batch_size:
            return Reason.MAX_BATCH_SIZE
        uncached_tokens = request.total_tokens - hit * self._block_size
        if budget < min(settings.min_chunk_tokens, uncached_tokens):
            return Reason.TOKEN_BUDGET
        if self._waits_for_prefix(request, hit, uncached_tokens, now_s):
            return Reason.PREFIX_IN_FLIGHT
        if self._exceeds_share(request, hit):
            return Reason.TENANT_SHARE
        # An empty engine takes whatever fits: the watermark protects decodes, and there are none.
        spare_blocks = self._watermark_blocks if running else 0
        if step.preempted or not self._blocks.fits(request, hit, spare_blocks):
            return Reason.KV_BLOCKS
        if not self._blocks.fits_whole(request, hit):
            return Reason.RESERVE_POLICY
        return None

    def is_filling(self, waiting: Sequence[Request], running: int, now_s: float) -> bool:
        """Does an idle engine wait for more requests to start with, as Triton does it with
        `max_queue_delay_microseconds`? Not once the oldest waited so long, nor when they fill a
        step as they are."""
        until_s = None if running else self._full_at_s(waiting)
        self.filling_until_s = until_s if until_s is not None and now_s < until_s else None
        if self.filling_until_s is None:
            return False
        for request in waiting:
            request.note(Reason.QUEUE_DELAY, now_s)
        return True

    def _full_at_s(self, waiting: Sequence[Request]) -> float | None:
        settings = self._settings
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
        """Is most of what `request` lacks being computed by a running request?

        Then it waits: the other stands before it in every step, so computing the same blocks
        beside it ends no earlier and makes both their steps longer (measured in
        tests/engine/test_scheduler_prefix_wait.py). Not for a short prefix, where one more step
        costs more than the tokens saved, and not once it has waited for `ageing_s`.
        """
        least_tokens = self._settings.prefix_wait_tokens
        if not least_tokens or now_s - request.arrival_s >= self._settings.ageing_s:
            return False
        shared_tokens = self._blocks.in_flight_tokens(request, hit)
        return shared_tokens >= least_tokens and 2 * shared_tokens >= uncached_tokens

    def _exceeds_share(self, request: Request, hit: int) -> bool:
        """Has its tenant so many blocks that these would be too many? One request always may."""
        if self._settings.tenant_share >= 1.0:
            return False
        held = self._blocks.held_by(request.tenant)
        return held > 0 and held + self._blocks.fresh(request, hit) > self._share_blocks
