"""Counts and histograms that cost a request an addition: Prometheus' own take a lock each time.

Whoever counts and whoever reads are on the same thread, the event loop's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class PlainCounter(Collector):
    """Lifetime: process."""

    def __init__(self, name: str, text: str) -> None:
        self.value = 0.0
        self._name = name
        self._text = text

    def inc(self, by: float = 1.0) -> None:
        """Count `by` more, which must not be negative."""
        self.value += by

    def collect(self) -> Iterable[Metric]:
        """The one family."""
        yield CounterMetricFamily(self._name, self._text, value=self.value)


class PlainHistogram(Collector):
    """Lifetime: process."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        """`bounds`: the upper ones of all buckets but the last, which has none; ascending."""
        self._name = name
        self._text = text
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value into the first bucket whose bound is not below it."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def totals(self) -> tuple[tuple[int, ...], float]:
        """How many values fell into each bucket alone, the last without a bound; their sum."""
        return tuple(self._counts), self._sum

    def collect(self) -> Iterable[Metric]:
        """The one family; a bucket holds those before it, too."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((str(floatToGoString(bound)), total))  # type: ignore[no-untyped-call]
        yield HistogramMetricFamily(self._name, self._text, buckets, sum_value=self._sum)
