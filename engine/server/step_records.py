"""The latest steps, each with what it computed, what it cost and why others waited.

A step's record is made as it ends, from counters that are there anyway, and kept in a ring.
"""

from __future__ import annotations

from collections import deque

import msgspec

from engine.scheduler import Scheduler
from engine.scheduler_types import Step, StepSplit

KEPT_STEPS = 1000


class StepRecord(msgspec.Struct, frozen=True):
    """One step as `/debug/steps` shows it."""

    number: int
    ended_at_s: float  # seconds since the epoch
    batch_size: int  # requests that it computed something for
    decode_tokens: int
    prefill_tokens: int
    prefill_requests: int
    budget_tokens: int  # it might have computed so many
    budget_used: float  # share of them, 0..1
    schedule_ms: float
    compute_ms: float
    complete_ms: float
    answer_ms: float  # events and bytes to clients
    modelled_ms: float | None
    graph: str | None  # hit, or why the step was none of a graph: chunks, graph_limit
    padded_rows: int
    int8: str | None  # what multiplied the layers' INT8 weights: torch, kvkernels
    shared_prefix_groups: int  # runs of tokens whose KV several decodes read once
    kv_bytes_saved: int  # by that, in all layers
    preemptions: int
    recomputed_tokens: int
    running: int  # when it had ended
    waiting: int
    kv_used_blocks: int
    kv_blocks: int
    waiting_by_reason: dict[str, int]  # during this step; reasons that nobody had are left out


class StepRecords:
    """The ring. Lifetime: worker."""

    def __init__(self, scheduler: Scheduler, kept: int = KEPT_STEPS) -> None:
        self._scheduler = scheduler
        self._ring: deque[StepRecord] = deque(maxlen=kept)
        self._reasons = dict(scheduler.not_scheduled_total)
        self._recomputed_tokens = scheduler.recomputed_tokens_total
        # Of all steps since the start.
        self.phase_s = {"schedule": 0.0, "compute": 0.0, "complete": 0.0, "answer": 0.0}
        self.tokens = {"prefill": 0, "decode": 0}

    def note(self, step: Step, split: StepSplit, answer_s: float, at_s: float) -> None:
        """Keep a step that has just ended; call it for each, or its counts go to the next one."""
        scheduler = self._scheduler
        totals = scheduler.not_scheduled_total
        reasons = {
            reason.value: count - self._reasons.get(reason, 0)
            for reason, count in totals.items()
            if count != self._reasons.get(reason, 0)
        }
        self._reasons = dict(totals)
        recomputed_tokens = scheduler.recomputed_tokens_total - self._recomputed_tokens
        self._recomputed_tokens = scheduler.recomputed_tokens_total
        self.phase_s["schedule"] += split.schedule_s
        self.phase_s["compute"] += split.compute_s
        self.phase_s["complete"] += split.complete_s
        self.phase_s["answer"] += answer_s
        self.tokens["prefill"] += step.prefill_tokens
        self.tokens["decode"] += step.decode_seqs
        budget_tokens = scheduler.settings.max_num_tokens
        modelled_s = split.modelled_s
        self._ring.append(
            StepRecord(
                number=step.number,
                ended_at_s=at_s,
                batch_size=step.decode_seqs + step.prefill_seqs,
                decode_tokens=step.decode_seqs,
                prefill_tokens=step.prefill_tokens,
                prefill_requests=step.prefill_seqs,
                budget_tokens=budget_tokens,
                budget_used=(step.decode_seqs + step.prefill_tokens) / budget_tokens,
                schedule_ms=split.schedule_s * 1e3,
                compute_ms=split.compute_s * 1e3,
                complete_ms=split.complete_s * 1e3,
                answer_ms=answer_s * 1e3,
                modelled_ms=None if modelled_s is None else modelled_s * 1e3,
                graph=split.graph,
                padded_rows=split.padded_rows,
                int8=split.int8,
                shared_prefix_groups=split.shared_prefix_groups,
                kv_bytes_saved=split.kv_bytes_saved,
                preemptions=len(step.preempted),
                recomputed_tokens=recomputed_tokens,
                running=scheduler.running,
                waiting=scheduler.waiting,
                kv_used_blocks=scheduler.kv_used_blocks,
                kv_blocks=scheduler.pool.blocks,
                waiting_by_reason=reasons,
            )
        )

    def last(self, count: int) -> list[StepRecord]:
        """The latest `count` records, oldest first."""
        start = max(0, len(self._ring) - count)
        return [self._ring[place] for place in range(start, len(self._ring))]
