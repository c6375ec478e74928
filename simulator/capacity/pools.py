"""The best numbers of workers of each role for a number of GPUs, and replays that try them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from policies.facts import Role
from router.core.contract.settings import DisaggregationMode
from simulator.capacity.rates import (
    HIGHEST_LOAD,
    Link,
    Mix,
    Rate,
    Shape,
    WaitTargets,
    aggregated,
    decode,
    load_within,
    prefill,
    service,
    step_s,
)
from simulator.replay.result import Verdict
from simulator.replay.run import replay
from simulator.replay.setup import RouterSettings, Setup, WorkerGroup, World
from simulator.report.plots import line_plot
from simulator.traces.spec import WorkloadSpec

MAX_GPUS = 4096
SPLIT, ALIKE = "prefill + decode", "all workers alike"
SLOWEST_S = 0.2  # time per token at which a front ends
_APART = 1.005  # points of a front


@dataclass(frozen=True, slots=True)
class Part:
    """The workers of one role in a pool. Lifetime: process."""

    role: str  # prefill, decode, both
    shape: Shape
    workers: float  # a whole number, unless only the ratio was asked for
    each: Rate

    @property
    def gpus(self) -> float:
        """The number of GPUs of all workers of this role."""
        return self.workers * self.shape.gpus


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """A pool of workers, and the rate of requests that it can serve. Lifetime: process."""

    parts: tuple[Part, ...]
    requests_per_s: float
    limited_by: str
    tpot_s: float
    ttft_s: float

    @property
    def gpus(self) -> float:
        """The number of GPUs of all workers of the pool."""
        return sum(part.gpus for part in self.parts)

    @property
    def per_gpu(self) -> float:
        """The requests per second of the pool, divided by its GPUs."""
        return self.requests_per_s / self.gpus

    def workers(self, role: str) -> float:
        """Return the number of workers with this role."""
        return sum(part.workers for part in self.parts if part.role == role)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The kinds of workers that each role may consist of. Lifetime: process. If `both` is empty, no
    pool of workers that do whole requests is computed.
    """

    prefill: tuple[Shape, ...]
    decode: tuple[Shape, ...]
    both: tuple[Shape, ...]


def ratio(mix: Mix, p: Shape, d: Shape, targets: WaitTargets, link: Link) -> WorkerPool | None:
    """Return a pool whose roles match: n_P : n_D = R_D : R_P, with one decode worker.

    Return None if no pool can keep the targets.
    """
    decoding = decode(d, mix, targets, link)
    if not decoding.requests_per_s:
        return None
    prefilling = prefill(p, mix, targets, link, decode_step_s=decoding.step_s)
    if not prefilling.requests_per_s:
        return None
    n_p = decoding.requests_per_s / prefilling.requests_per_s
    parts = (Part("prefill", p, n_p, prefilling), Part("decode", d, 1.0, decoding))
    limit = decoding.limited_by if prefilling.limited_by == "prefill" else prefilling.limited_by
    return WorkerPool(
        parts, decoding.requests_per_s, limit, decoding.step_s or targets.tpot_s, prefilling.ttft_s
    )


def split(
    mix: Mix, p: Shape, d: Shape, targets: WaitTargets, link: Link, gpus: int
) -> WorkerPool | None:
    """Return the pool of prefill and decode workers that serves most of the mix on `gpus` GPUs.

    It maximizes min(n_P R_P, n_D R_D) over whole numbers. R_P depends on n_P, because several
    workers behind one queue can carry more load each for the same TTFT. Return None if no pool can
    keep the targets, or there are too few GPUs for both roles.
    """
    decoding = decode(d, mix, targets, link)
    most = (gpus - d.gpus) // p.gpus
    if not decoding.requests_per_s or most < 1:
        return None
    n_p = np.arange(1, most + 1)
    n_d = (gpus - n_p * p.gpus) // d.gpus
    of = service(p.step_time, mix)
    idle = prefill(p, mix, targets, link, decode_step_s=decoding.step_s, load=0.0)
    loads = load_within(of, targets.ttft_s - idle.ttft_s, n_p)
    each = np.minimum(loads / of.mean_s, link.rate(mix.moved * p.kv_bytes_per_token, p.gpus))
    rates = np.minimum(n_p * each, n_d * decoding.requests_per_s)
    best = int(np.argmax(np.round(rates, 9)))  # of equals the one with fewer that prefill
    if not rates[best]:
        return None
    workers = int(n_p[best])
    prefilling = prefill(
        p, mix, targets, link, workers=workers, load=float(loads[best]),
        decode_step_s=decoding.step_s,
    )  # fmt: skip
    lacks_p = n_p[best] * each[best] < n_d[best] * decoding.requests_per_s
    limit = prefilling.limited_by if lacks_p else decoding.limited_by
    if lacks_p and limit == "prefill" and loads[best] < HIGHEST_LOAD:
        limit = "TTFT"
    parts = (
        Part("prefill", p, workers, prefilling),
        Part("decode", d, int(n_d[best]), decoding),
    )
    return WorkerPool(parts, float(rates[best]), limit, decoding.step_s, prefilling.ttft_s)


def alone(mix: Mix, both: Shape, targets: WaitTargets, gpus: int | None) -> WorkerPool | None:
    """Return the pool of workers that do whole requests on `gpus` GPUs; if `gpus` is None, the pool
    has one worker.
    """
    each = aggregated(both, mix, targets)
    workers = 1 if gpus is None else gpus // both.gpus
    if not each.requests_per_s or not workers:
        return None
    return WorkerPool(
        (Part("both", both, workers, each),),
        workers * each.requests_per_s,
        each.limited_by,
        each.step_s,
        each.ttft_s,
    )


@dataclass(frozen=True, slots=True)
class Match:
    """The best pool of each kind: workers with separate roles, workers that do both, and a mixture.
    A pool that cannot keep the targets is None. Lifetime: process.
    """

    split: WorkerPool | None
    alone: WorkerPool | None
    mixed: WorkerPool | None  # some workers of each role, some that do both

    @property
    def best(self) -> WorkerPool | None:
        """The pool that serves the most requests per second."""
        found = [pool for pool in (self.alone, self.split, self.mixed) if pool is not None]
        return max(found, key=lambda pool: round(pool.requests_per_s, 9), default=None)


def match(mix: Mix, shapes: Shapes, targets: WaitTargets, link: Link, gpus: int | None) -> Match:
    """Return the best pools of all shapes on `gpus` GPUs. If `gpus` is None, a pool may have any
    size, and pools are compared by their rate for each GPU.
    """
    pairs = [(p, d) for p in shapes.prefill for d in shapes.decode]
    if gpus is None:
        ratios = (ratio(mix, p, d, targets, link) for p, d in pairs)
        alones = (alone(mix, both, targets, None) for both in shapes.both)
        return Match(_per_gpu(ratios), _per_gpu(alones), None)
    if not 1 <= gpus <= MAX_GPUS:
        raise ValueError(f"GPUs must be 1 to {MAX_GPUS}, got {gpus}")
    splits = [split(mix, p, d, targets, link, gpus) for p, d in pairs]
    best_split = _most(splits)
    best_alone = _most(alone(mix, both, targets, gpus) for both in shapes.both)
    return Match(best_split, best_alone, _mixed(mix, best_split, best_alone, targets, link, gpus))


def _mixed(
    mix: Mix,
    halves: WorkerPool | None,
    whole: WorkerPool | None,
    targets: WaitTargets,
    link: Link,
    gpus: int,
) -> WorkerPool | None:
    """Return the best pool that has workers of separate roles as well as workers that do both.

    Their shapes are those that are best in pools of one kind. Such a mixture is better than both
    other pools only by using GPUs that whole numbers of workers leave over there.
    """
    if halves is None or whole is None:
        return None
    p, d, both = halves.parts[0].shape, halves.parts[1].shape, whole.parts[0]
    best: WorkerPool | None = None
    for workers in range(1, gpus // both.shape.gpus):
        rest = split(mix, p, d, targets, link, gpus - workers * both.shape.gpus)
        if rest is None:
            break
        rate = rest.requests_per_s + workers * both.each.requests_per_s
        if best is None or rate > best.requests_per_s:
            parts = (*rest.parts, replace(both, workers=workers))
            ttft_s = max(rest.ttft_s, whole.ttft_s)
            tpot_s = max(rest.tpot_s, whole.tpot_s)
            best = WorkerPool(parts, rate, rest.limited_by, tpot_s, ttft_s)
    return best


def _most(pools: Iterable[WorkerPool | None]) -> WorkerPool | None:
    found = [pool for pool in pools if pool is not None]
    return max(found, key=lambda pool: (round(pool.requests_per_s, 9), -pool.gpus), default=None)


def _per_gpu(pools: Iterable[WorkerPool | None]) -> WorkerPool | None:
    found = [pool for pool in pools if pool is not None]
    return max(found, key=lambda pool: pool.per_gpu, default=None)


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A pool that no other pool beats in throughput and speed. Lifetime: process."""

    kind: str  # split, aggregated
    targets: WaitTargets
    pool: WorkerPool
    per_user: float  # tokens per second of one answer
    per_gpu: float  # output tokens per second


def speeds(shapes: Shapes, points: int) -> list[float]:
    """Return values of the time per output token, each larger than the previous one by the same
    factor, from the shortest possible step of any worker on.
    """
    floor_s = min(
        float(step_s(one.step_time, 1.0, 1.0, 0.0, 0.0)) for one in (*shapes.decode, *shapes.both)
    )
    return [float(f"{one:.4g}") for one in np.geomspace(floor_s * 1.02, SLOWEST_S, points)]


def pareto(
    mix: Mix,
    shapes: Shapes,
    tpots_s: Sequence[float],
    targets: WaitTargets,
    link: Link,
    gpus: int | None,
) -> tuple[list[FrontPoint], list[FrontPoint]]:
    """Return two fronts of throughput for each GPU against speed, ordered by speed: of pools with
    separate roles, and of workers that do both. Each of `tpots_s` takes the place of
    `targets.tpot_s` in turn.
    """
    found: dict[str, list[FrontPoint]] = {"split": [], "aggregated": []}
    for tpot_s in tpots_s:
        asked = replace(targets, tpot_s=tpot_s)
        best = match(mix, shapes, asked, link, gpus)
        for kind, pool in (("split", best.split), ("aggregated", best.alone)):
            if pool is not None:
                rate = pool.requests_per_s / (pool.gpus if gpus is None else gpus)
                point = FrontPoint(kind, asked, pool, 1.0 / pool.tpot_s, mix.output * rate)
                found[kind].append(point)
    return _front(found["split"]), _front(found["aggregated"])


def _front(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """Return the points that no other point reaches in both figures, slowest first; near-equal
    points count once.
    """
    kept: list[FrontPoint] = []
    for point in sorted(points, key=lambda point: (-point.per_user, -point.per_gpu)):
        if not kept or point.per_gpu > kept[-1].per_gpu * _APART:
            kept.append(point)
    return kept[::-1]


def gain(split: Sequence[FrontPoint], alike: Sequence[FrontPoint]) -> Iterator[str]:
    """Yield a line on the factor by which the front of pools with separate roles is above the other
    front at equal speed.
    """
    if not split or not alike:
        return
    speeds = [one.per_user for one in alike]
    gains = [
        (one.per_gpu / float(np.interp(one.per_user, speeds, [a.per_gpu for a in alike])), one)
        for one in split
        if speeds[0] <= one.per_user <= speeds[-1]
    ]
    if gains:
        (low, _), (high, at) = min(gains, key=lambda g: g[0]), max(gains, key=lambda g: g[0])
        yield (
            f"At equal speed prefill + decode gives {low:.2f} to {high:.2f} times the tokens per "
            f"GPU; most at {at.per_user:.0f} tokens/s of a user."
        )
    if split[-1].per_user > speeds[-1] * 1.01:
        yield f"Above {speeds[-1]:.0f} tokens/s of a user there is prefill + decode only."


def drawn(split: Sequence[FrontPoint], alike: Sequence[FrontPoint]) -> str:
    """Return a plot of both fronts (SVG)."""
    lines = {
        name: ([one.per_user for one in own], [one.per_gpu for one in own])
        for name, own in ((SPLIT, split), (ALIKE, alike))
        if own
    }
    return line_plot(
        lines, "tokens/s of one user", "output tokens/s and GPU", points=True, ylim=(0, None)
    )


# Targets are of means; a single request may exceed them by this factor and still be good.
TTFT_MARGIN, TPOT_MARGIN = 1.5, 1.1
RATE_SHARE = 0.95  # share of the computed rate at which replays try pools
_POLICY = "hybrid"


@dataclass(frozen=True, slots=True)
class PoolTrial:
    """The results of one replay of a pool. Lifetime: process."""

    prefill_workers: int  # 0: all workers do both
    other_workers: int
    rate_per_s: float
    ttft_s: float  # means
    tpot_s: float
    good_share: float  # of all requests
    cached_share: float  # of prompt tokens
    split_share: float  # of requests: prefilled by one worker, decoded by another


def trial(
    workload: WorkloadSpec,
    parts: Sequence[tuple[Role, str, int]],
    targets: WaitTargets,
    link: Link,
    *,
    block_size: int | None = None,
    kv_tokens: int | None = None,
    disaggregation: DisaggregationMode = "auto",
    seed: int = 0,
) -> PoolTrial:
    """Replay `workload` on workers given as (role, profile, number). Raises ReplayError or
    TraceError.
    """
    groups = tuple(
        WorkerGroup(count, name, kv_tokens, role=role) for role, name, count in parts if count
    )
    result = replay(
        Setup(
            workload,
            _POLICY,
            groups,
            block_size=block_size,
            seed=seed,
            world=World(link_gbps=link.gbps, link_setup_ms=link.setup_s * 1e3),
            router=RouterSettings(disaggregation=disaggregation),
        )
    )
    table = result.table
    done = table.verdict == Verdict.COMPLETED
    ttft_s = (table.first_token_ns - table.arrival_ns)[done] / 1e9
    later = np.maximum(table.output_tokens[done] - 1, 1)
    tpot_s = (table.finish_ns - table.first_token_ns)[done] / 1e9 / later
    good = (ttft_s <= TTFT_MARGIN * targets.ttft_s) & (tpot_s <= TPOT_MARGIN * targets.tpot_s)
    hits = np.maximum(table.hit_tokens[done], 0).sum() / max(1, table.prompt_tokens[done].sum())
    count = {role: number for role, _name, number in parts}
    return PoolTrial(
        prefill_workers=count.get("prefill", 0),
        other_workers=count.get("decode", 0) + count.get("both", 0),
        rate_per_s=len(table) / max(result.simulated_ns / 1e9, 1e-9),
        ttft_s=float(np.mean(ttft_s)) if len(ttft_s) else math.inf,
        tpot_s=float(np.mean(tpot_s)) if len(tpot_s) else math.inf,
        good_share=float(np.count_nonzero(good)) / max(1, len(table)),
        cached_share=float(hits),
        split_share=result.split_requests / max(1, len(table)),
    )


def climb(start: int, most: int, try_number: Callable[[int], PoolTrial]) -> list[PoolTrial]:
    """Return trials of different numbers of prefill workers, ordered by that number. The search
    begins at `start` and goes to either side as long as more requests are good, or equally many
    with a shorter TTFT.
    """
    found: dict[int, PoolTrial] = {}

    def value(number: int) -> tuple[float, float]:
        if number not in found:
            found[number] = try_number(number)
        return round(found[number].good_share, 3), -found[number].ttft_s

    best, better = start, True
    while better:
        near = [best + step for step in (-1, 1, -2, 2) if 1 <= best + step <= most]
        ahead = max(near, key=value, default=best)
        better = value(ahead) > value(best)
        best = ahead if better else best
    return [found[number] for number in sorted(found)]
