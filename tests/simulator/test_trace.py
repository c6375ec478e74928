"""The trace reader: what it reads, and what it says about what it cannot read."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import pytest

from simulator.sample import SAMPLE_PATH, conversation_sample, write_sample
from simulator.trace import TraceError, TraceRow, read_trace, spread_ticks

GOOD = '{"timestamp": 3000, "input_length": 1300, "output_length": 52, "hash_ids": [0, 1, 2]}'


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_reads_rows_plain_and_gzip(tmp_path: Path) -> None:
    plain = write(tmp_path, GOOD, "", GOOD.replace("}", ', "session_id": "s1", "model": "m"}'))
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    expected = [
        TraceRow(3.0, 1300, 52, (0, 1, 2)),
        TraceRow(3.0, 1300, 52, (0, 1, 2), session="s1"),
    ]
    assert list(read_trace(plain)) == expected
    assert list(read_trace(packed)) == expected


def test_reads_traces_that_list_full_blocks_only(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("[0, 1, 2]", "[0, 1]"))
    assert next(read_trace(path)).hash_ids == (0, 1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{nonsense", "malformed"),
        ("[1, 2]", "Expected `object`"),
        (GOOD.replace("1300", '"many"'), "input_length"),
        (GOOD.replace("1300", "0"), "input_length"),
        (GOOD.replace("1300", "99999999"), "input_length"),
        (GOOD.replace("52", "-1"), "output_length"),
        (GOOD.replace("[0, 1, 2]", "[0]"), "hash_ids"),
        (GOOD.replace("[0, 1, 2]", "[0, 1, 2, 3]"), "hash_ids"),
        (GOOD.replace("[0, 1, 2]", "[0, 1, -2]"), "hash_ids"),
        (GOOD.replace("[0, 1, 2]", "[0, 1, 99999999999999999999]"), "hash_ids"),
        (GOOD.replace("3000", "2999"), "timestamp"),
        (GOOD.replace("3000", "1e400"), "timestamp"),
        (GOOD.replace('"timestamp": 3000, ', ""), "timestamp"),
        ('{"timestamp": ' + "[" * 5000 + "}", "line 2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(TraceError, match="line 2") as caught:
        list(read_trace(path))
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_line_without_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.trace.MAX_LINE_BYTES", 100)
    with pytest.raises(TraceError, match="line 2: longer than 100 bytes"):
        list(read_trace(write(tmp_path, GOOD, "x" * 200)))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing\.jsonl"):
        list(read_trace(tmp_path / "missing.jsonl"))
    fake = tmp_path / "fake.gz"
    fake.write_text(GOOD)
    with pytest.raises(TraceError, match=r"fake\.gz"):
        list(read_trace(fake))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress((GOOD + "\n").encode() * 500)[:-20])
    with pytest.raises(TraceError, match=r"cut\.gz"):
        list(read_trace(cut))


def test_ticks_are_spread_evenly_and_stay_in_order() -> None:
    rows = [TraceRow(at, 1, 1, (0,)) for at in (0.0, 0.0, 0.0, 3.0, 4.0, 4.0)]
    times = [row.arrival_s for row in spread_ticks(rows, 3.0)]
    assert times == [0.0, 1.0, 2.0, 3.0, 4.0, 5.5]
    assert list(spread_ticks([], 3.0)) == []


def test_the_shipped_sample_is_what_its_command_writes(tmp_path: Path) -> None:
    made = tmp_path / "sample.jsonl.gz"
    write_sample(made, conversation_sample())
    assert gzip.decompress(made.read_bytes()) == gzip.decompress(SAMPLE_PATH.read_bytes())
    assert SAMPLE_PATH.stat().st_size <= 100_000


def test_the_sample_has_sessions_whose_prefixes_grow() -> None:
    rows = list(read_trace(SAMPLE_PATH))
    assert len(rows) > 600
    assert {row.hash_ids[0] for row in rows} == {0}
    turns: dict[str, list[TraceRow]] = {}
    for row in rows:
        assert row.session is not None
        turns.setdefault(row.session, []).append(row)
    assert max(map(len, turns.values())) >= 5
    for session in turns.values():
        for before, after in pairwise(session):
            full = before.input_tokens // 512
            assert after.input_tokens > before.input_tokens
            assert after.hash_ids[:full] == before.hash_ids[:full]
