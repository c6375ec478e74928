"""Cheap counters and histograms, and the text that Prometheus scrapes.

Whoever counts and whoever reads are on the same thread, the event loop's.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import generate_latest
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


class _Read(Collector):
    """Families as they were when somebody looked. Lifetime: scrape."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._families


async def exposition(collector: Collector) -> bytes:
    """Prometheus text, version 0.0.4.

    Counts are read at once, so that they belong together; their text is made in a thread: with a
    thousand workers it is two megabytes, and no stream waits for that.
    """
    families = _Read(list(collector.collect()))
    return await asyncio.to_thread(generate_latest, families)
