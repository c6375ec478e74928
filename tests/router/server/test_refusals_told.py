"""Tests that every reason for a refusal is documented for operators and is a Prometheus metric from
the start.
"""

from __future__ import annotations

import time
from pathlib import Path

from router.collectors.ports_and_logs import server_metrics
from router.http.messages import GIVEN_UP, REFUSALS
from router.http.parser import PRIVATE
from router.server.server import HttpServer
from tests.router.server_support import LIMITS, TERMS

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
PAGE = "".join((REFERENCE / f"{n}.md").read_text(encoding="utf-8") for n in ("server", "errors"))


def test_every_refusal_reason_and_private_header_is_documented() -> None:
    assert [reason for reason in (*REFUSALS, *GIVEN_UP) if f"`{reason}`" not in PAGE] == []
    assert [name for name in PRIVATE if f"`{name.decode()}*`" not in PAGE] == []


def test_every_refusal_reason_has_a_metric_from_the_start() -> None:
    server = HttpServer(LIMITS, TERMS, (), time.monotonic)
    server.count("late_head")
    refusals, *_ = server_metrics(server)
    told = {sample.labels["reason"]: sample.value for sample in refusals.samples}
    assert told == dict.fromkeys((*REFUSALS, *GIVEN_UP), 0) | {"late_head": 1}


def test_repeated_refusals_are_logged_more_and_more_rarely(caplog) -> None:
    server = HttpServer(LIMITS, TERMS, (), time.monotonic)
    for _ in range(100):
        server.count("bad_chunk")
    assert len(caplog.records) == 7
    server.count("bad_version")
    assert caplog.messages[-1].startswith("turned away: bad_version (1 so far) at ")
    assert caplog.messages[-1].endswith("; gRPC has a port of its own (--grpc-port)")
