"""Counts the outcomes of requests that a naming rule sent to a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from router.metrics.exposition import counters
from router.metrics.requests import PlainHistogram
from router.names.rules import NameRule
from router.record.access_log import AccessLine, line_of
from router.record.named import NamedModel
from router.record.request_record import CLIENT_LEFT, Attempt, RequestRecord

_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TARGETS = 1_000
_ANY = "any"  # revision
_OTHER = ("other", "other", "other")
_RESULTS = ("ok", "elsewhere", "refused", "failed", "client_left")
_LABELS = "rule model revision"

Target = tuple[str, str, str]  # the rule, the model, the revision


class NameMetrics:
    """Counts requests by naming rule and target model. Lifetime: process."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, ...], float] = {}  # by target and result
        self._first_token: dict[Target, PlainHistogram] = {}

    def expect(self, rule: NameRule) -> None:
        """Show the targets of a rule in the metrics from now on, even before a request was sent to
        them.
        """
        for target in rule.targets:
            self._key((rule.name, target.model, target.revision or _ANY))

    def forget(self, rules: Collection[str]) -> None:
        """Remove the targets of all rules that are not in `rules` from the metrics."""
        gone = [key for key in self._first_token if key != _OTHER and key[0] not in rules]
        for key in gone:
            del self._first_token[key]
            for result in _RESULTS:
                del self._results[*key, result]

    def count(self, record: RequestRecord) -> None:
        """Count a request that has ended.

        If another revision answered in place of the request's target, the target counts only as a
        failure, and only if it was tried.
        """
        name = record.name
        assert name is not None, "it had a rule"
        key, line = self._key((name.rule, name.model, name.revision or _ANY)), line_of(record, 0.0)
        result, own = _result(line), _attempts_at_target(record, name)
        by_target = bool(own) and own[-1] is record.last
        if result == "ok" and not by_target:
            result = "failed" if any(one.by_worker for one in own) else "elsewhere"
        self._results[*key, result] += 1
        if by_target and line.ttft_ms is not None:
            self._first_token[key].observe(line.ttft_ms / 1e3)

    def collect(self) -> Iterator[Metric]:
        """Yield both metric families with their current values."""
        yield counters(
            "warmroute_name_requests",
            "Requests that a rule of names sent to a target, by result: `ok`, `refused` (4xx), "
            "`failed` (also if another revision answered after a failure), `elsewhere` (another "
            "revision answered, because the target had no free worker) or `client_left`. Beyond "
            "1,000 targets the labels are `other`",
            f"{_LABELS} result",
            self._results,
        )
        family = HistogramMetricFamily(
            "warmroute_name_time_to_first_token_seconds",
            "Time from the arrival of a request with a rule of names to the first byte of "
            "its streamed answer",
            labels=_LABELS.split(),
        )
        to_text: Callable[[float], object] = floatToGoString
        bounds = [str(to_text(bound)) for bound in (*_SECONDS, float("inf"))]
        for key, histogram in self._first_token.items():
            counts, total_s = histogram.totals()
            sums = [float(sum(counts[: n + 1])) for n in range(len(counts))]
            family.add_metric(key, list(zip(bounds, sums, strict=True)), total_s)
        yield family

    def _key(self, target: Target) -> Target:
        """Return the labels under which a target is counted. If there are too many targets, all
        further ones share one set of labels.
        """
        if target in self._first_token:
            return target
        key = target if len(self._first_token) < _TARGETS else _OTHER
        if key not in self._first_token:
            self._first_token[key] = PlainHistogram("", "", _SECONDS)
            self._results |= {(*key, result): 0 for result in _RESULTS}
        return key


def _attempts_at_target(record: RequestRecord, name: NamedModel) -> Sequence[Attempt]:
    """Return those attempts of the request that were made at workers of the target's revision; all
    attempts if the target names no revision.
    """
    if name.revision is None:
        return record.attempts
    return [one for one in record.attempts if one.revision == name.revision]


def _result(line: AccessLine) -> str:
    if line.finish == "client_left" or line.status == CLIENT_LEFT:
        return "client_left"
    if line.status >= 500 or line.finish not in ("ok", "rejected", "deadline_exceeded"):
        return "failed"
    return "refused" if line.status >= 400 else "ok"
