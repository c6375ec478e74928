"""One live run beside one replay of the same requests: figures, placements, hits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from simulator.outcome import Outcome, Verdict
from simulator.replay.result import I64, NEVER, RequestTable

NS_PER_MS = 1_000_000
Unit = Literal["points", "%", ""]


class Metric(msgspec.Struct, frozen=True):
    """A figure of both worlds. `difference`: simulated against live, in `unit`."""

    name: str
    live: float | None
    simulated: float | None
    difference: float | None
    unit: Unit
    limit: float | None  # the largest difference that passes; None: shown only

    @property
    def passed(self) -> bool:
        """Within its limit, where it has one."""
        if self.limit is None:
            return True
        return self.difference is not None and abs(self.difference) <= self.limit


class Placements(msgspec.Struct, frozen=True):
    """Where the requests went and what they found there, request by request.

    Workers are alike, so the names of one world are first matched to the other's such that most
    requests agree. Shares are of requests completed in both worlds.
    """

    requests: int
    same_worker: float
    same_hit: float  # of the same number of cached tokens
    other_worker_other_hit: float  # the hit differs, and so does the worker
    same_worker_other_hit: float  # the hit differs although the worker does not
    live_hit_tokens: int
    simulated_hit_tokens: int
    moved_hit_tokens: int  # simulated - live, of requests placed elsewhere
    kept_hit_tokens: int  # simulated - live, of requests on the same worker
    transport_ms: float | None  # median TTFT, live - simulated, of same worker and same hit


def metric(
    name: str, live: float | None, simulated: float | None, unit: Unit, limit: float | None = None
) -> Metric:
    """The difference of two figures: points of a share, per cent of the live one, or neither."""
    difference = None
    if live is not None and simulated is not None:
        if unit == "points":
            difference = 100 * (simulated - live)
        elif unit == "%":
            difference = 100 * (simulated / live - 1) if live else None
        else:
            difference = simulated - live
    rounded = None if difference is None else round(difference, 2)
    return Metric(name, live, simulated, rounded, unit, limit)


def placements(
    outcomes: Sequence[Outcome], table: RequestTable, workers: Sequence[str]
) -> Placements:
    """Compares request `serial` of `outcomes` with row `serial` of `table`.

    `workers`: names of the live workers as in the outcomes, as many as the replay has.
    """
    both = [
        outcome
        for outcome in outcomes
        if outcome.verdict is Verdict.COMPLETED
        and outcome.worker is not None
        and table.finish_ns[outcome.serial] != NEVER
    ]
    rows = np.array([outcome.serial for outcome in both], dtype=np.int64)
    place = {name: number for number, name in enumerate(workers)}
    live = np.array([place[o.worker] for o in both if o.worker is not None], dtype=np.int64)
    simulated = table.worker[rows].astype(np.int64)
    same_worker = matched(simulated, live, len(workers)) == live
    live_hits = np.array([o.cached_tokens or 0 for o in both], dtype=np.int64)
    gained = table.hit_tokens[rows].astype(np.int64) - live_hits
    same_hit = gained == 0
    return Placements(
        requests=len(both),
        same_worker=_share(same_worker),
        same_hit=_share(same_hit),
        other_worker_other_hit=_share(~same_hit & ~same_worker),
        same_worker_other_hit=_share(~same_hit & same_worker),
        live_hit_tokens=int(live_hits.sum()),
        simulated_hit_tokens=int(table.hit_tokens[rows].sum(dtype=np.int64)),
        moved_hit_tokens=int(gained[~same_worker].sum()),
        kept_hit_tokens=int(gained[same_worker].sum()),
        transport_ms=_transport_ms(both, table, rows, same_worker & same_hit),
    )


def matched(simulated: I64, live: I64, workers: int) -> I64:
    """The live worker that stands for each of `simulated`, such that most requests agree.

    The assignment problem over how often each pair met (Kuhn, 1955), solved by SciPy.
    """
    met = np.zeros((workers, workers), dtype=np.int64)
    np.add.at(met, (simulated, live), 1)
    _, partner = linear_sum_assignment(met, maximize=True)
    result: I64 = np.asarray(partner, dtype=np.int64)[simulated]
    return result


def _share(rows: npt.NDArray[np.bool_]) -> float:
    return round(float(np.count_nonzero(rows)) / len(rows), 4) if len(rows) else 0.0


def _transport_ms(
    both: Sequence[Outcome], table: RequestTable, rows: I64, alike: npt.NDArray[np.bool_]
) -> float | None:
    """What a request costs live beyond the model: HTTP, hashing, a busy machine."""
    extra = [
        outcome.ttft_ms - (table.first_token_ns[row] - table.arrival_ns[row]) / NS_PER_MS
        for outcome, row, chosen in zip(both, rows, alike, strict=True)
        if chosen and outcome.ttft_ms is not None
    ]
    return round(float(np.median(extra)), 3) if extra else None
