"""Tests of taking a part of a source, and of the pace at which it is played."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.traces.formats import read_jobs
from simulator.traces.job import MAX_WRONG_SHARE, MIN_LINES_JUDGED, NO_IDS, ErrorLog, Job
from simulator.traces.session_file import SessionOptions, starts_ns
from simulator.traces.spec import WorkloadSpec
from simulator.traces.timing import spread
from simulator.workloads.open import TraceError, open_jobs, sessions
from tests.effort import examples


def trace(tmp_path: Path, *times_ms: int, **more: Any) -> WorkloadSpec:
    path = tmp_path / "a_trace.jsonl"
    lines = [
        {"timestamp": at_ms, "input_length": 10, "output_length": 2, "hash_ids": []}
        for at_ms in times_ms
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return WorkloadSpec(str(path), **more)


def times_s(spec: WorkloadSpec) -> list[float]:
    return [job.at_ns / 1e9 for job in open_jobs(spec).jobs]


def test_a_part_of_a_trace_and_its_speed_can_be_chosen(tmp_path: Path) -> None:
    at = (0, 0, 0, 3000, 6000)
    assert times_s(trace(tmp_path, *at, spread_s=3.0)) == [0.0, 1.0, 2.0, 3.0, 6.0]
    assert times_s(trace(tmp_path, *at, spread_s=9.0)) == [0.0, 1.0, 2.0, 3.0, 6.0]
    assert times_s(trace(tmp_path, *at, speed=2.0)) == [0.0, 0.0, 0.0, 1.5, 3.0]
    assert times_s(trace(tmp_path, *at, requests=4)) == [0.0, 0.0, 0.0, 3.0]
    assert times_s(trace(tmp_path, *at, seconds=6.0)) == [0.0, 0.0, 0.0, 3.0]
    assert times_s(trace(tmp_path, *at, seconds=2.0, spread_s=3.0)) == [0.0, 1.0]
    assert times_s(trace(tmp_path, *at, skip_s=2.0)) == [1.0, 4.0]
    assert times_s(trace(tmp_path, *at, skip_s=3.0, seconds=3.0)) == [0.0]
    assert times_s(trace(tmp_path, *at, skip_s=1.5, spread_s=3.0, requests=2)) == [0.5, 1.5]
    # Four gaps in six seconds become four in two.
    assert times_s(trace(tmp_path, *at, rate_per_s=2.0)) == [0.0, 0.0, 0.0, 1.0, 2.0]
    # The rate is that of the part that is taken.
    assert times_s(trace(tmp_path, *at, rate_per_s=1.0, requests=4)) == [0.0, 0.0, 0.0, 3.0]


def test_a_stream_has_name_total_and_origin(tmp_path: Path) -> None:
    stream = open_jobs(trace(tmp_path, 0, 1000, rate_per_s=2.0, seconds=5.0))
    assert (stream.name, stream.total) == ("a_trace", 2)
    assert stream.origin == ("a_trace.jsonl (mooncake), first 5 s, at 2 requests per second")
    assert stream.fraction_read() <= 1.0
    assert "3 times as fast" in open_jobs(trace(tmp_path, 0, speed=3.0)).origin


def test_speed_shortens_pauses() -> None:
    slow, fast = (
        list(open_jobs(WorkloadSpec("gen:sessions?sessions=3", speed=speed), 1).jobs)
        for speed in (1.0, 4.0)
    )
    for one, other in zip(slow, fast, strict=True):
        assert other.at_ns == round(one.at_ns / 4)
        assert other.think_ns == round((one.think_ns or 0) / 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"speed": 0.0},
        {"speed": float("nan")},
        {"speed": float("inf")},
        {"rate_per_s": -1.0},
        {"seconds": 0.0},
        {"skip_s": -1.0},
        {"skip_s": float("nan")},
        {"spread_s": -1.0},
        {"requests": 0},
        {"block_tokens": 0},
        {"speed": 2.0, "rate_per_s": 1.0},
    ],
)
def test_the_error_for_a_value_out_of_range_names_it(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=next(iter(wrong))):
        open_jobs(trace(tmp_path, 0, **wrong))


def test_a_generator_has_no_start_to_skip() -> None:
    with pytest.raises(TraceError, match="skip_s 1: is for files"):
        open_jobs(WorkloadSpec("gen:sglang", skip_s=1.0))


def test_a_rate_needs_time_between_requests(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="all requests arrive at once"):
        open_jobs(trace(tmp_path, 7, 7, rate_per_s=1.0))


def test_the_number_of_requests_in_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job(0, 1, 1, NO_IDS)] * 5
    monkeypatch.setattr("simulator.traces.timing.MAX_SPREAD_JOBS", 4)
    with pytest.raises(TraceError, match="more than 4 requests at one instant"):
        list(spread(jobs, 1))
    monkeypatch.setattr("simulator.traces.sessions.MAX_SESSION_JOBS", 4)
    assert len(sessions(iter(jobs[:4]))) == 4
    with pytest.raises(TraceError, match="more than 4 requests"):
        sessions(iter(jobs))


@settings(max_examples=examples(200), deadline=None)
@given(ats=st.lists(st.integers(0, 60)), slack=st.integers(0, 20), most=st.integers(2, 9))
def test_late_lines_are_sorted_or_reported(ats: list[int], slack: int, most: int) -> None:
    """Late lines are sorted or refused. The expected order is a sort of the lines that are no more
    than `slack` older than the newest line before them.
    """
    fit = [at for i, at in enumerate(ats) if at >= max(ats[: i + 1]) - slack]
    errors = ErrorLog("log")
    lines = [(number, str(at).encode()) for number, at in enumerate(ats, 1)]

    def parse(raw: bytes) -> Job:
        return Job(int(raw), 1, 1, NO_IDS)

    if not ats:
        with pytest.raises(TraceError, match="holds no requests"):
            list(read_jobs(lines, parse, errors, slack))
        return
    in_order, refusal = _read(read_jobs(lines, parse, errors, slack))
    assert errors.total == len(ats) - len(fit)
    assert ("too many for a result" in refusal) == (errors.total > MAX_WRONG_LINES)
    # A refusal comes at the end of the source, so it only takes lines that still wait.
    assert in_order == sorted(fit)[: len(in_order)]
    assert refusal or len(in_order) == len(fit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simulator.traces.formats.MAX_HELD_JOBS", most)
        few_errors = ErrorLog("log")
        few, refusal = _read(read_jobs(lines, parse, few_errors, slack))
    assert few == sorted(few)
    assert ("too many for a result" in refusal) == (few_errors.total > MAX_WRONG_LINES)
    assert refusal or len(few) + few_errors.total == len(ats)


# Ten lines of a source with fewer than a thousand lines may be wrong.
MAX_WRONG_LINES = MAX_WRONG_SHARE * MIN_LINES_JUDGED


def _read(jobs: Iterator[Job]) -> tuple[list[int], str]:
    """Return the arrival times of `jobs`, and the error that ended the reading ("" for none)."""
    arrivals = []
    try:
        for job in jobs:
            arrivals.append(job.at_ns)
    except TraceError as error:
        return arrivals, str(error)
    return arrivals, ""


def test_sessions_start_uniformly_or_at_a_rate() -> None:
    starts = [at / 1e9 for at in starts_ns(SessionOptions(span_s=100.0), 2000, seed=1)]
    assert starts == sorted(starts)
    assert starts[0] >= 0
    assert starts[-1] < 100
    assert sum(starts) / 2000 == pytest.approx(50, abs=3)
    assert sum(at < 25 for at in starts) == pytest.approx(500, rel=0.15)
    assert starts == [at / 1e9 for at in starts_ns(SessionOptions(span_s=100.0), 2000, seed=1)]
    poisson = list(starts_ns(SessionOptions(rate=4.0), 2000, seed=1))
    assert poisson[-1] / 1e9 == pytest.approx(500, rel=0.1)


@settings(max_examples=examples(100), deadline=None)
@given(ats=st.lists(st.integers(0, 30)), span=st.integers(0, 50))
def test_spreading_keeps_order_count_and_time_ticks(ats: list[int], span: int) -> None:
    jobs = [Job(at, 1 + i, 1, np.zeros(0, np.uint64)) for i, at in enumerate(sorted(ats))]
    after = list(spread(jobs, span))
    assert [job.prompt_tokens for job in after] == [job.prompt_tokens for job in jobs]
    assert [job.at_ns for job in after] == sorted(job.at_ns for job in after)
    for one, moved in zip(jobs, after, strict=True):
        later = [at for at in ats if at > one.at_ns]
        assert one.at_ns <= moved.at_ns <= min([one.at_ns + span, *later])
