"""Tests that every request ends once, and the same way each time, whatever happens to the
workers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.replay.faults import KINDS
from simulator.replay.result import NEVER, ReplayResult, Verdict
from simulator.replay.setup import Setup, World
from simulator.traces.job import Job
from tests.effort import examples
from tests.oracles.virtual_worker import plain_workers
from tests.simulator.replays import job, pool, run, setup_of

WORKERS = 3
HORIZON_S = 8.0


@st.composite
def faults(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw a timeline of any faults on workers that exist from the start."""
    items = []
    for kind in draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=8)):
        item: dict[str, Any] = {"do": kind, "at_s": draw(st.floats(0.0, HORIZON_S))}
        keys = KINDS[kind]
        if "worker" in keys:
            item["worker"] = draw(st.integers(0, WORKERS - 1))
        if "factor" in keys:
            item["factor"] = draw(st.sampled_from((0.25, 1.0, 3.0, 50.0)))
        if "for_s" in keys:
            item["for_s"] = draw(st.floats(0.001, 9.0))
        items.append(item)
    return items


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "pause_ms": st.sampled_from((0.0, 1.0, 30.0, 200.0)),
            "prompt": st.sampled_from((640, 200, 16, 15, 1, 1500)),
            "output": st.sampled_from((2, 1, 30, 300)),
            "trunk": st.integers(0, 3),
            "own": st.integers(4, 8),
            "session": st.sampled_from((None, "a", "b")),
            "think_ns": st.sampled_from((None, 0, 50_000_000)),
            "priority": st.integers(0, 1),
        }
    ),
    max_size=60,
)


def jobs_of(requests: list[dict[str, Any]]) -> list[Job]:
    """Return a workload with few sessions, shared prefixes and sizes. Some prompts fit no worker;
    the first prompt fits.
    """
    at_ms, made = 0.0, [job(0.0, 200, 30)]
    for request in requests:
        at_ms += request["pause_ms"]
        rest = {key: value for key, value in request.items() if key != "pause_ms"}
        made.append(job(at_ms, **rest))
    return made


JOBS = REQUESTS.map(jobs_of)
SETUPS = st.builds(
    setup_of,
    st.sampled_from(("round_robin", "hybrid", "kv_prefix", "tests.simulator.replays:at_most_two")),
    st.builds(pool, st.just(WORKERS), kv_tokens=st.sampled_from((1400, 2400, 100_000))),
    seed=st.integers(0, 3),
    closed_loop=st.booleans(),
    world=st.builds(
        World,
        network_ms=st.sampled_from((0.0, 0.5, 40.0)),
        events=st.sampled_from((True, True, False)),
        event_lag_ms=st.sampled_from((0.0, 1.0, 300.0)),
        event_loss=st.sampled_from((0.0, 0.3)),
        resync_ms=st.sampled_from((0.0, 50.0, 2000.0)),
        report_every_ms=st.sampled_from((0.0, 250.0)),
        report_lag_ms=st.sampled_from((0.0, 700.0)),
        progress_ms=st.sampled_from((0.0, 250.0)),
    ),
)


def replayed(made: list[Job], setup: Setup, timeline: list[dict[str, Any]]) -> ReplayResult:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "faults.yaml"
        path.write_text(yaml.safe_dump(timeline))
        return run(made, msgspec.structs.replace(setup, faults=str(path)))


def digest(result: ReplayResult) -> bytes:
    """Return the whole table of a replay's requests as bytes."""
    columns = (getattr(result.table, name) for name in result.table.__slots__)
    return b"".join(column.tobytes() for column in columns)


@settings(max_examples=examples(60), deadline=None)
@given(JOBS, SETUPS, faults())
def test_every_request_has_exactly_one_end(
    made: list[Job], setup: Setup, timeline: list[dict[str, Any]]
) -> None:
    result = replayed(made, setup, timeline)
    table = result.table
    done, failed = table.verdict == Verdict.COMPLETED, table.verdict == Verdict.FAILED
    rejected = table.verdict == Verdict.REJECTED
    assert len(table) == len(made)
    assert (done | failed | rejected).all()
    assert sum(result.rejections.values()) == rejected.sum()
    assert (np.diff(table.arrival_ns) >= 0).all()

    assert sorted(table.prompt_tokens.tolist()) == sorted(one.prompt_tokens for one in made)
    sent = table.attempts > 0
    assert (table.dispatched_ns[sent] >= table.arrival_ns[sent]).all()
    assert (table.worker[~sent] == NEVER).all()
    begun = done | failed
    assert (table.first_token_ns[begun] > table.dispatched_ns[begun]).all()
    assert (table.first_token_ns[rejected] == NEVER).all()
    assert (table.finish_ns[done] >= table.first_token_ns[done]).all()
    assert (table.finish_ns[~done] == NEVER).all()
    assert (table.output_tokens[begun] >= 1).all()
    assert (table.hit_tokens[begun] >= 0).all()
    assert (table.hit_tokens[begun] < table.prompt_tokens[begun]).all()
    assert sum(total.requests for total in result.workers) == table.attempts.sum()
    if not any(item["do"] in ("die", "restart", "hang") for item in timeline):
        assert not failed.any()
        assert set(result.rejections) <= {"kv_capacity", "no_worker_available", "hold_timeout"}


@settings(max_examples=examples(25), deadline=None)
@given(JOBS, SETUPS, faults())
def test_a_repeated_replay_and_one_with_python_workers_are_identical(
    made: list[Job], setup: Setup, timeline: list[dict[str, Any]]
) -> None:
    one = replayed(made, setup, timeline)
    again = replayed(made, setup, timeline)
    with plain_workers():
        plain = replayed(made, setup, timeline)
    assert digest(one) == digest(again) == digest(plain)
    assert one.samples.running.tobytes() == plain.samples.running.tobytes()
    assert one.workers == again.workers == plain.workers
    assert one.notes == plain.notes
