"""The text that Prometheus scrapes, made in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


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
