"""The constants of `engine.step_time.StepTime` that explain a set of observations best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from engine.step_time import StepTime
from simulator.calibrate.observation import Observation, ObservationError

Floats = npt.NDArray[np.float64]

# What is fitted, and a start that any engine is within a few orders of magnitude of. The
# all-reduce terms have the same shape as `linear_s` and `weights_s`, which take them in.
STARTS = {
    "linear_s": 5e-5,
    "pair_s": 2e-9,
    "weights_s": 1e-2,
    "context_s": 5e-8,
    "overhead_s": 2e-3,
    "seq_s": 1.5e-5,
}
ROUND_TRIP = "round_trip_s"
ROUND_TRIP_START_S = 2e-3
MAX_FITTED = 20_000  # more steps than that are thinned evenly: they say the same again
SOFTMAX_P = 6.0
OUTLIER_SHARE = 0.05  # beyond this relative error a step counts linearly, not squared


@dataclass(frozen=True, slots=True)
class KindError:
    """Relative errors |model - measured| / measured of one kind of step."""

    kind: str  # prefill, decode, mixed, all
    observations: int
    median: float
    p90: float
    worst: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What came out. `round_trip_s` is 0 where the observations have no round trips."""

    step_time: StepTime
    round_trip_s: float
    errors: tuple[KindError, ...]  # "all" last
    undetermined: tuple[str, ...]  # constants that these observations say nothing of; they are 0


def fit(observations: Sequence[Observation]) -> Fit:
    """Least squares of relative errors, robust against outliers, all constants at least 0.

    Raises `ObservationError` when there are fewer observations than constants to find.
    """
    names, undetermined = _determined(observations)
    if len(observations) < len(names):
        raise ObservationError(
            f"{len(observations)} measurements cannot fix {len(names)} constants: measure more"
        )
    chosen = observations[:: -(-len(observations) // MAX_FITTED)]
    table = _Table(chosen)
    starts = np.array([STARTS.get(name, ROUND_TRIP_START_S) for name in names])

    def residuals(scaled: Floats) -> Floats:
        return table.relative_error(dict(zip(names, scaled * starts, strict=True)))

    # Scaled by the start, all constants are near 1, and one tolerance suits all.
    found = least_squares(
        residuals, np.ones(len(names)), bounds=(0.0, np.inf), loss="soft_l1",
        f_scale=OUTLIER_SHARE, xtol=1e-12, ftol=1e-12, gtol=1e-12, max_nfev=2000,
    )  # fmt: skip
    values = {name: float(value) for name, value in zip(names, found.x * starts, strict=True)}
    round_trip_s = values.pop(ROUND_TRIP, 0.0)
    return Fit(
        StepTime(**{name: values.get(name, 0.0) for name in STARTS}, softmax_p=SOFTMAX_P),
        round_trip_s,
        _errors(chosen, np.abs(residuals(found.x))),
        undetermined,
    )


def _determined(observations: Sequence[Observation]) -> tuple[list[str], tuple[str, ...]]:
    """The constants that the observations bear on, and those they say nothing of."""
    loads = [load for observation in observations for load in observation.loads]
    bears = {
        "linear_s": any(load.prefill_tokens + load.decode_seqs for load in loads),
        "pair_s": any(load.attention_pairs for load in loads),
        "weights_s": bool(loads),
        "context_s": any(load.decode_ctx_tokens for load in loads),
        "overhead_s": bool(loads),
        "seq_s": len({load.prefill_seqs + load.decode_seqs for load in loads}) > 1,
    }
    names = [name for name, known in bears.items() if known]
    if any(observation.round_trips for observation in observations):
        names.append(ROUND_TRIP)
    return names, tuple(name for name, known in bears.items() if not known)


class _Table:
    """Observations as columns: one row a step, and which observation it belongs to."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        loads = [load for observation in observations for load in observation.loads]
        lengths = [len(observation.loads) for observation in observations]
        self._starts = np.cumsum([0, *lengths[:-1]])
        columns = np.array(loads, dtype=np.float64).T
        prefill_tokens, prefill_seqs, decode_seqs, self._context, self._pairs = columns
        self._new_tokens = prefill_tokens + decode_seqs
        self._seqs = prefill_seqs + decode_seqs
        self._measured_s = np.array([observation.seconds for observation in observations])
        self._round_trips = np.array([o.round_trips for o in observations], dtype=np.float64)

    def relative_error(self, values: dict[str, float]) -> Floats:
        """(model - measured) / measured of each observation."""

        def value(name: str) -> float:
            return values.get(name, 0.0)

        step_s = (
            value("overhead_s")
            + value("seq_s") * self._seqs
            + _soft_max(value("weights_s"), value("linear_s") * self._new_tokens)
            + value("pair_s") * self._pairs
            + value("context_s") * self._context
        )
        model_s = np.add.reduceat(step_s, self._starts) + value(ROUND_TRIP) * self._round_trips
        error: Floats = (model_s - self._measured_s) / self._measured_s
        return error


def _soft_max(left: float, right: Floats) -> Floats:
    """The p-norm of `engine.step_time`, for columns."""
    high = np.maximum(np.maximum(left, right), 1e-300)  # never 0, where it would divide by 0
    low = np.minimum(left, right)
    result: Floats = high * (1.0 + (low / high) ** SOFTMAX_P) ** (1.0 / SOFTMAX_P)
    return result


def _errors(observations: Sequence[Observation], relative: Floats) -> tuple[KindError, ...]:
    kinds = np.array([observation.kind for observation in observations])
    rows = []
    for kind in ("prefill", "decode", "mixed", "all"):
        errors = relative if kind == "all" else relative[kinds == kind]
        if len(errors):
            median, p90, worst = np.percentile(errors, [50, 90, 100])
            rows.append(KindError(kind, len(errors), float(median), float(p90), float(worst)))
    return tuple(rows)
