"""Tests of Weka's traces of coding agents: main agents, sub-agents, and which request waits for
which.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.traces.job import Job, TraceError
from simulator.traces.session_file import MAX_LOCAL_ID
from simulator.workloads.open import open_jobs, sessions
from tests.effort import examples
from tests.simulator.replays import run, setup_of
from tests.simulator.trace_lines import read, write

S = 1_000_000_000


def call(t: float, hash_ids: list[int], tokens: int | None = None, **more: Any) -> dict[str, Any]:
    size = 64 * len(hash_ids) if tokens is None else tokens
    known = {"type": "n", "model": "m", "t": t, "in": size, "out": 10, "hash_ids": hash_ids}
    return known | more


def child(t: float, agent_id: str, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    known = {"type": "subagent", "t": t, "agent_id": agent_id, "status": "completed"}
    return known | {"subagent_type": "Explore", "requests": list(calls), "models": []} | more


def trace(name: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    known = {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    return known | {"tool_tokens": 5, "requests": list(requests), "totals": {"x": 1}} | more


FAMILY = trace(
    "a",
    call(0.0, [1, 2], api_time=1.5),
    child(2.0, "x", call(2.5, [7, 8], api_time=1.0), call(4.0, [7, 8, 9], think_time=0.5)),
    child(2.0, "y", call(0.5, [7, 6])),  # counts from its own start
    child(3.0, "z", call(3.0, [5]), status="async_launched"),
    call(9.0, [1, 2, 3], think_time=7.5, type="s", ttft=0.2),
)


def sessions_by_name(jobs: list[Job]) -> dict[str | None, list[Job]]:
    return dict(sessions(iter(jobs)))


def test_a_trace_with_sub_agents_is_read(tmp_path: Path) -> None:
    spec = write(tmp_path, FAMILY)
    jobs = read(spec)
    assert [job.at_ns for job in jobs] == sorted(job.at_ns for job in jobs)
    assert {job.group for job in jobs} == {"a"}
    agents = sessions_by_name(jobs)
    assert sorted(map(str, agents)) == ["a", "a/x", "a/y", "a/z"]
    assert [job.parent for job in jobs if job.session != "a"] == ["a"] * 4
    start = agents["a"][0].at_ns
    at_s = {name: [(job.at_ns - start) / S for job in turns] for name, turns in agents.items()}
    assert at_s == {"a": [0, 9], "a/x": [2.5, 4], "a/y": [2.5], "a/z": [3]}
    assert agents["a"][1].waits_for == ("a/x", "a/y")
    pauses = {name: turns[0].think_ns for name, turns in agents.items()}
    assert pauses == {"a": None, "a/x": S, "a/y": S, "a/z": 1_500_000_000}
    assert (agents["a"][1].think_ns, agents["a/x"][1].think_ns) == (0, S // 2)


def test_ids_name_prefixes_within_one_trace(tmp_path: Path) -> None:
    """Ids name prefixes within one trace: block 8 after block 7 is another prefix than block 8
    after block 9, and different traces share nothing.
    """
    jobs = read(
        write(
            tmp_path,
            trace("a", call(0, [7, 8]), call(1, [7, 8, 1]), call(2, [9, 8])),
            trace("b", call(0, [7, 8])),
        )
    )
    one, grown, other, stranger = [
        [*map(int, job.ids)] for job in sorted(jobs, key=lambda job: (job.session, job.at_ns))
    ]
    assert grown[:2] == one
    assert other[1] != one[1]
    assert not {*stranger} & {*one, *other, *grown}


def test_a_partial_last_block_is_left_out_and_answers_come_from_the_next_turn(
    tmp_path: Path,
) -> None:
    first, second = read(
        write(tmp_path, trace("a", call(0, [1, 2, 3], 130), call(5, [1, 2, 4, 5], 256)))
    )
    assert len(first.ids) == 2
    assert [*first.ids] == [*second.ids[:2]]
    assert len(first.answer_ids) == 0  # 140 tokens fill no block more
    assert first.group is None


def test_long_gaps_are_shortened(tmp_path: Path) -> None:
    spec = write(tmp_path, trace("a", call(0, [1]), call(4000, [1, 2], think_time=3999.0)))
    first, second = read(spec, format="weka?gap_s=60")
    assert second.at_ns - first.at_ns == 60 * S
    assert second.think_ns == 60 * S


def test_two_runs_of_one_agent_are_two_sessions(tmp_path: Path) -> None:
    jobs = read(
        write(
            tmp_path,
            trace(
                "a", call(0, [1]), child(1, "x", call(1, [2])), child(2, "x", call(2, [3])),
                call(3, [1, 4]),
            ),
        )
    )  # fmt: skip
    assert sorted(str(name) for name in sessions_by_name(jobs)) == ["a", "a/x", "a/x#2"]
    assert sessions_by_name(jobs)["a"][1].waits_for == ("a/x", "a/x#2")


def test_a_closed_loop_waits_for_sub_agents(tmp_path: Path) -> None:
    jobs = read(write(tmp_path, FAMILY))
    table = run(jobs, setup_of(closed_loop=True, block_size=64)).table
    by_prompt = {int(n): row for row, n in enumerate(table.prompt_tokens.tolist())}
    last, slow = by_prompt[192], max(
        row for row, n in enumerate(table.prompt_tokens.tolist()) if n in (192, 128)
        and row != by_prompt[192]
    )  # fmt: skip
    assert table.arrival_ns[last] >= table.finish_ns[slow]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (trace("b", call(0, [1, 2, 3], 64)), r"requests\[0\].hash_ids: 3 ids; expected 1"),
        (trace("b", call(0, [], 64)), r"requests\[0\].hash_ids: 0 ids; expected 1"),
        (trace("b", call(0, [1]), child(1, "x")), r"requests\[1\]: a sub-agent needs"),
        (
            trace("b", call(0, [1]), child(1, "x", call(1, [1, 2, 3], 64))),
            r"requests\[1\].requests\[0\].hash_ids: 3 ids",
        ),
        (trace("b", child(0, "x", call(0, [1]))), "has no request of a main agent"),
        (trace("b", {"type": "n", "t": 0}), "needs `in`, `out` and `hash_ids`"),
        (trace("b", call(0, [MAX_LOCAL_ID + 1])), "Expected `int` <="),
        (trace("b", call(-1, [1])), "Expected `float` >="),
        (trace("b", call(0, [1], type="x")), "Invalid enum value 'x'"),
        (trace("b", call(0, [1]), block_size=16), "block_size: 16; expected 64"),
        (trace("b", call(0, [1]), hash_id_scope="global"), "Invalid enum value 'global'"),
        (trace("a", call(0, [1])), "is the id of an earlier trace"),
        (trace("b"), "Expected `array` of length >= 1"),
    ],
)
def test_unreadable_lines_are_reported(tmp_path: Path, line: dict[str, Any], says: str) -> None:
    spec = write(tmp_path, FAMILY, line)
    stream = open_jobs(spec)
    assert len(list(stream.jobs)) == 6
    (message,) = stream.errors
    assert "line 2" in message
    assert re.search(says, message), message


def test_a_file_without_requests_is_no_trace(tmp_path: Path) -> None:
    stream = open_jobs(write(tmp_path, trace("a", call(0, []), block_size=64)))
    with pytest.raises(TraceError, match="none of its lines is a request"):
        list(stream.jobs)


SMALL = st.floats(0, 1e5, allow_nan=False)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
CALLS = st.builds(lambda t, ids: call(t, ids), SMALL, st.lists(st.integers(0, 9), max_size=4))
ENTRIES = CALLS | st.builds(
    lambda t, name, calls, status: child(t, name, *calls, status=status),
    SMALL, st.text("xy", max_size=2), st.lists(CALLS, max_size=3),
    st.sampled_from(["completed", "async_launched", ""]),
)  # fmt: skip


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(st.lists(ENTRIES, min_size=1, max_size=6), min_size=1, max_size=4), ANY, st.data())
def test_any_file_is_read_or_reported_as_wrong(
    tmp_path_factory: pytest.TempPathFactory, traces: list[Any], junk: Any, data: st.DataObject
) -> None:
    lines = [trace(f"t{number}", *entries) for number, entries in enumerate(traces)]
    if data.draw(st.booleans()):
        lines[0] |= {data.draw(st.sampled_from(sorted(lines[0]))): junk}
    spec = write(tmp_path_factory.getbasetemp(), *lines)
    try:
        stream = open_jobs(spec)
        jobs = list(stream.jobs)
    except TraceError:
        return
    assert [job.at_ns for job in jobs] == sorted(job.at_ns for job in jobs)
    names = {job.session for job in jobs}
    for job in jobs:
        assert job.prompt_tokens >= 1
        assert len(job.ids) == job.prompt_tokens // 64
        assert {*job.waits_for} <= names
        assert job.parent is None or job.parent in names
    read_lines = len({job.group or job.session for job in jobs})
    assert read_lines + stream.errors.total == len(lines)
