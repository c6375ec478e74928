"""Tests of every trace format: what is read, the errors for what cannot be read, and the figures of
real files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.record.request_line import Best, Header, RequestLine, chain_bytes
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs, sessions
from tests.effort import examples
from tests.simulator.trace_lines import (
    AZURE,
    BURSTGPT,
    LOG_HEADING,
    LOGGED,
    MOONCAKE,
    PACKED,
    QWEN,
    ids,
    read,
    session,
    turn,
    with_,
    write,
)

SHARED = Path(__file__).parents[3].parent / "shared" / "traces"


@pytest.mark.parametrize("packed", PACKED)
def test_mooncake_traces_are_read_in_any_compression(tmp_path: Path, packed: str) -> None:
    lines = (MOONCAKE, "", {**MOONCAKE, "hash_ids": [0, 1], "session_id": 9, "output_length": 0})
    spec = write(tmp_path, *lines, packed=packed)
    one, two = read(spec)
    assert (one.at_ns, one.prompt_tokens, one.output_tokens) == (3_000_000_000, 1300, 52)
    assert (ids(one), one.session) == ([0, 1, 2], None)
    assert (ids(two), two.session, two.output_tokens) == ([0, 1], "9", 1)
    stream = open_jobs(spec)
    assert (stream.block_tokens, stream.errors.total, stream.name) == (512, 0, "trace")
    assert len(list(stream.jobs)) == 2
    assert stream.fraction_read() == 1.0


def test_qwen_sessions_are_named_by_their_root_chat(tmp_path: Path) -> None:
    child = {**QWEN, "chat_id": 8, "parent_chat_id": 7, "timestamp": 62}
    grandchild = {**QWEN, "chat_id": 9, "parent_chat_id": 8, "timestamp": 62.25}
    stranger = {**QWEN, "chat_id": 10, "parent_chat_id": 2, "timestamp": 63}
    spec = write(tmp_path, QWEN, child, grandchild, stranger)
    jobs = read(spec)
    assert [job.at_ns for job in jobs] == [0, 500_000_000, 750_000_000, 1_500_000_000]
    assert [job.session for job in jobs] == ["7", "7", "7", "2"]
    assert open_jobs(spec).block_tokens == 16
    assert [(name, len(turns)) for name, turns in sessions(iter(jobs))] == [("7", 3), ("2", 1)]


def test_the_request_log_is_sorted_by_arrival(tmp_path: Path) -> None:
    early = {**LOGGED, "at": 1_699_999_980.25, "output_tokens": None, "session": None}
    nobody = {**LOGGED, "model": None}
    other = {**LOGGED, "model": "n", "at": 1_700_000_001}
    spec = write(tmp_path, LOG_HEADING, LOGGED, early, nobody, LOG_HEADING, other)
    first, second, third = read(spec, format="requests?turns=false")
    assert (first.at_ns, second.at_ns, third.at_ns) == (0, 20_000_000_000, 20_750_000_000)
    assert (first.output_tokens, first.session) == (9, None)
    assert ids(second) == [1 << 63, 5]
    assert (second.session, second.tenant, second.priority) == ("1/s", "1/t", 2)
    assert third.session == "2/s"
    assert len(read(spec, format="requests?model=n")) == 1
    assert open_jobs(spec).errors.total == 0


def test_the_routers_own_request_log_is_read(tmp_path: Path) -> None:
    """The reader of traces reads the lines of the router's request log, made from the router's own
    Structs and encoded as it does.
    """
    line = RequestLine(
        at=1_700_000_000.123456,
        model="m",
        prompt_tokens=100,
        output_tokens=None,
        cached_tokens=32,
        block_size=32,
        chain=chain_bytes(np.array([3, (1 << 64) - 1, 5], np.uint64)),
        session="5e55",
        tenant=None,
        priority=-1,
        approximate=False,
        stream=True,
        worker=2,
        policy="hybrid",
        reason="kv",
        hit_tokens=64,
        attempts=1,
        status=200,
        error=None,
        ttft_ms=12.5,
        e2e_ms=100.0,
        candidates=(Best(2, 1.5, 64), Best(3, None, 0)),
    )
    heading = Header(started=1.0, policy="hybrid", workers=8)
    rows = [msgspec.json.encode(row).decode() for row in (heading, line)]
    stream = open_jobs(write(tmp_path, *rows))
    (job,) = stream.jobs
    assert (stream.block_tokens, stream.errors.total) == (32, 0)
    assert ids(job)[:3] == [3, (1 << 64) - 1, 5]
    assert len(job.ids) == 4  # its session has named its last, partial block
    assert (job.prompt_tokens, job.output_tokens, job.priority) == (100, 1, -1)


def test_a_log_with_different_block_sizes_is_read_one_model_at_a_time(tmp_path: Path) -> None:
    ones = [{**LOGGED, "at": 1_700_000_000 + n} for n in range(20)]
    other = {**LOGGED, "at": 1_700_000_100, "model": "n", "block_size": 8}
    spec = write(tmp_path, LOG_HEADING, *ones, other)
    stream = open_jobs(with_(spec, format="requests?model=n"))
    assert (stream.block_tokens, len(list(stream.jobs)), stream.errors.total) == (8, 1, 0)
    stream = open_jobs(with_(spec, format="requests?model=m"))
    assert (stream.block_tokens, len(list(stream.jobs)), stream.errors.total) == (16, 20, 0)
    stream = open_jobs(spec)
    assert len(list(stream.jobs)) == 20
    assert "choose one: --format 'requests?model=NAME'" in stream.errors[0]


def test_a_log_line_that_is_too_late_to_be_sorted_is_wrong(tmp_path: Path) -> None:
    late = {**LOGGED, "at": 1_700_004_000}
    too_late = {**LOGGED, "at": 1_699_990_000}
    spec = write(tmp_path, LOG_HEADING, LOGGED, late, too_late)
    stream = open_jobs(spec)
    assert len(list(stream.jobs)) == 2
    assert stream.errors.total == 1
    assert "line 4: timestamp: goes back" in stream.errors[0]


@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_azure_times_are_read_to_the_nanosecond(tmp_path: Path, zone: str) -> None:
    rows = ("2023-11-16 23:59:59.6805900", "2023-11-17 00:00:00.000000001", "2023-11-17 00:00:01")
    spec = write(tmp_path, AZURE, *(f"{row}{zone},374,{index}" for index, row in enumerate(rows)))
    jobs = read(spec)
    assert [job.at_ns for job in jobs] == [0, 319_410_001, 1_319_410_000]
    assert [job.output_tokens for job in jobs] == [1, 1, 2]
    assert len(jobs[0].ids) == 0


def test_burstgpt_traces_are_read(tmp_path: Path) -> None:
    spec = write(
        tmp_path,
        f"{BURSTGPT},Session ID",
        "5,ChatGPT,472,18,490,Conversation log,a",
        "7.5,GPT-4,100,0,100,API log,",
    )
    one, two = read(spec)
    assert (one.at_ns, one.prompt_tokens, one.output_tokens, one.session) == (0, 472, 18, "a")
    assert (two.at_ns, two.output_tokens, two.session) == (2_500_000_000, 1, None)


def test_sessions_keep_their_gaps_and_share_ids_only_with_their_agents(tmp_path: Path) -> None:
    spec = write(
        tmp_path,
        session(
            "a",
            turn(0, 130, [1, 2], think_time=0.0),
            turn(10, 260, [1, 4], think_time=4.5),
            turn(5000, 200, [1, 1], [9, 2], think_time=4900.0),
        ),
        session("a/agent_1", turn(0, 64, [1, 1]), t0=12.0),
        session("b", turn(0, 64, [1, 1])),
    )
    jobs = read(spec)
    assert [job.at_ns for job in jobs] == sorted(job.at_ns for job in jobs)
    told = dict(sessions(iter(jobs)))
    first, second, third = told["a"]
    start = first.at_ns
    assert [job.at_ns - start for job in (second, third)] == [10_000_000_000, 310_000_000_000]
    assert told["a/agent_1"][0].at_ns - start == 12_000_000_000
    assert [job.think_ns for job in told["a"]] == [0, 4_500_000_000, 300_000_000_000]
    assert ids(first) == ids(second)[:2]
    assert [int(value) for value in first.answer_ids] == ids(second)[2:3]
    assert len(second.answer_ids) == 0  # the third turn does not continue it
    assert ids(told["a/agent_1"][0]) == ids(first)[:1]
    assert ids(told["b"][0]) != ids(first)[:1]
    assert {(job.group, job.parent) for job in told["a"]} == {("a", None)}
    assert {(job.group, job.parent) for job in told["a/agent_1"]} == {("a", "a")}
    assert {(job.group, job.parent) for job in told["b"]} == {(None, None)}
    assert max(job.at_ns for job in read(spec, format="sessions?rate=100")) < 320_000_000_000


def test_a_sub_agents_pause_begins_at_its_parents_answer(tmp_path: Path) -> None:
    spec = write(
        tmp_path,
        session("a", turn(0, 64, [1, 1], api_time=7.5), turn(60, 64, [1, 1])),
        session("a/agent_1", turn(1, 64, [1, 1], think_time=0.0), t0=9.0),
        session("a/agent_2", turn(0, 64, [1, 1], think_time=0.0), t0=5.0),
        session("a/agent_3", turn(0, 64, [1, 1], think_time=0.0), t0=70.0),
    )
    told = dict(sessions(iter(read(spec))))
    pauses = [told[f"a/agent_{number}"][0].think_ns for number in (1, 2, 3)]
    assert pauses == [2_500_000_000, 0, None]  # the last answer's time was not recorded


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 10**9),
            st.integers(1, 5000),
            st.integers(1, 1000),
            st.booleans(),
            st.none() | st.text("ab", min_size=1, max_size=2),
        ),
        min_size=1,
        max_size=8,
    ),
    packed=st.sampled_from(sorted(PACKED)),
    first=st.integers(0, (1 << 63) - 20),
)
def test_a_written_trace_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], packed: str, first: int
) -> None:
    lines: list[str | dict[str, Any]] = []
    for at_ms, prompt, output, listed, name in sorted(rows, key=lambda row: int(row[0])):
        blocks = -(-prompt // 512) if listed else prompt // 512
        named = list(range(first, first + blocks))
        lines.append(
            {
                "timestamp": at_ms,
                "input_length": prompt,
                "output_length": output,
                "hash_ids": named,
                "session_id": name,
            }
        )
    jobs = read(write(tmp_path_factory.getbasetemp(), *lines, packed=packed))
    again = [
        {
            "timestamp": job.at_ns // 10**6,
            "input_length": job.prompt_tokens,
            "output_length": job.output_tokens,
            "hash_ids": ids(job),
            "session_id": job.session,
        }
        for job in jobs
    ]
    assert again == lines


REAL = {  # requests, mean input, distinct ids: from the traces' own page
    "mooncake_conversation.jsonl.gz": (12_031, 12_035, 182_790),
    "toolagent_surrogate.jsonl.gz": (23_608, 8_627, 181_553),
    "azure_2023_conv.csv.gz": (19_366, 1_155, 0),
    "agentic_coding_merged.jsonl.gz": (17_394, 109_322, 174_968),
    "agentic_coding_sessions.jsonl.gz": (37_837, None, None),
}


@pytest.mark.parametrize("name", REAL)
def test_real_traces_have_the_expected_figures(name: str) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name}: not beside this checkout")
    requests, mean_tokens, distinct = REAL[name]
    stream = open_jobs(WorkloadSpec(str(path)))
    seen: set[int] = set()
    count = tokens = last_ns = 0
    for job in stream.jobs:
        assert job.at_ns >= last_ns
        last_ns = job.at_ns
        count, tokens = count + 1, tokens + job.prompt_tokens
        if distinct is not None:
            seen.update(job.ids.tolist())
    assert (count, stream.errors.total) == (requests, 0)
    if mean_tokens is not None:
        assert round(tokens / count) == mean_tokens
        assert len(seen) == distinct
