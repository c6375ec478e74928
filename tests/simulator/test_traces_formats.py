"""Every trace format: what is read, what is said about what cannot be read, real files' figures."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from router.record.request_line import chain_bytes
from simulator.replay.setup import WorkloadSpec
from simulator.sample import SAMPLE_PATH
from simulator.traces.job import Job
from simulator.traces.open import TraceError, open_jobs, sessions
from tests.effort import EFFORT

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
MOONCAKE = {"timestamp": 3000, "input_length": 1300, "output_length": 52, "hash_ids": [0, 1, 2]}
QWEN = {
    "chat_id": 7,
    "parent_chat_id": -1,
    "timestamp": 61.5,
    "input_length": 40,
    "output_length": 9,
    "type": "text",
    "turn": 1,
    "hash_ids": [12, 13, 14],
}
LOGGED = {
    "at": 1_700_000_000.25,
    "model": "m",
    "prompt_tokens": 40,
    "output_tokens": 9,
    "block_size": 16,
    "chain": base64.b64encode(chain_bytes(np.array([1 << 63, 5], dtype=np.uint64))).decode(),
    "session": "s",
    "tenant": "t",
    "priority": 2,
}
LOG_HEADING = {"format": "warmroute-requests", "version": 1, "started": 1.0, "workers": 8}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": lambda data: zstandard.compress(data),
}


def write(folder: Path, *lines: str | dict[str, Any], packed: str = "plain") -> WorkloadSpec:
    """A trace whose name says nothing about what it is."""
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path = folder / "trace"
    path.write_bytes(PACKED[packed](text.encode()))
    return WorkloadSpec(str(path))


def read(spec: WorkloadSpec, **changes: Any) -> list[Job]:
    return list(open_jobs(with_(spec, **changes)).jobs)


def with_(spec: WorkloadSpec, **changes: Any) -> WorkloadSpec:
    return msgspec.structs.replace(spec, **changes)


def ids(job: Job) -> list[int]:
    assert job.ids.dtype == np.uint64
    return [int(value) for value in job.ids]


@pytest.mark.parametrize("packed", PACKED)
def test_mooncake_however_it_is_packed(tmp_path: Path, packed: str) -> None:
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


def test_qwen_sessions_are_the_root_chats(tmp_path: Path) -> None:
    child = {**QWEN, "chat_id": 8, "parent_chat_id": 7, "timestamp": 62}
    grandchild = {**QWEN, "chat_id": 9, "parent_chat_id": 8, "timestamp": 62.25}
    stranger = {**QWEN, "chat_id": 10, "parent_chat_id": 2, "timestamp": 63}
    spec = write(tmp_path, QWEN, child, grandchild, stranger)
    jobs = read(spec)
    assert [job.at_ns for job in jobs] == [0, 500_000_000, 750_000_000, 1_500_000_000]
    assert [job.session for job in jobs] == ["7", "7", "7", "2"]
    assert open_jobs(spec).block_tokens == 16
    assert [(name, len(turns)) for name, turns in sessions(iter(jobs))] == [("7", 3), ("2", 1)]


def test_the_request_log_is_put_in_order_of_arrival(tmp_path: Path) -> None:
    early = {**LOGGED, "at": LOGGED["at"] - 20.0, "output_tokens": None, "session": None}  # type: ignore[operator]
    nobody = {**LOGGED, "model": None}
    other = {**LOGGED, "model": "n", "at": 1_700_000_001}
    spec = write(tmp_path, LOG_HEADING, LOGGED, early, nobody, LOG_HEADING, other)
    first, second, third = read(spec)
    assert (first.at_ns, second.at_ns, third.at_ns) == (0, 20_000_000_000, 20_750_000_000)
    assert (first.output_tokens, first.session) == (9, None)
    assert ids(second) == [1 << 63, 5]
    assert (second.session, second.tenant, second.priority) == ("1/s", "1/t", 2)
    assert third.session == "2/s"
    assert len(read(spec, format="requests?model=n")) == 1
    assert open_jobs(spec).errors.total == 0


def test_a_log_line_older_than_what_is_held_is_wrong(tmp_path: Path) -> None:
    late = {**LOGGED, "at": 1_700_004_000}
    too_late = {**LOGGED, "at": 1_699_990_000}
    spec = write(tmp_path, LOG_HEADING, LOGGED, late, too_late)
    stream = open_jobs(spec)
    assert len(list(stream.jobs)) == 2
    assert stream.errors.total == 1
    assert "line 4: timestamp: goes back" in stream.errors[0]


@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_azure_to_the_nanosecond(tmp_path: Path, zone: str) -> None:
    rows = ("2023-11-16 23:59:59.6805900", "2023-11-17 00:00:00.000000001", "2023-11-17 00:00:01")
    spec = write(tmp_path, AZURE, *(f"{row}{zone},374,{index}" for index, row in enumerate(rows)))
    jobs = read(spec)
    assert [job.at_ns for job in jobs] == [0, 319_410_001, 1_319_410_000]
    assert [job.output_tokens for job in jobs] == [1, 1, 2]
    assert len(jobs[0].ids) == 0


def test_burstgpt(tmp_path: Path) -> None:
    spec = write(
        tmp_path,
        f"{BURSTGPT},Session ID",
        "5,ChatGPT,472,18,490,Conversation log,a",
        "7.5,GPT-4,100,0,100,API log,",
    )
    one, two = read(spec)
    assert (one.at_ns, one.prompt_tokens, one.output_tokens, one.session) == (0, 472, 18, "a")
    assert (two.at_ns, two.output_tokens, two.session) == (2_500_000_000, 1, None)


def turn(t: float, tokens: int, *runs: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "in": tokens, "out": 70, "hash_runs": runs, **more}


def session(name: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "requests": requests, **more}


def test_sessions_keep_their_gaps_and_share_ids_with_their_agents_only(tmp_path: Path) -> None:
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
    assert len(second.answer_ids) == 0  # the third turn does not go on from it
    assert ids(told["a/agent_1"][0]) == ids(first)[:1]
    assert ids(told["b"][0]) != ids(first)[:1]
    assert max(job.at_ns for job in read(spec, format="sessions?rate=100")) < 320_000_000_000


BAD = {
    "mooncake": [
        ("{nonsense", "malformed"),
        ("[1, 2]", "Expected `object`"),
        ({**MOONCAKE, "input_length": "many"}, "input_length"),
        ({**MOONCAKE, "input_length": 0}, "input_length"),
        ({**MOONCAKE, "input_length": 99999999}, "input_length"),
        ({**MOONCAKE, "output_length": -1}, "output_length"),
        ({**MOONCAKE, "hash_ids": [0]}, "hash_ids: 1 of them"),
        ({**MOONCAKE, "hash_ids": [0, 1, 2, 3]}, "hash_ids: 4 of them"),
        ({**MOONCAKE, "hash_ids": [0, 1, -2]}, "hash_ids"),
        ({**MOONCAKE, "hash_ids": [0, 1, 1 << 80]}, "hash_ids"),
        ({**MOONCAKE, "timestamp": 2999}, "timestamp: goes back, 0.001 s"),
        ({**MOONCAKE, "timestamp": 1e300}, "timestamp"),
        ({key: MOONCAKE[key] for key in list(MOONCAKE)[1:]}, "timestamp"),
        ('{"timestamp": ' + "[" * 5000 + "}", "line 2"),
    ],
    "qwen": [
        ({**QWEN, "chat_id": "x"}, "chat_id"),
        ({**QWEN, "hash_ids": [1]}, "hash_ids"),
        ({**QWEN, "timestamp": -1}, "timestamp"),
    ],
    "requests": [
        ({**LOGGED, "chain": "AAAA"}, "chain has 3 bytes"),
        ({**LOGGED, "chain": "?"}, "chain"),
        ({**LOGGED, "at": None}, "at: is missing"),
        ({**LOGGED, "block_size": 32}, "block_size: 32; expected 16"),
        ({**LOGGED, "prompt_tokens": 17}, "chain: 2 blocks"),
        ({**LOG_HEADING, "version": 2}, "version 2"),
    ],
    "azure": [
        ("2023-11-16 18:15:46.68,374", "2 columns"),
        ("2023-11-16 18:15,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:46+05:00,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:47.6_8,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:46,0,44", "ContextTokens"),
        ("2023-11-16 18:15:46,374,4.5", "GeneratedTokens"),
        ("2023-11-15 18:15:46,374,4", "goes back"),
    ],
    "burstgpt": [("nan,ChatGPT,472,18,490,log", "Timestamp"), ("1e99,m,1,1,2,log", "Timestamp")],
    "sessions": [
        (session("x", turn(0, 64, [1, 2])), "requests[0].hash_runs: 2 ids; expected 1"),
        (session("x", turn(5, 10), turn(4, 10)), "requests[1].t: goes back"),
        (session("x/agent", turn(0, 10)), "sub-agent of no session"),
        ({**session("x", turn(0, 10)), "block_size": 16}, "block_size"),
        (session("x"), "requests"),
        (session("x", turn(0, 64, [(1 << 32) - 1, 1])), "an id above"),
    ],
}
GOOD: dict[str, tuple[str | dict[str, Any], ...]] = {
    "mooncake": (MOONCAKE,),
    "qwen": (QWEN,),
    "requests": (LOG_HEADING, LOGGED),
    "azure": (AZURE, "2023-11-16 18:15:47.6805900,374,44"),
    "burstgpt": (BURSTGPT, "5,ChatGPT,472,18,490,Conversation log"),
    "sessions": (session("a", turn(0, 64, [1, 1])),),
}


@pytest.mark.parametrize(
    ("kind", "line", "said"), [(kind, *case) for kind, cases in BAD.items() for case in cases]
)
def test_a_wrong_line_is_named_and_left_out(
    tmp_path: Path, kind: str, line: str | dict[str, Any], said: str
) -> None:
    good = GOOD[kind]
    spec = write(tmp_path, *good, line)
    stream = open_jobs(spec)
    assert len(list(stream.jobs)) == 1
    assert stream.errors.total == len(stream.errors) == 1
    assert said in stream.errors[0]
    assert f"{spec.source}, line {len(good) + 1}: " in stream.errors[0]
    with pytest.raises(TraceError, match=f"line {len(good) + 1}"):
        read(spec, strict=True)


def test_messages_are_bounded_and_too_many_wrong_lines_end_the_reading(tmp_path: Path) -> None:
    spec = write(tmp_path, *[MOONCAKE] * 30, *["x"] * 30)
    stream = open_jobs(spec)
    assert len(list(stream.jobs)) == 30
    assert (stream.errors.total, len(stream.errors)) == (30, 10)
    for late in (0, 990, 1985):
        lines = [*[MOONCAKE] * (1 + late), *["x"] * 20, *[MOONCAKE] * 1000]
        stream = open_jobs(write(tmp_path, *lines))
        if late == 1985:  # 20 of more than 2,000
            assert len(list(stream.jobs)) == 2986
        else:
            with pytest.raises(TraceError, match=r"too many to go on; the first: .*line"):
                list(stream.jobs)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no requests"),
        (b"\n \n", "holds no requests"),
        (b"hello\n", "of no known format"),
        (b"\x1f\x8bnot gzip at all", "damaged"),
        (gzip.compress(json.dumps(MOONCAKE).encode() * 500)[:-20], "damaged"),
        (zstandard.compress(json.dumps(MOONCAKE).encode())[:-6] + b"......", "damaged"),
        (AZURE.encode(), "holds no requests"),
        (AZURE.encode() + b"\nx,y,z\n", "none of its lines is a request"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said) as caught:
        read(WorkloadSpec(str(path)))
    assert str(path) in str(caught.value)


def test_what_is_not_there_or_not_a_file(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(TraceError, match=said):
            open_jobs(WorkloadSpec(str(path)))
    with pytest.raises(TraceError, match="not a regular file"):
        open_jobs(WorkloadSpec("/dev/zero"))


def test_a_line_without_end_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.traces.files.MAX_LINE_BYTES", 100)
    stream = open_jobs(write(tmp_path, MOONCAKE, "x" * 1050, MOONCAKE))
    assert len(list(stream.jobs)) == 2
    assert "line 2: longer than 100 bytes" in stream.errors[0]


@pytest.mark.parametrize(
    ("format", "said"),
    [
        ("kafka", "expected auto, qwen, mooncake"),
        ("mooncake?x=1", "unknown key 'x'; valid ones: none"),
        ("sessions?gap=1", "valid ones: gap_s, rate, span_s"),
        ("sessions?gap_s=x", "gap_s=x"),
        ("sessions?gap_s=1&gap_s=2", "each key once"),
    ],
)
def test_formats_and_their_keys_are_checked(tmp_path: Path, format: str, said: str) -> None:
    spec = with_(write(tmp_path, session("a", turn(0, 64, [1, 1]))), format=format)
    with pytest.raises(TraceError, match="(?s)" + said.replace("?", r"\?")):
        open_jobs(spec)


@settings(max_examples=60 * EFFORT, deadline=None)
@given(
    kind=st.sampled_from(sorted(GOOD)),
    garbage=st.lists(st.binary(max_size=60), max_size=4),
    data=st.data(),
)
def test_nothing_but_a_trace_error_ever(
    tmp_path_factory: pytest.TempPathFactory, kind: str, garbage: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    good = [line if isinstance(line, str) else json.dumps(line) for line in GOOD[kind]]
    raw = bytearray("\n".join(good).encode() + b"\n" + b"\n".join(garbage))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw))
    try:
        jobs = read(WorkloadSpec(str(path), format=kind))
    except TraceError:
        return
    for job in jobs:
        assert job.prompt_tokens >= 1
        assert job.output_tokens >= 1
        assert job.at_ns >= 0


@settings(max_examples=60 * EFFORT, deadline=None)
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
def test_what_is_written_is_read_again(
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
def test_real_traces_have_their_figures(name: str) -> None:
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


def test_the_sample_that_ships() -> None:
    stream = open_jobs(WorkloadSpec(str(SAMPLE_PATH)))
    jobs = list(stream.jobs)
    assert 800 < len(jobs) < 1200
    for _, turns in sessions(iter(jobs)):
        for before, after in pairwise(turns):
            full = before.prompt_tokens // 512
            assert ids(after)[:full] == ids(before)[:full]
