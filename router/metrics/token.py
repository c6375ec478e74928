"""What Prometheus hears of the check of our tokens against the workers'."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.wire.memo import MemoEncoder
from router.http.token_check import TokenCheck


class TokenCollector(Collector):
    """Reads the check's own counts, and the memo's. Lifetime: process."""

    def __init__(self, check: TokenCheck, encoder: MemoEncoder | None) -> None:
        self._check = check
        self._encoder = encoder

    def collect(self) -> Iterable[Metric]:
        """All families, as of now; those of models have a series for each that was checked."""
        yield from self._models()
        memo = self._encoder
        characters = CounterMetricFamily(
            "warmroute_tokenized_characters",
            "Characters of prompts that became ids, by encoding or from the memo",
            labels=["result"],
        )
        characters.add_metric(["encoded"], 0 if memo is None else memo.encoded_chars)
        characters.add_metric(["reused"], 0 if memo is None else memo.reused_chars)
        yield characters
        held = 0 if memo is None else memo.bytes
        yield GaugeMetricFamily("warmroute_token_memo_bytes", "Memory of the memo", value=held)

    def _models(self) -> Iterator[Metric]:
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
