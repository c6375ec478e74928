"""Compares policies with what is possible: it computes lower bounds, the best times achieved, and
the losses between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from simulator.limits.bounds import Bounds, lower_bounds, most_hits
from simulator.limits.losses import Decisions, Loss, losses
from simulator.limits.partition import ANYWHERE, partition, placed_spec
from simulator.limits.work import Known, Machine, know, machine
from simulator.replay.result import ReplayResult
from simulator.replay.run import replay
from simulator.replay.setup import Setup
from simulator.report.row import ReplayRow, summarize
from simulator.workloads.open import Chainer, JobStream, open_jobs


class HitLosses(msgspec.Struct, frozen=True):
    """Token hit rates from the upper limit down to the measured one, each under one more
    restriction.

    `ceiling`: one cache without limit. `union`: one cache with the fleet's memory that knows the
    future. `placed`: each worker's cache with its own requests, which knows the future. `measured`:
    the hits of the engines. union - placed is lost by routing, placed - measured by eviction (and
    by blocks that were not computed yet when they were needed).
    """

    ceiling: float
    union: float
    placed: float
    measured: float

    @property
    def routing(self) -> float:
        """The hit rate lost by sending requests away from the workers that have their prefixes."""
        return self.union - self.placed

    @property
    def eviction(self) -> float:
        """The hit rate lost by evicting blocks that are used again, or by asking for them too
        early.
        """
        return self.placed - self.measured


class Distance(msgspec.Struct, frozen=True):
    """One policy's distance from the bounds.

    Times are in ms, as means over requests; gaps are in percent. With M for the policy's mean,
    `gap` is (M - bound) / (M of round robin - bound): 0 at the bound, 100 at round robin. `regret`
    is M / best achieved - 1. Both are None if not every request that can run was completed (then M
    is a mean over other requests), or if the divisor is 0.
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
    """Return the gap to the bound in percent, as `Distance` defines it."""
    if value is None or round_robin is None or round_robin <= bound:
        return None
    return round(100.0 * (value - bound) / (round_robin - bound), 3)


def regret_percent(value: float | None, best: float | None) -> float | None:
    """Return the regret in percent, as `Distance` defines it."""
    if value is None or best is None or best <= 0.0:
        return None
    return round(100.0 * (value / best - 1.0), 3)


def mean_times_ms(row: ReplayRow, bounds: Bounds) -> tuple[float | None, float | None]:
    """Return the mean times to first and last token; None if not every request that can run was
    completed.
    """
    if row.completed != bounds.requests - bounds.hopeless:
        return None, None
    return row.ttft_ms.mean, row.e2e_ms.mean


def hit_losses(
    known: Known, machines: Sequence[Machine], result: ReplayResult, bounds: Bounds
) -> HitLosses:
    """Return where the hits of one replay were lost."""
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


REFERENCE = "round_robin"
FRESH_REPORT_MS = 200.0
FRESH_PROGRESS_MS = 10.0


class BoundError(ValueError):
    """Raised for a setup that has no bounds; the message says what to change."""


class Achieved(msgspec.Struct, frozen=True):
    """The best times that one fixed assignment achieved in a replay in which every request was
    completed, in ms.
    """

    name: str
    ttft_ms: float
    e2e_ms: float


class BoundReport(msgspec.Struct, frozen=True):
    """One workload on one fleet: the bounds, the best achieved, and the policies."""

    source: str
    setup: Setup
    bounds: Bounds
    achieved: tuple[Achieved, ...]  # best time to first token first
    distances: tuple[Distance, ...]  # round robin first, then the policies as asked
    notes: tuple[str, ...]


Progress = Callable[[str, int, int], None]  # what is being done, how much of it, of how much


def bound(
    setup: Setup,
    policies: Sequence[str],
    *,
    waterfall: bool = True,
    open_stream: Callable[[], JobStream] | None = None,
    on_progress: Progress = lambda _what, _done, _total: None,
) -> BoundReport:
    """Return the bounds for the workload and fleet of `setup`, whose own policy is not used.

    Each policy and round robin are replayed; `waterfall` replays them again with fresh information,
    and their decisions with one effect after another switched off. `open_stream` replaces
    `setup.workload`: each call must return the same jobs. Raises BoundError for setups without
    bounds: a closed loop, faults, sizes.
    """
    desk = _Desk(setup, open_stream or (lambda: open_jobs(setup.workload, setup.seed)))
    _check(setup, desk)
    names = [REFERENCE, *(policy for policy in policies if policy != REFERENCE)]
    bounds = lower_bounds(desk.known, desk.machines, desk.network_ns, setup.goodput)
    runs = []
    for number, name in enumerate(names):
        on_progress("replays", number, len(names))
        runs.append(_PolicyRun(name, desk.attempt(name)))
    on_progress("replays", len(names), len(names))
    achieved = [one for run in runs if (one := _achieved(run.row, run.name, bounds)) is not None]
    homes = placed_spec(desk.by_row(partition(desk.known, desk.machines)))
    fixed = _achieved(summarize(desk.attempt(homes)), "partition by session", bounds)
    achieved += [] if fixed is None else [fixed]
    achieved.sort(key=lambda one: one.ttft_ms)
    distances = []
    for number, run in enumerate(runs):
        if waterfall:
            on_progress("losses", number, len(runs))
        distances.append(_distance(desk, run, runs[0].row, bounds, achieved, waterfall))
    if waterfall:
        on_progress("losses", len(runs), len(runs))
    return BoundReport(
        source=desk.source,
        setup=setup,
        bounds=bounds,
        achieved=tuple(achieved),
        distances=tuple(distances),
        notes=tuple(_notes(bounds, distances)),
    )


class _PolicyRun:
    """The replay of one policy."""

    def __init__(self, name: str, result: ReplayResult) -> None:
        self.name, self.result = name, result
        self.row = summarize(result)


class _Desk:
    """A workload, read once, and its replays with any policy."""

    def __init__(self, setup: Setup, open_stream: Callable[[], JobStream]) -> None:
        self.setup = setup
        self._open_stream = open_stream
        stream = open_stream()
        self.source = stream.origin
        block_size = setup.block_size or stream.block_tokens
        self.machines = [machine(group, block_size) for group in setup.groups if group.count]
        self.network_ns = math.floor(setup.world.network_ms * 1e6 + 0.5)
        most = max((kind.sequence_tokens for kind in self.machines), default=0)
        chainer = Chainer(stream.block_tokens, block_size)
        self.known: Known = know(stream.jobs, chainer.chain, block_size, most)

    def attempt(self, policy: str, *, fresh: bool = False) -> ReplayResult:
        """Replay the workload with a policy. With `fresh`, the router gets all information without
        delay.
        """
        setup = msgspec.structs.replace(self.setup, policy=policy)
        if fresh:
            world = msgspec.structs.replace(
                setup.world,
                event_lag_ms=0.0,
                event_loss=0.0,
                report_every_ms=FRESH_REPORT_MS,
                report_lag_ms=0.0,
                progress_ms=FRESH_PROGRESS_MS,
            )
            setup = msgspec.structs.replace(setup, world=world)
        return replay(setup, stream=self._open_stream())

    def by_row(self, workers: Sequence[int]) -> list[int]:
        """Return the worker for each row of the workload, from the workers of the known requests; a
        row that no worker can run gets `ANYWHERE`.
        """
        rows = self.known.rows
        spread = [ANYWHERE] * (rows[-1] + 1)
        for row, worker in zip(rows, workers, strict=True):
            spread[row] = worker
        return spread


def _check(setup: Setup, desk: _Desk) -> None:
    if setup.closed_loop:
        raise BoundError(
            "closed_loop: when requests come depends on the policy, so nothing bounds all of "
            "them; use the recorded times (open loop)"
        )
    if setup.faults is not None:
        raise BoundError("faults: bounds are of a fleet that stays as it is; leave the faults out")
    if not desk.known.jobs:
        raise BoundError("no request of the workload can run on these workers; give them more KV")


def _achieved(row: ReplayRow, name: str, bounds: Bounds) -> Achieved | None:
    ttft_ms, e2e_ms = mean_times_ms(row, bounds)
    return None if ttft_ms is None or e2e_ms is None else Achieved(name, ttft_ms, e2e_ms)


def _distance(
    desk: _Desk,
    run: _PolicyRun,
    reference: ReplayRow,
    bounds: Bounds,
    achieved: Sequence[Achieved],
    waterfall: bool,
) -> Distance:
    ttft_ms, e2e_ms = mean_times_ms(run.row, bounds)
    rr_ttft_ms, rr_e2e_ms = mean_times_ms(reference, bounds)
    fallen: tuple[Loss, ...] = ()
    if waterfall and ttft_ms is not None:
        fallen = _losses(desk, run, bounds, ttft_ms)
    return Distance(
        policy=run.name,
        completed=run.row.completed,
        ttft_ms=ttft_ms,
        e2e_ms=e2e_ms,
        gap_ttft_percent=gap_percent(ttft_ms, rr_ttft_ms, bounds.ttft_ms["mean"].value),
        gap_e2e_percent=gap_percent(e2e_ms, rr_e2e_ms, bounds.e2e_ms["mean"].value),
        regret_ttft_percent=regret_percent(
            ttft_ms, min((a.ttft_ms for a in achieved), default=None)
        ),
        regret_e2e_percent=regret_percent(e2e_ms, min((a.e2e_ms for a in achieved), default=None)),
        hits=hit_losses(desk.known, desk.machines, run.result, bounds),
        losses=fallen,
    )


def _losses(desk: _Desk, run: _PolicyRun, bounds: Bounds, as_is_ms: float) -> tuple[Loss, ...]:
    fresh = desk.attempt(run.name, fresh=True)
    fresh_ms, _ = mean_times_ms(summarize(fresh), bounds)
    if fresh_ms is None:
        return ()
    rows = list(desk.known.rows)
    decisions = Decisions(
        workers=tuple(fresh.table.worker[rows].tolist()),
        sent_ns=tuple(fresh.table.dispatched_ns[rows].tolist()),
    )
    return losses(
        desk.known,
        desk.machines,
        decisions,
        desk.network_ns,
        as_is_ms=as_is_ms,
        fresh_ms=fresh_ms,
        bound_ms=bounds.ttft_ms["mean"].value,
    )


def _notes(bounds: Bounds, distances: Sequence[Distance]) -> list[str]:
    notes = []
    if bounds.hopeless:
        notes.append(f"{bounds.hopeless} requests fit no worker and were left out of the bounds")
    for one in distances:
        if one.ttft_ms is None:
            left = bounds.requests - bounds.hopeless - one.completed
            notes.append(
                f"{one.policy}: {left} requests were not completed; who turns requests away is "
                "faster for the others, so its times are not compared"
            )
    return notes
