"""The outcome of each request as its client saw it, and the results of a run in one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from simulator.live.scrape import WorkerCounters


class LiveVerdict(StrEnum):
    """The way in which a live request ended."""

    COMPLETED = "completed"  # 200 and the whole answer
    REJECTED = "rejected"  # asked to try again later: 429 or 503
    FAILED = "failed"  # anything else: to the client it is lost


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request; times are of the wall clock. Lifetime: measurement."""

    serial: int
    scheduled_s: float  # when it was due, seconds from the start of the run
    sent_s: float  # when it was sent; the difference is the generator's delay
    verdict: LiveVerdict
    status: int  # HTTP status, 0 when no answer came
    worker: str | None  # the router's `x-warmroute-worker`
    e2e_ms: float  # from `scheduled_s` to the last byte
    prompt_tokens: int
    output_tokens: int = 0
    ttft_ms: float | None = None  # from `scheduled_s` to the first token
    itl_ms: float | None = None  # mean gap between tokens
    itl_max_ms: float | None = None  # longest gap between two arrivals of tokens
    cached_tokens: int | None = None  # as the worker's usage says
    error: str | None = None
    turn: int | None = None  # of its session, from 0; None: an open loop, where nobody counts

    @property
    def late_ms(self) -> float:
        """Milliseconds by which the load generator sent the request too late."""
        return max(0.0, (self.sent_s - self.scheduled_s) * 1000)


class TimeSpread(msgspec.Struct, frozen=True):
    """Mean and quantiles of a time in ms; null if nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


NO_SPREAD = TimeSpread(None, None, None, None)
GOOD_TTFT_MS = 2_000.0
GOOD_GAP_MS = 50.0


class ResultRow(msgspec.Struct, frozen=True):
    """The results of one policy on one workload, as report.json has them."""

    policy: str
    workload: str
    requests: int
    completed: int
    rejected: int
    failed: int
    workers: tuple[str, ...]  # names, in the order of the two columns per worker
    requests_per_worker: tuple[int, ...]
    load_skew: float | None  # max / mean of requests per worker
    ttft_ms: TimeSpread
    itl_ms: TimeSpread
    e2e_ms: TimeSpread
    output_tokens_per_s: float
    hit_rate_tokens: float | None
    overrun_steps_share: float | None
    busy_share_per_worker: tuple[float, ...]
    generator_late_ms: TimeSpread
    speed: float  # of the timed workers: model seconds per wall second
    duration_s: float  # model time from the first arrival due to the last answer
    # Completed with the first token within GOOD_TTFT_MS and a mean gap within GOOD_GAP_MS, of all.
    good_share: float | None = None
    # In a closed loop: requests that begin a session, and those that continue one.
    new_ttft_ms: TimeSpread = NO_SPREAD
    continuation_ttft_ms: TimeSpread = NO_SPREAD


def spread(values: Sequence[float]) -> TimeSpread:
    """Return mean and quantiles (linear interpolation) of `values`."""
    if not values:
        return NO_SPREAD
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return TimeSpread(*(round(float(v), 3) for v in (np.mean(values), p50, p90, p99)))


def summarize(
    policy: str,
    workload: str,
    outcomes: Sequence[Outcome],
    workers: Sequence[str] = (),
    before: Sequence[WorkerCounters] = (),
    after: Sequence[WorkerCounters] = (),
    speed: float = 1.0,
) -> ResultRow:
    """Return the row of results of one run.

    `workers` has the names of all workers, as the outcomes have them, also of those that got no
    request. `before` and `after` have the workers' counters before and after the run, in the same
    order; both are empty for endpoints without counters.
    """
    done = [o for o in outcomes if o.verdict is LiveVerdict.COMPLETED]
    verdicts = Counter(o.verdict for o in outcomes)
    per_worker = dict.fromkeys(workers, 0)
    for outcome in outcomes:
        if outcome.worker is not None:
            per_worker[outcome.worker] = per_worker.get(outcome.worker, 0) + 1
    end_s = max((o.scheduled_s + o.e2e_ms / 1000 for o in outcomes), default=0.0)
    start_s = min((o.scheduled_s for o in outcomes), default=0.0)
    wall_s = end_s - start_s
    return ResultRow(
        policy=policy,
        workload=workload,
        requests=len(outcomes),
        completed=verdicts[LiveVerdict.COMPLETED],
        rejected=verdicts[LiveVerdict.REJECTED],
        failed=verdicts[LiveVerdict.FAILED],
        workers=tuple(per_worker),
        requests_per_worker=tuple(per_worker.values()),
        load_skew=_skew(tuple(per_worker.values())),
        ttft_ms=_ttft(done, speed),
        itl_ms=spread([o.itl_ms * speed for o in done if o.itl_ms is not None]),
        e2e_ms=spread([o.e2e_ms * speed for o in done]),
        output_tokens_per_s=_rounded(_ratio(sum(o.output_tokens for o in done), wall_s * speed), 1)
        or 0.0,
        hit_rate_tokens=_counted_share(before, after, "hit_tokens", "query_tokens"),
        overrun_steps_share=_counted_share(before, after, "overrun_steps", "steps"),
        busy_share_per_worker=_busy(before, after, wall_s),
        generator_late_ms=spread([o.late_ms * speed for o in outcomes]),
        speed=speed,
        duration_s=round(wall_s * speed, 3),
        good_share=_rounded(_ratio(sum(_good(o, speed) for o in done), len(outcomes)), 4),
        new_ttft_ms=_ttft([o for o in done if o.turn == 0], speed),
        continuation_ttft_ms=_ttft([o for o in done if o.turn], speed),
    )


def _ttft(done: Sequence[Outcome], speed: float) -> TimeSpread:
    return spread([o.ttft_ms * speed for o in done if o.ttft_ms is not None])


def _good(outcome: Outcome, speed: float) -> bool:
    ttft_ms, gap_ms = outcome.ttft_ms, outcome.itl_ms or 0.0
    return ttft_ms is not None and (
        ttft_ms * speed <= GOOD_TTFT_MS and gap_ms * speed <= GOOD_GAP_MS
    )


def hot_share(row: ResultRow) -> float:
    """Return the share of all requests that the busiest worker got."""
    counts = row.requests_per_worker
    return max(counts, default=0) / max(1, sum(counts))


def as_report(rows: Sequence[ResultRow], **about: Any) -> bytes:
    """Return the contents of report.json: the rows under the key `results`, and the items of
    `about` as further keys.
    """
    encoded = msgspec.json.encode({"results": list(rows), **about})
    return msgspec.json.format(encoded, indent=1)


def _skew(counts: Sequence[int]) -> float | None:
    return _rounded(_ratio(max(counts, default=0) * len(counts), sum(counts)), 4)


def _counted_share(
    before: Sequence[WorkerCounters], after: Sequence[WorkerCounters], part: str, whole: str
) -> float | None:
    def grown(name: str) -> float:
        last = [float(getattr(counters, name)) for counters in after]
        return sum(last) - sum(float(getattr(counters, name)) for counters in before)

    return _rounded(_ratio(grown(part), grown(whole)), 5)


def _busy(
    before: Sequence[WorkerCounters], after: Sequence[WorkerCounters], wall_s: float
) -> tuple[float, ...]:
    return tuple(
        _rounded(_ratio(last.busy_s - first.busy_s, wall_s), 4) or 0.0
        for first, last in zip(before, after, strict=True)
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
