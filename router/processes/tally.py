"""Counts of all processes as one: satellites tell theirs, the leader adds them to its own.

What a satellite counted stays counted when it ends; what it only measured (a gauge) goes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from router.processes.figures import Counted, Family

_Key = tuple[str, tuple[tuple[str, str], ...]]  # name of a sample, its labels in their order
_KINDS = ("counter", "gauge", "histogram")
_FAMILIES, _SAMPLES = 1_000, 20_000  # of one satellite, at most


def families_of(collectors: Iterable[Collector]) -> tuple[Family, ...]:
    """What these collectors show now."""
    return tuple(
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            tuple(
                Counted(sample.name, tuple(sample.labels.items()), sample.value)
                for sample in metric.samples
                if not sample.name.endswith("_created")  # a moment, not to be added up
            ),
        )
        for collector in collectors
        for metric in collector.collect()
        if metric.type in _KINDS
    )


class Tally:
    """What satellites counted. Lifetime: process."""

    def __init__(self) -> None:
        self._heads: dict[str, tuple[str, str]] = {}  # family -> text, kind
        self._latest: dict[object, tuple[Family, ...]] = {}  # by line
        self._past: dict[str, dict[_Key, float]] = {}  # of those that ended, by family

    def take(self, line: object, families: tuple[Family, ...]) -> None:
        """What the satellite at `line` counts by now; what is too much of it is left out."""
        kept, room = [], _SAMPLES
        for family in families[:_FAMILIES]:
            room -= len(family.samples)
            if room >= 0 and family.kind in _KINDS:
                self._heads.setdefault(family.name, (family.text, family.kind))
                kept.append(family)
        self._latest[line] = tuple(kept)

    def retire(self, line: object) -> None:
        """The satellite ended."""
        for family in self._latest.pop(line, ()):
            if family.kind != "gauge":
                _add(self._past.setdefault(family.name, {}), family)

    def added_to(self, metrics: Iterable[Metric]) -> Iterator[Metric]:
        """`metrics`, our own, with what satellites counted of the same, and of others."""
        sums = {name: dict(values) for name, values in self._past.items()}
        for families in self._latest.values():
            for family in families:
                _add(sums.setdefault(family.name, {}), family)
        for metric in metrics:
            more = sums.pop(metric.name, None)
            yield metric if more is None else _joined(metric, more)
        for name, values in sums.items():
            text, kind = self._heads[name]
            yield _joined(Metric(name, text, kind), values)


def _add(values: dict[_Key, float], family: Family) -> None:
    for sample in family.samples:
        key = (sample.name, sample.labels)
        values[key] = values.get(key, 0.0) + sample.value


def _joined(metric: Metric, more: Mapping[_Key, float]) -> Metric:
    left = dict(more)
    whole = Metric(metric.name, metric.documentation, metric.type)
    for sample in metric.samples:
        value = sample.value + left.pop((sample.name, tuple(sample.labels.items())), 0.0)
        whole.samples.append(sample._replace(value=value))
    for (name, labels), value in left.items():
        whole.samples.append(Sample(name, dict(labels), value))
    return whole
