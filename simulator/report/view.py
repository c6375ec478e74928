"""What a page draws of one replay: curves and samples, of bounded size whatever was replayed.

A table of a million requests becomes three curves here, so that many results can be dropped one by
one before the page is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.replay.result import I64, HotPrefix, ReplayResult, Samples, Verdict
from simulator.report.row import ReplayRow, summarize, tpots_ns
from simulator.report.spread import NS_PER_MS

CURVE_POINTS = 201

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Mean of completed requests, ms: how long each was where."""

    router_ms: float  # from the arrival to the dispatch that was answered
    prefill_ms: float  # then to the first token: network, queue, prefill
    decode_ms: float  # then to the last token


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Prompt tokens of admitted requests on all workers."""

    cached: int
    computed: int
    recomputed: int  # once more, after a preemption


@dataclass(frozen=True, slots=True)
class RunView:
    """Lifetime: process."""

    row: ReplayRow
    ttft_ms: Floats  # quantiles at evenly spaced shares from 0 to 1; empty where none was measured
    tpot_ms: Floats
    e2e_ms: Floats
    samples: Samples
    hot: tuple[HotPrefix, ...]
    time: TimeSplit | None  # None: nothing was completed
    tokens: TokenSplit
    notes: tuple[str, ...]


def view(result: ReplayResult) -> RunView:
    """The view of one result; keeps nothing of its table."""
    table = result.table
    done = table.verdict == Verdict.COMPLETED
    arrival, sent = table.arrival_ns[done], table.dispatched_ns[done]
    first, finish = table.first_token_ns[done], table.finish_ns[done]
    split = None
    if len(arrival):
        parts = ((sent - arrival), (first - sent), (finish - first))
        split = TimeSplit(*(int(part.sum()) / (len(arrival) * NS_PER_MS) for part in parts))
    asked = sum(total.query_tokens for total in result.workers)
    cached = sum(total.hit_tokens for total in result.workers)
    recomputed = sum(total.recomputed_tokens for total in result.workers)
    return RunView(
        row=summarize(result),
        ttft_ms=_curve(first - arrival),
        tpot_ms=_curve(tpots_ns(table)),
        e2e_ms=_curve(finish - arrival),
        samples=result.samples,
        hot=result.hot,
        time=split,
        tokens=TokenSplit(cached, asked - cached, recomputed),
        notes=result.notes,
    )


def hit_rates(samples: Samples, windows: int) -> tuple[Floats, Floats]:
    """(seconds, hit rate 0..1) of all workers over at most so many stretches of time.

    A stretch in which nothing was admitted is NaN.
    """
    count = len(samples.time_ns)
    edges = np.unique(np.linspace(0, count, min(windows, count) + 1).round().astype(np.int64))
    times = np.concatenate([[0], samples.time_ns])[edges]
    asked, found = (
        np.concatenate([[0], column.sum(axis=1)])[edges]
        for column in (samples.query_tokens, samples.hit_tokens)
    )
    asked, found = np.diff(asked), np.diff(found)
    rates = np.divide(found, asked, out=np.full(len(asked), np.nan), where=asked > 0)
    return (times[:-1] + times[1:]) / 2e9, rates


def on_grid(time_ns: I64, rows: npt.NDArray[np.generic], columns: int) -> Floats:
    """`[samples, workers]` at any times as `[workers, columns]` of equal stretches from 0 to the
    last sample: the sample that a stretch's middle falls into."""
    if not len(time_ns):
        return np.zeros((rows.shape[1], 0))
    columns = min(columns, len(time_ns))
    middles = (np.arange(columns) + 0.5) * (int(time_ns[-1]) / columns)
    picked = np.searchsorted(time_ns, middles).clip(max=len(time_ns) - 1)
    grid: Floats = rows[picked].T.astype(np.float64)
    return grid


def _curve(times_ns: I64) -> Floats:
    if not len(times_ns):
        return np.zeros(0)
    curve: Floats = np.quantile(times_ns, np.linspace(0.0, 1.0, CURVE_POINTS)) / NS_PER_MS
    return curve
