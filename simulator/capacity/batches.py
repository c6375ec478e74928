"""The time that a batch takes by its size: read from measurements and fitted to a line, with its
error.

A batch of b requests takes s(b) = a + c b seconds: `a` is paid once for the batch, which is why
batches pay, and `c` for each request. The line is a least-squares fit, weighted by how often each
size was seen; the error of s(b) comes from the residuals. Sizes beyond twice the largest measured
batch are not estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from simulator.report.figures import student_t

Floats = npt.NDArray[np.float64]

MEASURE = "warmroute doctor URL --probe --measure FILE"
MAX_BATCH = 4096
MAX_FILE_BYTES = 1 << 20
BEYOND = 2  # times the largest batch seen: so far a line may be drawn on
BENT = 0.10  # worst residual, as a share of the time: beyond it s(b) is no line
KNEE_SHARE = 0.9  # of the highest throughput


class MeasurementError(ValueError):
    """Raised for measurements that allow no plan; the message says which, why, and what to do."""


class BatchSize(msgspec.Struct, frozen=True):
    """The number of batches of one size, and the mean seconds of one batch. Lifetime: process."""

    batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]
    count: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class MeasuredBatches(msgspec.Struct, frozen=True):
    """A file of measurements. Lifetime: process. `max_batch_size` 0 means that the model takes no
    batches.
    """

    model: str
    max_batch_size: Annotated[int, msgspec.Meta(ge=0, le=MAX_BATCH)]
    instances: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    sizes: list[BatchSize]


def read_measured(path: Path) -> MeasuredBatches:
    """Return the measurements in a file. Raises MeasurementError if it cannot be read or is
    invalid.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise MeasurementError(f"{path}: {error.strerror or error}") from error
    if not data.strip():
        raise MeasurementError(f"{path}: is empty; measure again: {MEASURE}")
    if len(data) > MAX_FILE_BYTES:
        raise MeasurementError(f"{path}: is larger than {MAX_FILE_BYTES} bytes: no measurement")
    try:
        return msgspec.json.decode(data, type=MeasuredBatches)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)
        if b"NaN" in data or b"Infinity" in data:
            why = "has NaN or Infinity where a time should be"
        raise MeasurementError(f"{path}: {why}; measure again: {MEASURE}") from error


@dataclass(frozen=True, eq=False)
class Batches:
    """The times s(b) of one model, measured with a given number of instances. Lifetime: process."""

    model: str
    instances: int  # that ran while it was measured
    base_s: float
    per_request_s: float
    largest: int  # batch for which s(b) may be asked
    sizes: tuple[BatchSize, ...] = ()  # merged, smallest first; none: the line was given
    unprofiled_max: int = 0  # the model's own largest batch, where that is more than `largest`
    residual: float | None = None  # worst, as a share; None: there is nothing to judge by
    covariance: Floats | None = None  # of (base, per request)

    @property
    def is_bent(self) -> bool:
        """True if the line misses a measured size by so much that measured sizes are joined
        instead.
        """
        return self.residual is not None and self.residual > BENT

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds s(b) of a batch of b requests, for b = 0 to `largest`; s(0) is 0."""
        return self._seconds(0.0)

    def within(self, sign: int) -> list[float]:
        """Return s(b) for each b at one end of its 95 % interval: `sign` is 1 for the slow end, -1
        for the fast one.
        """
        return self._seconds(float(sign))

    def error_s(self, batch: int) -> float | None:
        """Return half of the 95 % interval of s(batch); None if too few sizes were measured."""
        if self.covariance is None:
            return None
        at = np.array([1.0, batch])
        quantile = student_t(len(self.sizes) - 2)
        return float(quantile * math.sqrt(max(0.0, at @ self.covariance @ at)))

    def _seconds(self, sign: float) -> list[float]:
        b = np.arange(1, self.largest + 1, dtype=np.float64)
        line = self.base_s + self.per_request_s * b
        if self.is_bent:
            seen = [float(one.batch) for one in self.sizes]
            beyond = self.per_request_s * np.maximum(b - seen[-1], 0.0)
            line = np.interp(b, seen, [one.seconds for one in self.sizes]) + beyond
        error = [sign * (self.error_s(int(one)) or 0.0) if sign else 0.0 for one in b]
        # Whatever the error, a batch takes some time, and no less than a smaller one.
        low = np.maximum.accumulate(np.maximum(line + np.array(error), line * 0.05))
        return [0.0, *low.tolist()]

    def rate_per_s(self, batch: int) -> float:
        """Return the requests per second of an instance whose batches all have this size."""
        return batch / self.seconds[batch]

    @property
    def most_per_s(self) -> float:
        """Requests per second of an instance whose batches are all full."""
        return self.rate_per_s(self.largest)


def given(base_s: float, per_request_s: float, max_batch: int) -> Batches:
    """Return the times of a model whose constants a and c the user gave."""
    if not base_s + per_request_s > 0:
        raise MeasurementError("--base-s and --per-request-s are both 0: a request takes time")
    return Batches("given", 1, base_s, per_request_s, max_batch)


def fit(measured: MeasuredBatches, max_batch: int | None = None) -> Batches:
    """Return the line that fits the measured batches. `max_batch` replaces the model's own largest
    batch. Raises MeasurementError if the measured sizes allow no line.
    """
    sizes = _merged(measured.sizes)
    asked = max_batch or max(1, measured.max_batch_size)
    if not sizes:
        raise MeasurementError(f"{measured.model}: no batch was seen; measure again: {MEASURE}")
    seen = sizes[-1].batch
    if len(sizes) == 1 and not asked == seen == 1:
        raise MeasurementError(
            f"{measured.model}: only batches of {seen} were seen, and a line needs two sizes; "
            f"measure under several loads ({MEASURE}), or give --base-s and --per-request-s"
        )
    largest = min(asked, BEYOND * seen)
    if len(sizes) == 1:
        return Batches(measured.model, measured.instances, sizes[0].seconds, 0.0, 1, sizes)
    base_s, per_request_s = _line(sizes)
    residuals = np.array([one.seconds - base_s - per_request_s * one.batch for one in sizes])
    covariance: Floats | None = None
    residual = None
    if len(sizes) > 2:
        x, weights = _design(sizes)
        scatter = float(weights @ residuals**2) / (len(sizes) - 2)
        covariance = np.asarray(scatter * np.linalg.inv((x.T * weights) @ x), np.float64)
        shares = (abs(r) / one.seconds for r, one in zip(residuals, sizes, strict=True))
        residual = float(max(shares))
    return Batches(
        measured.model, measured.instances, base_s, per_request_s, largest, sizes,
        asked if asked > largest else 0, residual, covariance,
    )  # fmt: skip


def _merged(sizes: Sequence[BatchSize]) -> tuple[BatchSize, ...]:
    """Return the measurements with one entry for each batch size."""
    found: dict[int, BatchSize] = {}
    for one in sizes:
        known = found.get(one.batch)
        if known is None:
            found[one.batch] = one
            continue
        count = known.count + one.count
        seconds = (known.seconds * known.count + one.seconds * one.count) / count
        found[one.batch] = BatchSize(one.batch, count, seconds)
    return tuple(found[batch] for batch in sorted(found))


def _design(sizes: Sequence[BatchSize]) -> tuple[Floats, Floats]:
    x = np.array([[1.0, one.batch] for one in sizes])
    return x, np.array([float(one.count) for one in sizes])


def _line(sizes: Sequence[BatchSize]) -> tuple[float, float]:
    """Return a and c of the fitted line, each 0 or more; a negative value is noise."""
    x, weights = _design(sizes)
    y = np.array([one.seconds for one in sizes])
    base_s, per_request_s = np.linalg.solve((x.T * weights) @ x, (x.T * weights) @ y)
    if per_request_s < 0:
        return float(np.average(y, weights=weights)), 0.0
    if base_s < 0:
        return 0.0, float(np.average(y / x[:, 1], weights=weights * x[:, 1] ** 2))
    return float(base_s), float(per_request_s)


@dataclass(frozen=True, slots=True)
class Knee:
    """The requests in flight at one instance beyond which only the waiting time grows. Lifetime:
    process.
    """

    requests: int
    rule: str  # which of the three was least


def knee(batches: Batches, bound_s: float = math.inf) -> Knee:
    """Return the knee: the least of three numbers of requests in flight.

    They are X_max x s(1) (Little's law at both asymptotes), the smallest k that gives KNEE_SHARE of
    X_max, and the largest k whose execution keeps the latency bound.
    """
    rates = [batches.rate_per_s(k) for k in range(1, batches.largest + 1)]
    most = max(rates)
    found = [
        (max(1, math.ceil(most * batches.seconds[1] - 1e-9)), "X_max x s(1)"),
        (
            next(k for k, rate in enumerate(rates, 1) if rate >= KNEE_SHARE * most),
            f"{KNEE_SHARE:.0%} of the highest throughput",
        ),
    ]
    kept = [k for k in range(1, batches.largest + 1) if batches.seconds[k] <= bound_s]
    if len(kept) < batches.largest:
        found.append((max(kept, default=1), "the latency bound"))
    return Knee(*min(found))
