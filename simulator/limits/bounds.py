"""Bounds that no policy can beat: for one workload and one fleet, the bound of every metric and its
derivation.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import fsum, inf

import msgspec
import numpy as np
import numpy.typing as npt

from simulator.limits.work import (
    Known,
    Machine,
    decode_works_s,
    first_token_ns,
    further_tokens_ns,
    prefill_works_s,
    reuse_ceiling_tokens,
)
from simulator.replay.setup import Goodput
from simulator.report.row import spread

NEVER_AGAIN = (1 << 62) - 1


def most_hits(requests: Sequence[Sequence[int]], reusable: Sequence[int], capacity: int) -> int:
    """Return the most block hits that any cache has when `requests` are served in order.

    `requests` are lists of ids, each once in a request. Only the first `reusable` ids of a request
    can be hits; all its ids can be kept afterwards. `capacity` blocks, at least 1, are kept from
    one request to the next. Keeping a block for its next hit occupies one place during all gaps
    between requests until then; the most such intervals are wanted with at most `capacity` in each
    gap. Taking them as they come, and dropping the one that ends last if there are too many, is
    optimal (Belady, 1966, for pages; Carlisle and Lloyd, 1995, for intervals). Blocks count one by
    one here, while a real cache has only whole prefixes to offer: one more reason why this is a
    bound. It also bounds a pool of caches with `capacity` in all: a hit in one is a hit in their
    union.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1 block, got {capacity}")
    nexts = _next_hits(requests, reusable)
    kept: dict[int, int] = {}  # id -> request that hits it next
    latest: list[tuple[int, int]] = []  # (-next hit, id), stale entries included
    found = 0
    for serial, (ids, usable) in enumerate(zip(requests, reusable, strict=True)):
        for depth, (block, next_hit) in enumerate(zip(ids, nexts[serial], strict=True)):
            due = kept.get(block)
            if due == serial and depth < usable:
                found += 1
            if next_hit == NEVER_AGAIN:
                kept.pop(block, None)
            else:
                kept[block] = next_hit
                heappush(latest, (-next_hit, block))
        while len(kept) > capacity:
            negative, block = heappop(latest)
            if kept.get(block) == -negative:
                del kept[block]
    return found


def _next_hits(requests: Sequence[Sequence[int]], reusable: Sequence[int]) -> list[array[int]]:
    """For each id of each request, return the next request that has it, if it can be a hit there.

    If it cannot, that request stores the block again, and keeping it until then is of no use.
    """
    coming: dict[int, int] = {}
    nexts: list[array[int]] = []
    for serial in range(len(requests) - 1, -1, -1):
        ids = requests[serial]
        nexts.append(array("q", [coming.get(block, NEVER_AGAIN) for block in ids]))
        for depth, block in enumerate(ids):
            coming[block] = serial if depth < reusable[serial] else NEVER_AGAIN
    nexts.reverse()
    return nexts


Floats = npt.NDArray[np.float64]


def srpt_mean_flow(releases: Sequence[float], works: Sequence[float]) -> float:
    """Return the least mean time from release to completion: shortest remaining work first.

    This is optimal for one preemptive machine (Schrage, 1968). The result is 0 without requests.
    """
    if not releases:
        return 0.0
    flows: list[float] = []
    waiting: list[tuple[float, int]] = []  # (remaining work, serial)
    for serial, (release, following) in enumerate(pairwise([*releases, inf])):
        heappush(waiting, (works[serial], serial))
        now = release
        while waiting and now < following:
            left, first = heappop(waiting)
            if now + left > following:
                heappush(waiting, (left - (following - now), first))
                break
            now += left
            flows.append(now - releases[first])
    return fsum(flows) / len(flows)


def fcfs_completions(releases: Sequence[float], works: Sequence[float]) -> list[float]:
    """Return the time at which each request is done, first come first served. The longest flow time
    is the least possible, and the last completion is at the same time in every order that never
    idles while there is work.
    """
    now = -inf
    ends: list[float] = []
    for release, work in zip(releases, works, strict=True):
        now = max(now, release) + work
        ends.append(now)
    return ends


def most_on_time(releases: Sequence[float], works: Sequence[float], limit: float) -> int:
    """Return the most requests that can be done within `limit` of their release, if the others are
    dropped.

    Deadlines come in the order of releases, so first come first served is the best order for any
    choice, and preemption does not help. Requests are taken in turn; when one would be late, the
    one whose removal brings the end forward most is dropped (Kise, Ibaraki and Mine, "A solvable
    case of the one-machine scheduling problem with ready and due times", 1978).
    """
    kept = 0
    # The busy period so far, a column a request: start, release, work.
    period = np.zeros((3, 64))
    size, end = 0, -inf
    for release, work in zip(releases, works, strict=True):
        if work > limit:
            continue
        if release >= end:
            kept += size
            size = 0
        if size == period.shape[1]:
            period = np.concatenate((period, np.zeros_like(period)), axis=1)
        start = max(release, end)
        period[:, size] = start, release, work
        end = start + work
        size += 1
        if end > release + limit:
            size -= 1
            end = _drop(period[:, : size + 1])
    return kept + size


def _drop(period: Floats) -> float:
    """Drop the request of a busy period that brings its end forward most, and return the
    new end.
    """
    starts, frees, works = period
    slack = starts - frees  # how much earlier each could start
    # Leaving out one moves those behind it by its work, or by the least slack of them.
    least = np.minimum.accumulate(slack[::-1])[::-1]
    drop = int(np.argmax(np.minimum(works, np.append(least[1:], inf))))
    period[:, drop:-1] = period[:, drop + 1 :].copy()
    end = starts[drop - 1] + works[drop - 1] if drop else -inf
    for place in range(drop, len(starts) - 1):
        moved = max(frees[place], end)
        if moved == starts[place]:
            break
        starts[place] = moved
        end = moved + works[place]
    size = len(starts) - 1
    return float(starts[size - 1] + works[size - 1]) if size else -inf


FLOOR, POOLED, BOTH = "idle worker", "pooled workers", "pooled prefill + idle decode"
DIGITS = 3  # of milliseconds; bounds are rounded away from where they could be wrong


class ProvenBound(msgspec.Struct, frozen=True):
    """A value that no replay beats, and the relaxation that proves it."""

    value: float
    source: str


class Bounds(msgspec.Struct, frozen=True):
    """The bounds for one workload on one fleet; times are in ms unless their names say otherwise.

    Lower bounds: `ttft_ms`, `e2e_ms` (keys mean, p50, p90, p95, p99, max) and `makespan_s`. They
    hold for runs that complete every request; turning some away makes the others faster. Upper
    bounds: `goodput_share` and `hit_rate_tokens`, which hold for every run. `belady_hit_rate` is
    the most that caches with the fleet's memory could give if requests were served in order of
    arrival; a run that reorders a burst may exceed it by a little.
    """

    requests: int
    hopeless: int  # left out: no worker can run them
    ttft_ms: dict[str, ProvenBound]
    e2e_ms: dict[str, ProvenBound]
    makespan_s: ProvenBound
    goodput_share: ProvenBound
    hit_rate_tokens: ProvenBound
    belady_hit_rate: float


@dataclass(frozen=True, slots=True)
class _Times:
    """Times of each request, in seconds and nanoseconds, for each way to divide the time of steps
    among tokens.
    """

    floor_ttft_ns: list[int]
    floor_e2e_ns: list[int]
    floor_tpot_ns: list[int]  # 0 for answers of one token
    releases_s: list[float]
    prefill_s: list[list[float]]  # the pool's speed divided out
    whole_s: list[list[float]]


def lower_bounds(
    known: Known, machines: Sequence[Machine], network_ns: int, goodput: Goodput
) -> Bounds:
    """Return all bounds of a workload on a fleet. `network_ns` is the time from router to worker,
    which applies again to the way back. Raises ValueError for a workload without a request that can
    run.
    """
    if not known.jobs:
        raise ValueError("no request of the workload can run on these workers: nothing to bound")
    times = _times(known, machines, network_ns)
    way_s = 2 * network_ns / 1e9
    ttft_ms = _flows(times.floor_ttft_ns, times, times.prefill_s, way_s)
    e2e_ms = _flows(times.floor_e2e_ns, times, times.whole_s, way_s)
    further_ms = _mean_ms(times.floor_e2e_ns) - _mean_ms(times.floor_ttft_ns)
    both_ms = _down(ttft_ms["mean"].value + further_ms)
    if both_ms > e2e_ms["mean"].value:
        e2e_ms["mean"] = ProvenBound(both_ms, BOTH)
    ceiling = reuse_ceiling_tokens(known) / known.prompt_tokens
    blocks = sum(machine.count * machine.blocks for machine in machines)
    found = most_hits([c.tolist() for c in known.chains], known.reusable_blocks, blocks)
    return Bounds(
        requests=len(known) + known.hopeless,
        hopeless=known.hopeless,
        ttft_ms=ttft_ms,
        e2e_ms=e2e_ms,
        makespan_s=_makespan(known, times, way_s),
        goodput_share=_goodput(known, times, way_s, goodput),
        hit_rate_tokens=ProvenBound(ceiling, "one cache without limit, any order"),
        belady_hit_rate=found * known.block_size / known.prompt_tokens,
    )


def _times(known: Known, machines: Sequence[Machine], network_ns: int) -> _Times:
    speed = sum(machine.count * machine.speed for machine in machines)
    prefill_s = prefill_works_s(machines, known)
    decode_s = decode_works_s(machines, known)
    ttft_ns, e2e_ns, tpot_ns = [], [], []
    for job, shared in zip(known.jobs, known.shared_tokens, strict=True):
        able = [machine for machine in machines if machine.takes(job.prompt_tokens)]
        first = [first_token_ns(m, job.prompt_tokens, shared) for m in able]
        further = [further_tokens_ns(m, job.prompt_tokens, job.output_tokens) for m in able]
        ttft_ns.append(min(first) + 2 * network_ns)
        e2e_ns.append(min(map(sum, zip(first, further, strict=True))) + 2 * network_ns)
        tpot_ns.append(min(further) // max(1, job.output_tokens - 1))
    return _Times(
        floor_ttft_ns=ttft_ns,
        floor_e2e_ns=e2e_ns,
        floor_tpot_ns=tpot_ns,
        releases_s=[job.at_ns / 1e9 for job in known.jobs],
        prefill_s=[[work / speed for work in works] for works in prefill_s],
        whole_s=[
            [(before + after) / speed for before, after in zip(*works, strict=True)]
            for works in zip(prefill_s, decode_s, strict=True)
        ],
    )


def _flows(
    floor_ns: list[int], times: _Times, works: list[list[float]], way_s: float
) -> dict[str, ProvenBound]:
    """Return bounds of the mean and the maximum, each the better one of two relaxations, and bounds
    of quantiles from single requests. Every request takes at least its own minimum, so every order
    statistic does, too.
    """
    floors = msgspec.structs.asdict(spread(np.array(floor_ns, dtype=np.int64)))
    bounds = {name: ProvenBound(value, FLOOR) for name, value in floors.items()}
    mean_s = max(srpt_mean_flow(times.releases_s, work_s) for work_s in works) + way_s
    max_s = max(
        end - release
        for work_s in works
        for end, release in zip(
            fcfs_completions(times.releases_s, work_s), times.releases_s, strict=True
        )
    )
    for name, pooled_ms in (("mean", _down(1e3 * mean_s)), ("max", _down(1e3 * (max_s + way_s)))):
        if pooled_ms > bounds[name].value:
            bounds[name] = ProvenBound(pooled_ms, POOLED)
    return bounds


def _makespan(known: Known, times: _Times, way_s: float) -> ProvenBound:
    """Return a bound of the time from the first arrival to the last token: the work that arrives
    after any instant takes its time.
    """
    first_s = times.releases_s[0]
    pooled_s = max(fcfs_completions(times.releases_s, w)[-1] for w in times.whole_s) + way_s
    solo_s = max(
        (job.at_ns + floor) / 1e9 for job, floor in zip(known.jobs, times.floor_e2e_ns, strict=True)
    )
    value, source = max((pooled_s, POOLED), (solo_s, FLOOR))
    return ProvenBound(_down(value - first_s), source)


def _goodput(known: Known, times: _Times, way_s: float, goodput: Goodput) -> ProvenBound:
    """Return an upper bound of the share of good requests: the number of those that could be good
    alone and that the workers together can prefill in time.
    """
    limit_s = goodput.ttft_ms / 1e3
    able = [
        n
        for n, (ttft, tpot) in enumerate(zip(times.floor_ttft_ns, times.floor_tpot_ns, strict=True))
        if ttft <= goodput.ttft_ms * 1e6 and tpot <= goodput.tpot_ms * 1e6
    ]
    releases_s = [times.releases_s[n] for n in able]
    on_time = min(
        most_on_time(releases_s, [work_s[n] for n in able], limit_s - way_s + 1e-9)
        for work_s in times.prefill_s
    )
    source = FLOOR if on_time == len(able) else POOLED
    return ProvenBound(on_time / (len(known) + known.hopeless), source)


def _mean_ms(times_ns: Sequence[int]) -> float:
    return fsum(times_ns) / len(times_ns) / 1e6


def _down(value: float) -> float:
    """Return the value rounded to a report's digits, but never above itself."""
    return float(round(value - 0.5 * 10.0**-DIGITS, DIGITS))
