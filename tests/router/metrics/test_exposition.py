"""Tests of the text of metrics: counts are read on the event loop's thread, and the text is made on
another thread.
"""

from __future__ import annotations

import threading

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.metrics.exposition import exposition


class _Counting(Collector):
    def __init__(self) -> None:
        self.threads: list[int] = []

    def collect(self):
        self.threads.append(threading.get_ident())
        workers = GaugeMetricFamily("held", "Requests that wait", labels=["worker"])
        for worker in range(100):
            workers.add_metric([str(worker)], worker / 3)
        yield workers
        yield CounterMetricFamily("sent", 'Requests "sent"\nto workers', value=7)


async def test_the_text_equals_that_of_prometheus_client() -> None:
    counting = _Counting()
    assert await exposition(counting) == generate_latest(counting)


async def test_counts_are_read_once_and_on_the_event_loops_thread() -> None:
    counting = _Counting()
    await exposition(counting)
    assert counting.threads == [threading.get_ident()]
