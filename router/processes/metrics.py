"""What Prometheus hears of a router's processes; all else it hears as of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.http.prompts import PromptReader
from router.processes.trouble import Trouble

if TYPE_CHECKING:
    from router.processes.leading import Leading


class ProcessCollector(Collector):
    """Reads what the leader knows. Lifetime: process."""

    def __init__(self, leading: Leading) -> None:
        self._leading = leading

    def collect(self) -> Iterable[Metric]:
        """All families, as of now."""
        leading, usages = self._leading, list(self._leading.usages())
        running = GaugeMetricFamily(
            "warmroute_processes", "Processes that serve clients, by role", labels=["role"]
        )
        count = Counter(role for _, role, _ in usages)
        for role in ("leader", "satellite"):
            running.add_metric([role], count[role])
        cpu = CounterMetricFamily(
            "warmroute_process_cpu_seconds", "CPU time of a process", labels=["process", "role"]
        )
        memory = GaugeMetricFamily(
            "warmroute_process_resident_bytes",
            "Resident memory of a process",
            labels=["process", "role"],
        )
        for seat, role, usage in usages:
            cpu.add_metric([str(seat), role], usage.cpu_s)
            memory.add_metric([str(seat), role], usage.resident_bytes)
        restarts = CounterMetricFamily(
            "warmroute_process_restarts", "Processes started anew, by role", labels=["role"]
        )
        restarts.add_metric(["leader"], leading.restarts.leaders)
        restarts.add_metric(["satellite"], leading.restarts.satellites)
        lost = CounterMetricFamily(
            "warmroute_lost_satellites",
            "Satellites that ended with requests open, whose loads were released",
            value=leading.lost_lines,
        )
        yield from (running, cpu, memory, restarts, lost)


class SatelliteCollector(Collector):
    """What a satellite counts that nothing else shows. Lifetime: process."""

    def __init__(self, unanswered: Trouble, reader: PromptReader) -> None:
        self._unanswered = unanswered
        self._reader = reader

    def collect(self) -> Iterable[Metric]:
        """Both families, as of now."""
        yield CounterMetricFamily(
            "warmroute_unanswered_requests",
            "Requests refused with 503 because the deciding process did not answer",
            value=self._unanswered.count,
        )
        yield CounterMetricFamily(
            "warmroute_template_refusals",
            "Prompts that the tokenizer or its chat template refused, placed approximately",
            value=self._reader.template_refusals,
        )
