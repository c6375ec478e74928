"""Tests of wrong lines and of files that are no traces: the error is clear, and nothing else is
printed.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import TraceError, open_jobs
from tests.effort import examples
from tests.simulator.trace_lines import (
    ACCESS,
    AZURE,
    CHAT,
    GOOD,
    LOG_HEADING,
    LOGGED,
    MOONCAKE,
    QWEN,
    export,
    read,
    session,
    span,
    turn,
    with_,
    write,
)

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
    "chats": [
        ({**CHAT, "messages": "secret"}, "messages"),
        ({**CHAT, "messages": []}, "messages: is empty"),
        ({**CHAT, "messages": [{"role": 1}]}, "messages[0].role: expected a string"),
        ({**CHAT, "messages": [{"role": "user", "content": 7}]}, "messages[0].content: expected"),
        ({**CHAT, "messages": None, "prompt": ["a", "b"]}, "prompt: has several texts"),
        ({**CHAT, "messages": None, "prompt": [1, -1]}, "prompt: a token id is beyond"),
        ({**CHAT, "messages": None, "prompt": [1 << 31]}, "prompt: a token id is beyond"),
        ({**CHAT, "messages": None}, "neither `messages` nor `prompt` nor `input`"),
        ({**CHAT, "messages": None, "input": []}, "input: expected a text or a list of items"),
        ({**CHAT, "messages": None, "input": 7}, "input: expected a text or a list of items"),
        ({**CHAT, "messages": None, "input": ["secret"]}, "input: expected a text or a list of it"),
        ({**CHAT, "timestamp": -1}, "timestamp: is no time"),
        ({**CHAT, "timestamp": "nan"}, "timestamp: is no time"),
        ({**CHAT, "timestamp": "secret"}, "timestamp: is no time; expected seconds or"),
        ({**CHAT, "timestamp": None}, "has no time, as earlier lines have"),
        ({**CHAT, "timestamp": 1_600_000_000}, "goes back, 1e+08 s before an earlier line"),
        ({**CHAT, "usage": {"completion_tokens": 1 << 40}}, "completion_tokens"),
        ({**CHAT, "usage": {"prompt_tokens": -1}}, "prompt_tokens"),
        ('{"messages": ' + "[" * 5000 + "}", "line 2"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 2"),
    ],
    "access_log": [
        ({**ACCESS, "prompt_tokens": -1}, "prompt_tokens"),
        ({**ACCESS, "prompt_tokens": 1 << 40}, "prompt_tokens"),
        ({**ACCESS, "at": None}, "at"),
        ({**ACCESS, "at": 1_600_000_000}, "goes back, 1e+08 s"),
    ],
    "otel": [
        (export(span(1.7e9, usage__input_tokens=-5)), "gen_ai.usage.input_tokens: expected a"),
        (export(span(1.7e9, usage__input_tokens=1 << 40)), "gen_ai.usage.input_tokens"),
        (export(span(1.7e9, usage__input_tokens="secret")), "a whole number in 0.."),
        (export(span(-1, usage__input_tokens=5)), "startTimeUnixNano: expected nanoseconds"),
        (export(span(1.6e9, usage__input_tokens=5)), "goes back, 1e+08 s"),
        (export(span(1.7e9, input__messages=["secret"])), "input.messages[0]: expected an obj"),
        (export(span(1.7e9, input__messages='[{"parts": []}]')), "messages[0].role"),
        ({"resourceSpans": 1}, "resourceSpans"),
        (export({"startTimeUnixNano": "1", "attributes": 1}), "attributes"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "line", "said"), [(kind, *case) for kind, cases in BAD.items() for case in cases]
)
def test_a_wrong_line_is_reported_and_left_out(
    tmp_path: Path, kind: str, line: str | dict[str, Any], said: str
) -> None:
    good = GOOD[kind]
    spec = write(tmp_path, *good, line)
    stream = open_jobs(spec)
    assert len(list(stream.jobs)) == 1
    assert stream.errors.total == len(stream.errors) == 1
    assert said in stream.errors[0]
    assert "secret" not in stream.errors[0]
    assert f"{spec.source}, line {len(good) + 1}: " in stream.errors[0]
    with pytest.raises(TraceError, match=f"line {len(good) + 1}"):
        read(spec, strict=True)


def test_messages_are_bounded_and_too_many_wrong_lines_end_the_reading(tmp_path: Path) -> None:
    stream = open_jobs(write(tmp_path, *[MOONCAKE] * 30, *["x"] * 10))
    assert len(list(stream.jobs)) == 30
    assert stream.errors.total == 10
    with pytest.raises(TraceError, match="11 of its 41 lines are wrong"):
        list(open_jobs(write(tmp_path, *[MOONCAKE] * 30, *["x"] * 11)).jobs)
    for late in (0, 990, 1985):
        lines = [*[MOONCAKE] * (1 + late), *["x"] * 20, *[MOONCAKE] * 1000]
        stream = open_jobs(write(tmp_path, *lines))
        if late == 1985:  # 20 of more than 2,000
            assert len(list(stream.jobs)) == 2986
            assert (stream.errors.total, len(stream.errors)) == (20, 10)
        else:
            with pytest.raises(TraceError, match=r"too many to go on; the first: .*line"):
                list(stream.jobs)


def test_the_error_names_the_one_line_without_a_time_or_far_ahead(tmp_path: Path) -> None:
    lines = [{**CHAT, "timestamp": 1_790_000_000 + second} for second in range(300)]
    untimed = {key: value for key, value in CHAT.items() if key != "timestamp"}
    for at, line, said in (
        (0, untimed, "299 of its 300 lines are wrong.*line 2: timestamp: is a time"),
        (9, {**CHAT, "timestamp": 1_790_010_000}, "290 of its 300.*line 11: timestamp: goes back"),
    ):
        with pytest.raises(TraceError, match=said):
            list(open_jobs(write(tmp_path, *lines[:at], line, *lines[at + 1 :])).jobs)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no requests"),
        (b"\n \n", "holds no requests"),
        (b"hello\n", "of no known format"),
        (json.dumps([CHAT, CHAT], indent=1).encode(), "one JSON object a line, which `jq -c"),
        (json.dumps(CHAT, indent=1).encode(), "one JSON object a line, which `jq -c"),
        (b"\x1f\x8bnot gzip at all", "damaged"),
        (gzip.compress(json.dumps(MOONCAKE).encode() * 500, mtime=0)[:-20], "damaged"),
        (zstandard.compress(json.dumps(MOONCAKE).encode())[:-6] + b"......", "damaged"),
        (AZURE.encode(), "holds no requests"),
        (AZURE.encode() + b"\nx,y,z\n", "none of its lines is a request"),
    ],
)
def test_the_error_for_a_file_that_is_no_trace_names_it(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said) as caught:
        read(WorkloadSpec(str(path)))
    assert str(path) in str(caught.value)


@settings(max_examples=examples(40), deadline=None)
@given(frames=st.lists(st.integers(1, 300), min_size=1, max_size=3), data=st.data())
def test_truncated_compressed_files_are_reported(
    tmp_path_factory: pytest.TempPathFactory, frames: list[int], data: st.DataObject
) -> None:
    """A cut in a packed file is found wherever it is, unless only whole frames are left."""
    path = tmp_path_factory.getbasetemp() / "cut"
    pack = data.draw(st.sampled_from([gzip.compress, zstandard.compress]))
    line = json.dumps(MOONCAKE).encode() + b"\n"
    packed = [pack(line * count) for count in frames]
    whole = b"".join(packed)
    path.write_bytes(whole)
    assert len(read(WorkloadSpec(str(path)))) == sum(frames)
    ends = {sum(map(len, packed[:index])) for index in range(1, len(packed) + 1)}
    cut = data.draw(st.integers(5, len(whole) - 1).filter(lambda at: at not in ends))
    path.write_bytes(whole[:cut])
    with pytest.raises(TraceError, match=r"damaged|no known format|no requests"):
        read(WorkloadSpec(str(path)))


@pytest.mark.parametrize("kind", ["mooncake", "chats", "sessions", "requests"])
def test_an_incomplete_last_line_is_reported_as_a_truncated_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    whole = "".join(f"{json.dumps(line)}\n" for line in GOOD[kind])
    path.write_text(whole + json.dumps(GOOD[kind][-1])[:-5])
    stream = open_jobs(WorkloadSpec(str(path)))
    assert list(stream.jobs)
    assert f"line {len(GOOD[kind]) + 1}: " in stream.errors[0]
    assert "the file seems cut off in the middle of this line; copy the whole" in stream.errors[0]
    path.write_text(whole + json.dumps(GOOD[kind][-1])[:-5] + "\n")
    stream = open_jobs(WorkloadSpec(str(path)))
    assert list(stream.jobs)
    assert "cut off" not in stream.errors[0], "somebody wrote the line's end"


def test_missing_and_special_files_are_refused(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none", "No such file"), (tmp_path, "holds no part of a trace")):
        with pytest.raises(TraceError, match=said):
            open_jobs(WorkloadSpec(str(path)))
    with pytest.raises(TraceError, match="no file has such a name"):
        open_jobs(WorkloadSpec(str(tmp_path / "part-*")))
    os.mkfifo(tmp_path / "pipe")  # no process writes to it
    for device in ("/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(TraceError, match="not a regular file"):
            open_jobs(WorkloadSpec(device))


@pytest.mark.parametrize("change", [{}, {"speed": 1e-300}, {"speed": 1e-12}, {"rate_per_s": 1e-9}])
def test_a_pause_of_a_month_is_refused(tmp_path: Path, change: dict[str, float]) -> None:
    far = {**MOONCAKE, "timestamp": 2_000_000 if change else 10_000_000_000}
    with pytest.raises(TraceError, match=r"a pause of .* s .*expected at most 2592000 s"):
        read(write(tmp_path, MOONCAKE, far), **change)
    assert len(read(write(tmp_path, MOONCAKE, {**MOONCAKE, "timestamp": 2_000_000_000}))) == 2


def test_the_memory_for_sorting_a_log_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{**LOGGED, "at": 1_700_000_000 + at} for at in (0, 2, 1, 4, 3, 6, 5, 0)]
    spec = write(tmp_path, LOG_HEADING, *lines)
    assert [job.at_ns for job in read(spec)] == [n * 10**9 for n in (0, 0, 1, 2, 3, 4, 5, 6)]
    for bound, value in (("MAX_HELD_JOBS", 2), ("MAX_HELD_BYTES", 1000)):
        with monkeypatch.context() as patch:
            patch.setattr(f"simulator.traces.formats.{bound}", value)
            stream = open_jobs(spec)
            # The last line comes after all lines that should follow it.
            assert [job.at_ns for job in stream.jobs] == [n * 10**9 for n in range(7)]
            assert "timestamp: goes back, 6 s" in stream.errors[0]


@pytest.mark.parametrize(
    "change", [{"spread_s": 1e300}, {"seconds": 1e300}, {"block_tokens": 10**20}]
)
def test_options_out_of_range_are_refused(tmp_path: Path, change: dict[str, float]) -> None:
    with pytest.raises(TraceError, match=r"expected (0\.\.|at most )"):
        read(write(tmp_path, MOONCAKE), **change)


def test_a_too_long_line_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.traces.files.MAX_LINE_BYTES", 100)
    stream = open_jobs(write(tmp_path, MOONCAKE, "x" * 1050, MOONCAKE))
    assert len(list(stream.jobs)) == 2
    assert "line 2: longer than 100 bytes" in stream.errors[0]
    with pytest.raises(TraceError, match=r"none of its lines is a request; .*longer than 100"):
        open_jobs(write(tmp_path, "x" * 1050))


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    for kind, good in GOOD.items():
        spec = write(tmp_path, *good)
        path = Path(spec.source)
        plain = read(spec)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
        marked = open_jobs(spec)
        assert len(list(marked.jobs)) == len(plain), kind
        assert marked.errors.total == 0


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


@settings(max_examples=examples(60), deadline=None)
@given(
    kind=st.sampled_from(sorted(GOOD)),
    garbage=st.lists(st.binary(max_size=60), max_size=4),
    data=st.data(),
)
def test_any_damaged_file_raises_only_a_trace_error(
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
