"""What Prometheus hears of the check of our tokens against the workers'."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.http.token_check import TokenCheck


class TokenCollector(Collector):
    """Reads the check's own counts. Lifetime: process."""

    def __init__(self, check: TokenCheck) -> None:
        self._check = check

    def collect(self) -> Iterable[Metric]:
        """Both families, as of now; a series for each model that was checked."""
        mismatches = CounterMetricFamily(
            "warmroute_tokenizer_mismatch",
            "Prompts and probes whose tokens differ from the worker's, by model",
            labels=["model"],
        )
        exact = GaugeMetricFamily(
            "warmroute_tokenizer_exact",
            "1 while prompts of a model are placed by their tokens, 0 while by text",
            labels=["model"],
        )
        for model, trusted in self._check.exact():
            mismatches.add_metric([model], self._check.mismatches[model])
            exact.add_metric([model], 1 if trusted else 0)
        yield mismatches
        yield exact
