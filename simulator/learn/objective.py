"""How good coefficients are: latency in replays, as a ratio to what they began with."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, log

import msgspec

from simulator.report.row import ReplayRow

# What a request that was turned away or lost counts as, in seconds to its first and to its last
# token: longer than anything that would still be waited for.
LOST_S = 600.0


class Figures(msgspec.Struct, frozen=True):
    """One replay in two numbers: means over all requests, lost ones at `LOST_S`."""

    ttft_s: float
    e2e_s: float
    lost: int


def figures(row: ReplayRow | None) -> Figures:
    """Of a replay that ended; None: of one that failed, as if all of it were lost."""
    if row is None or not row.requests:
        return Figures(LOST_S, LOST_S, row.requests if row else 0)
    lost = row.requests - row.completed
    means_s = [
        ((spread.mean or 0.0) / 1e3 * row.completed + LOST_S * lost) / row.requests
        for spread in (row.ttft_ms, row.e2e_ms)
    ]
    return Figures(means_s[0], means_s[1], lost)


def score(lessons: Sequence[Sequence[Figures]], start: Sequence[Sequence[Figures]]) -> float:
    """Mean over lessons of ln(TTFT / TTFT of the start) + ln(end-to-end / that of the start).

    Both by lesson and, inside, by seed: the same replays in the same order. Lower is better; the
    start has 0. Common random numbers make the difference of two scores that of the policies.
    """
    means = [
        fsum(_ratio(one, base) for one, base in zip(found, at_start, strict=True)) / len(found)
        for found, at_start in zip(lessons, start, strict=True)
    ]
    return fsum(means) / len(means)


def _ratio(one: Figures, base: Figures) -> float:
    return log(one.ttft_s / base.ttft_s) + log(one.e2e_s / base.e2e_s)
