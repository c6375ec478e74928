"""All workers as one machine that can stop any request at any time: nobody schedules better.

Work a request needs on some worker (`work.py`) it needs here too, and N workers do no more than
one machine of N times the speed, so what is optimal here bounds every policy. `releases` are in
order, `works` in the same unit, the machine's speed divided out.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import fsum, inf

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def srpt_mean_flow(releases: Sequence[float], works: Sequence[float]) -> float:
    """Least mean time from release to completion: shortest remaining work first.

    Optimal for one preemptive machine (Schrage, 1968). 0 without requests.
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
    """When each request is done, first come first served.

    The longest flow is the least possible, and the last completion is that of any schedule that
    never idles while there is work.
    """
    now = -inf
    ends: list[float] = []
    for release, work in zip(releases, works, strict=True):
        now = max(now, release) + work
        ends.append(now)
    return ends


def most_on_time(releases: Sequence[float], works: Sequence[float], limit: float) -> int:
    """Most requests that can be done within `limit` of their release, the others dropped.

    Deadlines come in the order of releases, so first come first served is the best order for any
    choice, and stopping requests is of no use. Requests are taken in turn; when one would be
    late, the one whose removal brings the end forward most is dropped (Kise, Ibaraki and Mine,
    "A solvable case of the one-machine scheduling problem with ready and due times", 1978).
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
    """Leave out the one of a busy period that brings its end forward most: the end then."""
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
