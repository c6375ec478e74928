"""Tests of the metrics of model names: results, first tokens, and a bound on the number
of targets.
"""

from __future__ import annotations

import numpy as np
from prometheus_client import generate_latest

from policies.facts import Arrival
from router.core.contract.actions import Decision, Dispatch, Stage
from router.http.errors import ClientError, WorkerError
from router.http.reply import Outcome
from router.metrics.exposition import Families
from router.names.metrics import NameMetrics
from router.names.rules import weighted_of
from router.record.named import NamedModel
from router.record.request_record import Attempt, RequestRecord


def record(name: NamedModel, outcome: Outcome | None = None, **more: object) -> RequestRecord:
    chain = {16: np.zeros(0, np.uint64)}
    arrival = Arrival(0.0, 1, name.model, 9, chain)
    attempts = []
    if outcome is not None:
        decision = Decision("p", "policy", 0, 9, (), False)
        attempts = [Attempt(arrival, Dispatch(1, (Stage(0, "both"),), decision), 0.0)]
        attempts[0].end(outcome, 1.0)
        attempts[0].revision = name.revision
    return RequestRecord(0.0, 2.0, arrival, attempts, name=name, **more)  # type: ignore[arg-type]


def shown(metrics: NameMetrics) -> dict[str, float]:
    lines = generate_latest(Families(metrics.collect)).decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {series.removeprefix("warmroute_name_"): float(value) for series, _, value in rows}


NAME = NamedModel("chat", "chat", "llama", "v2")
LABELS = 'model="llama",revision="v2",rule="chat"'
RESULTS = ("ok", "elsewhere", "failed", "refused", "client_left")


def requests(result: str) -> str:
    return f'requests_total{{model="llama",result="{result}",revision="v2",rule="chat"}}'


def test_results_and_first_tokens_are_counted_per_target() -> None:
    metrics = NameMetrics()
    good = Outcome(0.0, 200, first_byte_s=0.15)
    metrics.count(record(NAME, good))
    metrics.count(record(NAME, Outcome(0.0, 503, WorkerError("status_5xx", "x"))))
    metrics.count(record(NAME, Outcome(0.0, 200, WorkerError("early_close", "x"), 9)))
    metrics.count(record(NAME, Outcome(0.0, 400)))
    metrics.count(record(NAME, refused=(503, "no_worker_available")))
    metrics.count(record(NAME, refused=(429, "hold_queue_full")))
    metrics.count(record(NAME, broke="client_left"))
    left = ClientError(499, "x", code="client_closed")
    metrics.count(record(NAME, Outcome(0.0, 200, left, 9, first_byte_s=0.15)))
    found = shown(metrics)
    results = {result: found[requests(result)] for result in RESULTS}
    assert results == {"ok": 1, "elsewhere": 0, "failed": 3, "refused": 2, "client_left": 2}
    of = "time_to_first_token_seconds"
    assert found[f"{of}_count{{{LABELS}}}"] == 2
    assert found[f'{of}_bucket{{le="0.1",{LABELS}}}'] == 0
    assert found[f'{of}_bucket{{le="0.2",{LABELS}}}'] == 2


def test_targets_have_metrics_before_any_request() -> None:
    metrics = NameMetrics()
    metrics.expect(weighted_of("chat=llama@v1:9,llama@v2:1"))
    found = shown(metrics)
    assert found[requests("ok")] == 0
    assert sum(series.startswith("requests_total") for series in found) == 2 * len(RESULTS)


def test_the_number_of_targets_is_bounded() -> None:
    metrics = NameMetrics()
    good = Outcome(0.0, 200, first_byte_s=0.15)
    for n in range(1_100):
        metrics.count(record(NamedModel(f"n{n}", f"n{n}", "m"), good))
    found = shown(metrics)
    counts = [value for series, value in found.items() if series.startswith("requests_total")]
    assert len(counts) == len(RESULTS) * 1_001
    assert max(counts) == 100


def test_an_answer_of_another_revision_is_no_success_of_the_target() -> None:
    metrics, good = NameMetrics(), Outcome(0.0, 200, first_byte_s=0.15)
    failed = record(NAME, Outcome(0.0, 500, WorkerError("status_5xx", "x")))
    for first in ([*failed.attempts], []):  # it failed at its target, or had no worker there
        other = record(NAME, good)
        other.attempts[0].revision = "v1"
        other.attempts[:0] = first  # type: ignore[index]
        metrics.count(other)
    found = shown(metrics)
    assert [found[requests(result)] for result in RESULTS] == [0, 1, 1, 0, 0]
    assert not found[f"time_to_first_token_seconds_count{{{LABELS}}}"]


def test_removed_rules_have_no_metrics() -> None:
    metrics = NameMetrics()
    metrics.expect(weighted_of("chat=llama@v2:1,llama@v1:1"))
    metrics.expect(weighted_of("gone=llama@v2:1,llama@v1:1"))
    metrics.forget({"chat"})
    assert all('rule="chat"' in series for series in shown(metrics))
    assert shown(metrics)[requests("ok")] == 0
