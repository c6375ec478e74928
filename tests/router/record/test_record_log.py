"""Tests of the lines of the request log: which facts of a request they contain and which they leave
out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from policies.facts import Arrival, WorkerFacts
from router.http.errors import ClientError, WorkerError
from router.record.request_line import FleetPart, hashes_of
from router.record.request_log import RequestLog, fleet_parts
from tests.router.record.record_log_support import (
    CHAIN,
    SIZE,
    arrival,
    line_of,
    log_request,
    log_served,
    ok_outcome,
    salted,
)


def test_a_line_contains_the_facts_of_a_served_request(tmp_path: Path) -> None:
    line = line_of(tmp_path / "log", lambda log: log_served(log, tenant="acme", priority=3))
    assert (line.at, line.e2e_ms, line.ttft_ms) == (1_000_009.0, 1000.0, 250.0)
    assert (line.prompt_tokens, line.output_tokens, line.cached_tokens) == (13, 5, 8)
    assert line.worker_prompt_tokens == 13
    known = salted(tmp_path / "log", CHAIN)
    assert known != CHAIN.tolist()
    assert (line.block_size, hashes_of(line.chain).tolist()) == (SIZE, known)
    assert (line.worker, line.policy, line.reason, line.hit_tokens) == (1, "hybrid", "policy", 8)
    assert [(c.worker, c.cost, c.hit_tokens) for c in line.candidates] == [
        (1, 0.5, 8),
        (0, None, 0),
    ]
    assert (line.attempts, line.status, line.error, line.priority) == (1, 200, None, 3)
    assert line.stream
    assert not line.approximate
    raw = (tmp_path / "log").read_text()
    assert "ann" not in raw
    assert "acme" not in raw


def test_the_chain_is_readable_with_any_json_parser(tmp_path: Path) -> None:
    import base64
    import json

    line_of(tmp_path / "log", log_served)
    fields = json.loads((tmp_path / "log").read_text().splitlines()[1])
    read = np.frombuffer(base64.b64decode(fields["chain"]), "<u8").tolist()
    assert read == salted(tmp_path / "log", CHAIN)


def test_without_a_stream_there_is_no_ttft_and_without_usage_events_count(
    tmp_path,
) -> None:
    def write_to(log: RequestLog) -> None:
        log_request(log, ok_outcome(usage=None), of=arrival(stream=False))

    line = line_of(tmp_path / "log", write_to)
    assert (line.ttft_ms, line.output_tokens, line.cached_tokens) == (None, 7, None)
    assert line.worker_prompt_tokens is None


def test_a_refused_request_has_no_ttft(tmp_path: Path) -> None:
    def write_to(log: RequestLog) -> None:
        log_request(log, ok_outcome(status=400, usage=None, events=0))

    line = line_of(tmp_path / "log", write_to)
    assert (line.status, line.ttft_ms, line.error) == (400, None, None)


def test_a_request_refused_by_the_router_has_a_reason_and_no_worker(tmp_path: Path) -> None:
    def write_to(log: RequestLog) -> None:
        log_request(log, refused=(503, "router_full"))

    line = line_of(tmp_path / "log", write_to)
    assert (line.status, line.reason, line.worker, line.attempts) == (503, "router_full", None, 0)
    assert (line.policy, line.hit_tokens, line.candidates, line.error) == (None, None, (), None)
    assert (line.model, line.block_size) == ("m", SIZE)


def test_an_unserved_model_is_left_out_because_the_client_wrote_it(tmp_path: Path) -> None:
    def write_to(log: RequestLog) -> None:
        log_request(log, of=Arrival(9.0, 1, "my secret", 3, {}), refused=(404, "model_not_found"))

    line = line_of(tmp_path / "log", write_to)
    assert (line.model, line.block_size, line.chain, line.status) == (None, None, b"", 404)


def test_attempts_are_counted_and_the_last_one_is_recorded(tmp_path: Path) -> None:
    def write_to(log: RequestLog) -> None:
        failed = ok_outcome(status=None, error=WorkerError("connect", "x"), usage=None)
        log_request(log, failed, ok_outcome())

    line = line_of(tmp_path / "log", write_to)
    assert (line.attempts, line.worker, line.status, line.error) == (2, 0, 200, None)


@pytest.mark.parametrize(
    ("broke", "status", "told"),
    [("client_left", 499, "client"), ("internal_error", 500, "internal_error")],
)
def test_a_handler_that_ends_early_gets_a_status_and_an_error(
    tmp_path: Path, broke: Any, status: int, told: str
) -> None:
    def write_to(log: RequestLog) -> None:
        log_request(log, None, broke=broke)

    line = line_of(tmp_path / "log", write_to)
    assert (line.status, line.error, line.attempts) == (status, told, 1)


def test_an_error_after_the_first_byte_keeps_status_200(tmp_path: Path) -> None:
    def write_to(log: RequestLog) -> None:
        log_request(log, ok_outcome(error=ClientError(499, "left"), usage=None))

    line = line_of(tmp_path / "log", write_to)
    assert (line.status, line.error, line.output_tokens) == (200, "client", 7)


def test_equal_workers_are_one_part_of_the_header() -> None:
    alike = WorkerFacts("a", ("m",), 16, kv_capacity_tokens=1600.0)
    other = WorkerFacts("b", ("m",), 64, max_requests=8.0, role="decode")
    parts = fleet_parts([alike, other, alike])
    assert parts == (FleetPart(2, 16, 1600), FleetPart(1, 64, None, "decode", 8.0))
    told = json.loads(msgspec.json.encode(parts[0]))
    assert told == {"count": 2, "block_size": 16, "kv_tokens": 1600}
