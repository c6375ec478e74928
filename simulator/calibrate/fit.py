"""Fits step-time constants to measurements: observations, the fit, and its errors."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from engine.profiles import Profile
from engine.step_time import StepTime
from router.config.paths import unreadable
from simulator.calibrate.best_constants import (
    Best,
    Floats,
    MeasuredColumns,
    best_constants,
    relative_errors,
)

MAX_STEPS = 5_000_000
MAX_TOKENS = 1 << 40  # of any column: far beyond any step, small enough for exact sums
COLUMNS = (
    "prefill_tokens", "prefill_seqs", "decode_seqs", "decode_ctx_tokens", "attention_pairs",
    "seconds",
)  # fmt: skip


class ObservationError(ValueError):
    """Raised for unusable measurements; the message has the file, line and field, and what is
    expected.
    """


class ComputedLoad(NamedTuple):
    """The work of one step, in the form of an `engine.step_time.StepLoad`."""

    prefill_tokens: int = 0
    prefill_seqs: int = 0
    decode_seqs: int = 0
    decode_ctx_tokens: int = 0
    attention_pairs: float = 0.0

    @property
    def kind(self) -> str:
        """The kind of step under which its error is reported: prefill, decode or mixed."""
        if not self.decode_seqs:
            return "prefill"
        return "mixed" if self.prefill_tokens else "decode"


class Observation(NamedTuple):
    """The measured seconds of all steps in `loads` and of `round_trips` between a client and the
    engine.
    """

    loads: tuple[ComputedLoad, ...]
    seconds: float
    round_trips: int = 0

    @property
    def kind(self) -> str:
        """The kind of the observation's first step."""
        return self.loads[0].kind


def prefill_loads(prompt_tokens: int, chunk_tokens: int) -> tuple[ComputedLoad, ...]:
    """Return the steps of one prompt that is prefilled alone, in chunks of at most
    `chunk_tokens`.
    """
    loads = []
    for start in range(0, prompt_tokens, chunk_tokens):
        tokens = min(chunk_tokens, prompt_tokens - start)
        loads.append(ComputedLoad(tokens, 1, attention_pairs=tokens * (start + tokens / 2)))
    return tuple(loads)


def read_step_log(path: Path) -> list[Observation]:
    """Return the steps in a CSV file with the columns `COLUMNS`, in any order; other columns are
    ignored.

    Raises `ObservationError` for a file that cannot be read and for the first wrong line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(_rows(file, path))
    except OSError as error:
        raise ObservationError(unreadable(path, error)) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ObservationError(f"{path}: not a CSV file: {error}") from error


def _rows(file: Iterator[str], path: Path) -> Iterator[Observation]:
    reader = csv.DictReader(file)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ObservationError(
            f"{path}, line 1: no column {', '.join(missing)}; a step log has {','.join(COLUMNS)}"
        )
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        if reader.line_num > MAX_STEPS:
            raise ObservationError(f"{where}: more than {MAX_STEPS} steps")
        counts = [int(_number(row, name, where, whole=True)) for name in COLUMNS[:4]]
        pairs = _number(row, "attention_pairs", where)
        load = ComputedLoad(counts[0], counts[1], counts[2], counts[3], pairs)
        seconds = _number(row, "seconds", where)
        if not load.prefill_tokens + load.decode_seqs:
            raise ObservationError(f"{where}: a step of no tokens")
        if seconds <= 0:
            raise ObservationError(f"{where}: seconds: {seconds:g} is not above 0")
        yield Observation((load,), seconds)


def _number(row: dict[str, str], name: str, where: str, whole: bool = False) -> float:
    text = row[name]
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= MAX_TOKENS or (whole and value != int(value)):
        kind = "whole number" if whole else "number"
        raise ObservationError(f"{where}: {name}: {text!r} is not a {kind} in 0..{MAX_TOKENS}")
    return value


# The constants that the fit finds, with the exponent of the soft maximum.
CONSTANTS = ("linear_s", "pair_s", "weights_s", "context_s", "overhead_s", "seq_s")
ROUND_TRIP = "round_trip_s"
MAX_FITTED = 20_000  # more steps than that are thinned evenly: they say the same again


@dataclass(frozen=True, slots=True)
class KindError:
    """The relative errors |model - measured| / measured of one kind of step."""

    kind: str  # prefill, decode, mixed, all
    observations: int
    median: float
    p90: float
    worst: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a fit. `round_trip_s` is 0 if the observations have no round trips."""

    step_time: StepTime
    round_trip_s: float
    errors: tuple[KindError, ...]  # "all" last
    undetermined: tuple[str, ...]  # constants that these observations say nothing of; they are 0


def fit(observations: Sequence[Observation], like: StepTime | None = None) -> Fit:
    """Fit all constants, each at least 0, by least squares of relative errors, robust against
    outliers.

    `like` is a mixture-of-experts model of the same form, from which the fit takes two shares: of
    experts for a token, and of routed experts among all weights. Without it the model is dense.
    Raises `ObservationError` if there are fewer observations than constants, or if one took no
    time.
    """
    names, undetermined = _determined(observations)
    if len(observations) < len(names):
        raise ObservationError(
            f"{len(observations)} measurements cannot fix {len(names)} constants: measure more"
        )
    if any(observation.seconds <= 0 for observation in observations):
        raise ObservationError(
            "a measurement took no time: the engine answers faster than the clock can tell"
        )
    chosen = observations[:: -(-len(observations) // MAX_FITTED)]
    measured = _columns(chosen, names, like)
    best = best_constants(measured)
    return Fit(
        _step_time(best, like),
        best.constants.get(ROUND_TRIP, 0.0),
        _errors(chosen, np.abs(relative_errors(measured, best))),
        undetermined,
    )


def _step_time(best: Best, like: StepTime | None) -> StepTime:
    values = {name: best.constants.get(name, 0.0) for name in CONSTANTS}
    if like is None or not like.experts_s:
        return StepTime(**values, softmax_p=best.exponent.p)
    experts = _experts_of_weights(like)
    values["experts_s"] = experts * values["weights_s"]
    values["weights_s"] -= values["experts_s"]
    return StepTime(**values, expert_share=like.expert_share, softmax_p=best.exponent.p)


def _experts_of_weights(like: StepTime) -> float:
    """Return the share of routed experts in the time that the model `like` takes to read all its
    weights.
    """
    return like.experts_s / (like.weights_s + like.experts_s)


def _determined(observations: Sequence[Observation]) -> tuple[list[str], tuple[str, ...]]:
    """Return the constants that the observations determine, and those that they do not."""
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


def _columns(
    observations: Sequence[Observation], names: Sequence[str], like: StepTime | None
) -> MeasuredColumns:
    """Return the observations as columns, with the factors of these constants."""
    lengths = [len(observation.loads) for observation in observations]
    first_steps = np.cumsum([0, *lengths[:-1]])
    loads = [load for observation in observations for load in observation.loads]
    columns = np.array(loads, dtype=np.float64).T
    prefill_tokens, prefill_seqs, decode_seqs, context_tokens, pairs = columns
    new_tokens = prefill_tokens + decode_seqs
    weights_read = np.ones(len(loads))
    if like is not None and like.experts_s:
        weights_read -= _experts_of_weights(like) * (1.0 - like.expert_share) ** new_tokens
    of_steps = {
        "pair_s": pairs,
        "context_s": context_tokens,
        "overhead_s": np.ones(len(loads)),
        "seq_s": prefill_seqs + decode_seqs,
    }
    sums = {name: np.add.reduceat(column, first_steps) for name, column in of_steps.items()}
    sums[ROUND_TRIP] = np.array([one.round_trips for one in observations], dtype=np.float64)
    return MeasuredColumns(
        np.array([observation.seconds for observation in observations]),
        first_steps,
        new_tokens,
        weights_read,
        {name: column for name, column in sums.items() if name in names},
    )


def _errors(observations: Sequence[Observation], relative: Floats) -> tuple[KindError, ...]:
    kinds = np.array([observation.kind for observation in observations])
    rows = []
    for kind in ("prefill", "decode", "mixed", "all"):
        errors = relative if kind == "all" else relative[kinds == kind]
        if len(errors):
            median, p90, worst = np.percentile(errors, [50, 90, 100])
            rows.append(KindError(kind, len(errors), float(median), float(p90), float(worst)))
    return tuple(rows)


UNITS = {  # constant -> (factor, unit, what it is)
    "linear_s": (1e6, "µs per new token", "matrix work"),
    "pair_s": (1e12, "ps per query-key pair", "prefill attention"),
    "weights_s": (1e3, "ms per step", "one read of the weights"),
    "context_s": (1e9, "ns per KV token read", "decode attention"),
    "overhead_s": (1e3, "ms per step", "launch, scheduling, sampling"),
    "seq_s": (1e6, "µs per sequence", "batch book-keeping"),
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted profile, and its errors against the measurements."""

    profile: Profile
    fit: Fit


def calibrate(
    observations: Sequence[Observation],
    name: str,
    kv_tokens: int,
    origin: str,
    like: StepTime | None = None,
) -> Calibration:
    """Return a profile called `name` for an engine with `kv_tokens`; `origin` describes the
    measurement, and `like` is used as in `fit`. Raises `ObservationError` if there is too little to
    fit.
    """
    found = fit(observations, like)
    total = found.errors[-1]
    provenance = (
        f"calibrated on {total.observations} measurements of {origin}; relative error: median "
        f"{total.median:.1%}, p90 {total.p90:.1%}, worst {total.worst:.1%}"
    )
    return Calibration(Profile(name, found.step_time, kv_tokens, 0, provenance), found)


def constants_table(calibration: Calibration) -> Table:
    """Return a table of the constants for people."""
    table = Table("constant", "value", "unit", "what", title=calibration.profile.name)
    for name, (factor, unit, what) in UNITS.items():
        value = f"{getattr(calibration.profile.step_time, name) * factor:.4g}"
        if name in calibration.fit.undetermined:
            value, what = "0", f"{what}: these measurements do not show it"
        table.add_row(name, value, unit, what)
    step_time = calibration.profile.step_time
    if step_time.experts_s:
        share = f"each token visits {step_time.expert_share:.3g} of the routed experts, as given"
        table.add_row("experts_s", f"{step_time.experts_s * 1e3:.4g}", "ms per step", share)
    p = f"{step_time.softmax_p:g}"
    table.add_row("softmax_p", p, "", "the corner between weights and matrix work: 1 is their sum")
    if calibration.fit.round_trip_s:
        value = f"{calibration.fit.round_trip_s * 1e3:.4g}"
        table.add_row("round trip", value, "ms per request", "HTTP, not part of the profile")
    return table


def errors_table(calibration: Calibration) -> Table:
    """Return a table of the model's errors against the measurements, by kind of step."""
    table = Table("steps", "measured", "median error", "p90", "worst", title="model - measured")
    for row in calibration.fit.errors:
        shares = (f"{value:.1%}" for value in (row.median, row.p90, row.worst))
        table.add_row(row.kind, f"{row.observations:,}", *shares)
    return table
