"""Makes the text that Prometheus scrapes, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Rows = Mapping[Any, float]  # a label's value, or a tuple of labels' values -> number


class Families(Collector):
    """A Prometheus collector that calls a function for its metric families at each scrape.
    Lifetime: process, or scrape.
    """

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return all families with their present values."""
        return self._read()


def counter(name: str, text: str, value: float) -> Metric:
    """Return a counter family with one value and no labels; `text` is its help text."""
    return CounterMetricFamily(name, text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge family with one value and no labels; `text` is its help text."""
    return GaugeMetricFamily(name, text, value=value)


def counters(name: str, text: str, labels: str, rows: Rows) -> Metric:
    """Return a counter family with one series for each row; `labels` has the names of the labels,
    separated by blanks.
    """
    return _filled(CounterMetricFamily(name, text, labels=labels.split()), rows)


def gauges(name: str, text: str, labels: str, rows: Rows) -> Metric:
    """Return a gauge family with one series for each row; `labels` has the names of the labels,
    separated by blanks.
    """
    return _filled(GaugeMetricFamily(name, text, labels=labels.split()), rows)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, rows: Rows) -> Metric:
    for values, number in rows.items():
        family.add_metric((values,) if isinstance(values, str) else values, number)
    return family


async def exposition(collector: Collector) -> bytes:
    """Return the metrics as Prometheus text, version 0.0.4.

    All counts are read at once, so that they are consistent. The text is made in a thread, because
    with a thousand workers it has two megabytes, and streams must not wait for it.
    """
    read = list(collector.collect())
    families = Families(lambda: read)
    return await asyncio.to_thread(generate_latest, families)
