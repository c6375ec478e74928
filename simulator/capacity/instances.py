"""Computes how many instances of a model a load needs, and the results of each number of instances.

Instances take requests from one queue, first come first served. A free instance takes the requests
that are queued, up to the largest batch, or waits for the queue delay if fewer are queued (Triton's
dynamic batcher without preferred sizes). No request overtakes another, so batches follow from
arrivals one by one (`run`), exactly, for any number of instances, arrivals of any variability, and
any delay. Tests compare it with the formulas for special cases (the chain of queues at the ends of
executions; Erlang's C). Two things are ideal here: s(b) is the same each time, and instances do not
slow each other beyond what was measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from simulator.capacity.batches import Batches, Floats, Knee, knee
from simulator.traces.job import Job

REQUESTS = 40_000  # simulated for each number of instances, at least
FULL_BATCHES = 50  # of each instance, at least
MOST_REQUESTS = 2_000_000
WARM_UP = 0.1  # of them, not counted
MAX_INSTANCES = 4096
MOST_INSTANCES = 64  # tried, unless told otherwise
HEADROOM = 0.2  # of time and memory
MAX_VARIABILITY = 100.0
MINUTE_S = 60
SEEN_IN_A_MINUTE = 30  # a minute with fewer arrivals says nothing about variability
DELAYS = (0.25, 0.5, 1.0)  # queue delays tried, as shares of s(1)
DELAY_GAIN = 0.05  # of the latency that a delay must save to be worth setting


@dataclass(frozen=True, slots=True)
class ArrivingLoad:
    """A stream of arriving requests. Lifetime: process."""

    rate_per_s: float
    variability: float = 1.0  # variance / mean^2 of the time between two: 0 even, 1 Poisson

    def arrivals(self, seed: int = 1, requests: int = REQUESTS) -> list[float]:
        """Return the times of this many arrivals, whose gaps have a gamma distribution."""
        mean_s = 1.0 / self.rate_per_s
        if self.variability < 1e-6:
            return [number * mean_s for number in range(requests)]
        gaps = np.random.default_rng(seed).gamma(
            1.0 / self.variability, mean_s * self.variability, requests
        )
        found: list[float] = np.cumsum(gaps).tolist()
        return found


def load_of(jobs: Iterable[Job]) -> ArrivingLoad:
    """Return the peak load of a log: the 99th percentile of its rates by minute, and the
    variability within a minute.

    Raises ValueError if the log has less than two requests, or all at the same time.
    """
    at_s = np.array([job.at_ns for job in jobs], dtype=np.float64) / 1e9
    if len(at_s) < 2 or at_s[-1] <= at_s[0]:
        raise ValueError("a rate needs two requests at least, at different times; give --rate")
    at_s -= at_s[0]
    minutes = (at_s // MINUTE_S).astype(np.int64)
    counts = np.bincount(minutes)[:-1]  # the last one is not whole
    rate_per_s = (len(at_s) - 1) / float(at_s[-1])
    if len(counts) > 1:
        rate_per_s = float(np.percentile(counts, 99)) / MINUTE_S
    spreads, weights = [], []
    for minute in np.unique(minutes):
        gaps = np.diff(at_s[minutes == minute])
        if len(gaps) >= SEEN_IN_A_MINUTE and (mean := float(np.mean(gaps))) > 0:
            spreads.append(float(np.var(gaps)) / mean**2)
            weights.append(len(gaps))
    spread = float(np.average(spreads, weights=weights)) if spreads else 1.0
    return ArrivingLoad(rate_per_s, min(spread, MAX_VARIABILITY))


@dataclass(frozen=True, slots=True)
class Row:
    """The results that one number of instances gives. Lifetime: process. Waits are infinite if the
    instances are overloaded.
    """

    instances: int
    capacity_share: float  # of the requests that full batches would take; 1 and more: overloaded
    batch: float  # mean
    utilisation: float  # share of its time that an instance executes
    queue: float  # requests that wait, mean
    wait_s: float
    mean_s: float  # of a request, from arrival to answer
    p50_s: float
    p99_s: float
    delay_s: float = 0.0  # the queue delay that was set

    @property
    def overloaded(self) -> bool:
        """True if more requests arrive than full batches can serve."""
        return self.capacity_share >= 1.0


def run(
    arrivals_s: Sequence[float], seconds: Sequence[float], instances: int, delay_s: float = 0.0
) -> tuple[Floats, Floats, list[int]]:
    """Return the starts, ends and sizes of batches, in the order in which they start. `seconds` is
    s(b) by b; its length sets the largest batch. The times in `arrivals_s` must be ascending.
    """
    largest, total = len(seconds) - 1, len(arrivals_s)
    free = [0.0] * instances
    heapify(free)
    starts: list[float] = []
    ends: list[float] = []
    sizes: list[int] = []
    head = 0
    while head < total:
        first = arrivals_s[head]
        begin = max(heappop(free), first)
        if delay_s:
            full = arrivals_s[head + largest - 1] if head + largest <= total else math.inf
            begin = max(begin, min(first + delay_s, full))
        size = bisect_right(arrivals_s, begin, head, min(head + largest, total)) - head
        end = begin + seconds[size]
        heappush(free, end)
        starts.append(begin)
        ends.append(end)
        sizes.append(size)
        head += size
    return np.array(starts), np.array(ends), sizes


def row(
    load: ArrivingLoad,
    seconds: Sequence[float],
    instances: int,
    delay_s: float = 0.0,
    seed: int = 1,
) -> Row:
    """Simulate one number of instances under `load`, and return its results."""
    most_per_s = instances * (len(seconds) - 1) / seconds[-1]
    share = load.rate_per_s / most_per_s
    if share >= 1.0:
        full, end = float(len(seconds) - 1), math.inf
        return Row(instances, share, full, 1.0, end, end, end, end, end, delay_s)
    enough = FULL_BATCHES * instances * (len(seconds) - 1)
    at_s = load.arrivals(seed, min(max(REQUESTS, enough), MOST_REQUESTS))
    starts, ends, sizes = run(at_s, seconds, instances, delay_s)
    count = np.array(sizes)
    arrived = np.array(at_s)
    skipped = round(WARM_UP * len(at_s))
    latency_s = (np.repeat(ends, count) - arrived)[skipped:]
    wait_s = float(np.mean((np.repeat(starts, count) - arrived)[skipped:]))
    first = int(np.searchsorted(np.cumsum(count), skipped, side="right"))
    span_s = max(float(arrived[-1] - starts[first]), 1e-12)
    within = np.minimum(np.stack((starts, ends))[:, first:], arrived[-1])
    busy_s = float(np.sum(within[1] - within[0]))
    p50_s, p99_s = (float(one) for one in np.percentile(latency_s, (50, 99)))
    return Row(
        instances, share, float(np.mean(count[first:])), min(1.0, busy_s / span_s / instances),
        load.rate_per_s * wait_s, wait_s, float(np.mean(latency_s)), p50_s, p99_s, delay_s,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServiceTarget:
    """The latency limits of a request, and the capacity to keep in reserve. Lifetime: process."""

    mean_s: float = math.inf
    p50_s: float = math.inf
    p99_s: float = math.inf
    headroom: float = HEADROOM

    @property
    def tightest(self) -> tuple[str, float]:
        """The limit that bounds a single execution most, as its name and value."""
        bounds = {"p99": self.p99_s, "p50": self.p50_s, "mean": self.mean_s}
        name = min(bounds, key=lambda one: bounds[one])
        return name, bounds[name]

    def misses(self, row: Row) -> str | None:
        """Return the limit that a row of results misses, with its value and its bound; None if the
        row keeps all limits.
        """
        if row.overloaded:
            return "overloaded"
        for name in ("mean", "p50", "p99"):
            bound, found = getattr(self, f"{name}_s"), getattr(row, f"{name}_s")
            if found > bound:
                return f"{name} {found * 1e3:,.4g} ms > {bound * 1e3:,.4g} ms"
        return None


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of devices and the memory that instances need, in GiB. Lifetime: process."""

    device: float
    instance: float  # its weights, without a batch
    request: float = 0.0  # of one in the largest batch
    devices: int = 1

    def most(self, largest: int, headroom: float) -> int:
        """Return the number of instances that fit on all devices if `headroom` of the memory stays
        free.
        """
        each = self.instance + largest * self.request
        return self.devices * math.floor(self.device * (1.0 - headroom) / each + 1e-9)


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """The number of instances that a load needs, and the rows behind it. Lifetime: process."""

    rows: tuple[Row, ...]  # at the load itself
    needed: int | None  # the least that keeps the target at the load with headroom
    with_failure: int | None  # the least of which one may fail, the target kept at the load
    within_error: tuple[int | None, int | None]  # `needed` if executions are as fast, as slow, ...
    reserve: Row | None  # `needed` at the load with headroom
    miss: str | None  # by what one instance fewer misses it
    delay_s: float  # worth setting
    delayed: Row | None  # with it
    knee: Knee
    threads: int  # of a decoupled instance: the knee, or what the load with headroom needs
    most: int  # instances that were allowed
    notes: tuple[str, ...] = ()


class Planner:
    """Simulates as many numbers of instances as a plan needs.

    Lifetime: process. `measured` has the measurements of one model with several numbers of
    instances. A number of instances is planned with the measurement of the largest number that does
    not exceed it, or else of the smallest number.
    """

    def __init__(
        self,
        measured: Sequence[Batches],
        load: ArrivingLoad,
        target: ServiceTarget,
        most: int = MOST_INSTANCES,
    ) -> None:
        self.measured = sorted(measured, key=lambda one: one.instances)
        self.load, self.target, self.most = load, target, most
        self._reserved = replace(load, rate_per_s=load.rate_per_s / (1.0 - target.headroom))

    def batches(self, instances: int) -> Batches:
        """Return the measured times with which this number of instances is planned."""
        below = [one for one in self.measured if one.instances <= instances]
        return below[-1] if below else self.measured[0]

    def plan(self) -> InstancePlan:
        """Return the plan, with the rows that it was computed from."""
        needed = self._least(self._reserved)
        plain = self._least(self.load)
        with_failure = None
        if needed is not None and plain is not None and max(needed, plain + 1) <= self.most:
            with_failure = max(needed, plain + 1)
        reserve = self.row_reserved(needed) if needed else None
        miss = None
        if needed is not None and needed > 1:
            miss = self.target.misses(self.row_reserved(needed - 1))
        delay_s, delayed = self._delay(needed) if needed else (0.0, None)
        last = with_failure or needed or self.most
        first = max(1, min((plain or last) - 1, last))
        batches = self.batches(needed or 1)
        bend = knee(batches, self.target.tightest[1])
        shown = sorted({*range(first, min(last + 2, self.most + 1)), last})[-16:]
        return InstancePlan(
            tuple(self._row(self.load, n) for n in shown),
            needed, with_failure, self._within_error(), reserve, miss, delay_s, delayed,
            bend, max(bend.requests, self._in_flight(needed)) if needed else bend.requests,
            self.most, tuple(self._notes(needed)),
        )  # fmt: skip

    def _in_flight(self, instances: int) -> int:
        """Return the least number of requests in flight at each instance with which the instances
        serve the load and its reserve.
        """
        batches = self.batches(instances)
        each_per_s = self._reserved.rate_per_s / instances
        rates = (batches.rate_per_s(k) for k in range(1, batches.largest + 1))
        enough = (k for k, rate in enumerate(rates, 1) if rate >= each_per_s)
        return next(enough, batches.largest)

    def row_reserved(self, instances: int) -> Row:
        """Return the results of this number of instances under the load plus the reserve."""
        return self._row(self._reserved, instances)

    def _row(self, load: ArrivingLoad, instances: int, delay_s: float = 0.0, sign: int = 0) -> Row:
        batches = self.batches(instances)
        seconds = batches.within(sign) if sign else batches.seconds
        return row(load, seconds, instances, delay_s)

    def _least(self, load: ArrivingLoad, sign: int = 0) -> int | None:
        """Return the least number of instances that keeps the target; None if no allowed number
        does. `sign` 1 or -1 takes the slow or the fast end of the measured times' interval.
        """
        for instances in range(1, self.most + 1):
            found = self._row(load, instances, sign=sign)
            if self.target.misses(found) is None:
                return instances
            if not found.overloaded and found.wait_s < 1e-3 * found.mean_s:
                return None  # no request waits, so more instances change nothing
        return None

    def _within_error(self) -> tuple[int | None, int | None]:
        fast, slow = (self._least(self._reserved, sign) for sign in (-1, 1))
        return fast, slow

    def _delay(self, instances: int) -> tuple[float, Row | None]:
        """Return a queue delay that lowers the latency by fuller batches, and its results; (0,
        None) if no tried delay does.
        """
        name, _ = self.target.tightest
        plain = self.row_reserved(instances)
        alone_s = self.batches(instances).seconds[1]
        tried = [self._row(self._reserved, instances, share * alone_s) for share in DELAYS]
        best = min(tried, key=lambda one: float(getattr(one, f"{name}_s")))
        if getattr(best, f"{name}_s") > (1.0 - DELAY_GAIN) * getattr(plain, f"{name}_s"):
            return 0.0, None
        return best.delay_s, best

    def _notes(self, needed: int | None) -> Iterator[str]:
        """Yield notes that say where the plan is uncertain or limited."""
        used = self.batches(needed or 1)
        if used.unprofiled_max:
            yield (
                f"the model takes batches of {used.unprofiled_max}, and none above "
                f"{used.sizes[-1].batch} was seen: planned with {used.largest} at most"
            )
        if used.sizes and used.residual is None and used.largest > 1:
            yield "two sizes make a line without an error: measure a third to know how good it is"
        if used.is_bent:
            yield (
                f"s(b) is no line (a measured size is {used.residual:.0%} off it): between "
                "measured sizes it was interpolated"
            )
        if used.sizes and needed is not None and needed != used.instances:
            yield (
                f"executions were measured beside {used.instances} and taken to be as long "
                f"beside {needed}: on one device instances slow each other, so measure again there"
            )
