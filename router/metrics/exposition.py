"""The text that Prometheus scrapes, made in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Rows = Mapping[Any, float]  # a label's value, or a tuple of such -> number


class Families(Collector):
    """Families that a function makes whenever somebody looks. Lifetime: process, or scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """All of them, as of now."""
        return self._read()


def counter(name: str, text: str, value: float) -> Metric:
    """A counter without labels."""
    return CounterMetricFamily(name, text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def counters(name: str, text: str, labels: str, rows: Rows) -> Metric:
    """A counter for each row; `labels`: their names, with a blank between them."""
    return _filled(CounterMetricFamily(name, text, labels=labels.split()), rows)


def gauges(name: str, text: str, labels: str, rows: Rows) -> Metric:
    """A gauge for each row, as `counters`."""
    return _filled(GaugeMetricFamily(name, text, labels=labels.split()), rows)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, rows: Rows) -> Metric:
    for values, number in rows.items():
        family.add_metric((values,) if isinstance(values, str) else values, number)
    return family


async def exposition(collector: Collector) -> bytes:
    """Prometheus text, version 0.0.4.

    Counts are read at once, so that they belong together; their text is made in a thread: with a
    thousand workers it is two megabytes, and no stream waits for that.
    """
    read = list(collector.collect())
    families = Families(lambda: read)
    return await asyncio.to_thread(generate_latest, families)
