"""How far one policy is from the bounds, and how many hits its choices and its caches cost it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from simulator.limits.known import Known
from simulator.limits.losses import Loss
from simulator.limits.lower import Bounds
from simulator.limits.machines import Machine
from simulator.limits.optimum import most_hits
from simulator.replay.result import ReplayResult
from simulator.report.row import ReplayRow


class HitLosses(msgspec.Struct, frozen=True):
    """Token hit rates from the ceiling down to what was measured, each with less freedom.

    `ceiling`: one cache without limit. `union`: one cache with the fleet's memory, the future
    known. `placed`: each worker's cache with its own requests, the future known. `measured`: what
    the engines found. union - placed is lost by routing, placed - measured by eviction (and by
    what was not yet computed when it was needed).
    """

    ceiling: float
    union: float
    placed: float
    measured: float

    @property
    def routing(self) -> float:
        """Lost by sending requests away from what they share."""
        return self.union - self.placed

    @property
    def eviction(self) -> float:
        """Lost by evicting what comes back, or by asking for it too early."""
        return self.placed - self.measured


class Distance(msgspec.Struct, frozen=True):
    """One policy. Times in ms, means over requests; gaps in percent.

    `gap`: (M - bound) / (M of round robin - bound): 0 at the bound, 100 where round robin is.
    `regret`: M / best achieved - 1. None where not every request that can run was completed (then
    M is a mean over other requests) or the divisor is 0.
    """

    policy: str
    completed: int
    ttft_ms: float | None
    e2e_ms: float | None
    gap_ttft_percent: float | None
    gap_e2e_percent: float | None
    regret_ttft_percent: float | None
    regret_e2e_percent: float | None
    hits: HitLosses
    losses: tuple[Loss, ...]  # empty where they were not asked for, or not everything completed


def gap_percent(value: float | None, round_robin: float | None, bound: float) -> float | None:
    """See `Distance`."""
    if value is None or round_robin is None or round_robin <= bound:
        return None
    return round(100.0 * (value - bound) / (round_robin - bound), 3)


def regret_percent(value: float | None, best: float | None) -> float | None:
    """See `Distance`."""
    if value is None or best is None or best <= 0.0:
        return None
    return round(100.0 * (value / best - 1.0), 3)


def mean_times_ms(row: ReplayRow, bounds: Bounds) -> tuple[float | None, float | None]:
    """Mean times to first and last token; None when not everything that can run was completed."""
    if row.completed != bounds.requests - bounds.hopeless:
        return None, None
    return row.ttft_ms.mean, row.e2e_ms.mean


def hit_losses(
    known: Known, machines: Sequence[Machine], result: ReplayResult, bounds: Bounds
) -> HitLosses:
    """Where the hits of one replay went."""
    workers = result.table.worker.tolist()
    kinds = [machine for machine in machines for _ in range(machine.count)]
    found = 0
    for worker, kind in enumerate(kinds):
        mine = [n for n, row in enumerate(known.rows) if workers[row] == worker]
        found += most_hits(
            [known.chains[n].tolist() for n in mine],
            [known.reusable_blocks[n] for n in mine],
            kind.blocks,
        )
    hit_tokens = result.table.hit_tokens
    measured = int(hit_tokens[hit_tokens > 0].sum())
    return HitLosses(
        ceiling=bounds.hit_rate_tokens.value,
        union=bounds.belady_hit_rate,
        placed=found * known.block_size / known.prompt_tokens,
        measured=measured / known.prompt_tokens,
    )
