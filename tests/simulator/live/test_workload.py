"""Tests of generated workloads: their shape, their order, their bounds."""

from __future__ import annotations

import pytest

from simulator.live.load import Workload, WorkloadError, opened
from simulator.traces.spec import WorkloadSpec


def test_a_source_with_too_many_or_no_requests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = WorkloadSpec("gen:vllm?requests=50&rate=10")
    workload = opened(spec, "prefixes", "test")
    assert len(workload.jobs) == 50
    assert workload.span_s == workload.jobs[-1].at_ns / 1e9
    monkeypatch.setattr("simulator.live.load.MAX_REQUESTS", 49)
    with pytest.raises(WorkloadError, match="more than 49 requests"):
        opened(spec, "prefixes", "test")
    with pytest.raises(WorkloadError, match="no requests"):
        Workload("nothing", (), 16, "test")
