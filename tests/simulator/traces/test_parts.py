"""Tests of traces in several files: the parts in a folder, or those that match a pattern, are read
as one.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simulator.traces.files import opened
from simulator.traces.job import ErrorLog
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import TraceError, open_jobs
from tests.simulator.trace_lines import LOG_HEADING, LOGGED, read

SALTED = {**LOG_HEADING, "salt": "5a17"}


def part(folder: Path, name: str, *lines: dict[str, Any], torn: str = "") -> None:
    data = ("".join(f"{json.dumps(one)}\n" for one in lines) + torn).encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def at(offset_s: float, **more: Any) -> dict[str, Any]:
    return {**LOGGED, "at": 1_700_000_000 + offset_s, **more}


def recording(folder: Path) -> WorkloadSpec:
    """Return a trace of three parts, the third of which began before the last line of the
    second.
    """
    part(folder, "requests-1.jsonl.gz", SALTED, at(0), at(10))
    part(folder, "requests-2.jsonl.gz", SALTED, at(20), at(40))
    part(folder, "requests-3.jsonl", SALTED, at(30), at(50))
    (folder / "salt").write_bytes(b"\x00" * 32)
    return WorkloadSpec(str(folder))


def test_parts_are_one_workload_in_order_of_arrival(tmp_path: Path) -> None:
    jobs = read(recording(tmp_path))
    assert [job.at_ns // 10**9 for job in jobs] == [0, 10, 20, 30, 40, 50]
    assert {job.session for job in jobs} == {"5a17/s"}, "one salt, one session"
    pattern = WorkloadSpec(str(tmp_path / "requests-[12].*"))
    assert [job.at_ns // 10**9 for job in read(pattern)] == [0, 10, 20, 40]


def test_sessions_with_different_salts_are_different(tmp_path: Path) -> None:
    part(tmp_path, "a.jsonl", SALTED, at(0))
    part(tmp_path, "b.jsonl", {**SALTED, "salt": "0ther"}, at(1))
    part(tmp_path, "c.jsonl", LOG_HEADING, at(2))
    names = [job.session for job in read(WorkloadSpec(str(tmp_path)))]
    assert names == ["5a17/s", "0ther/s", "3/s"]


def test_progress_rises_from_0_to_1(tmp_path: Path) -> None:
    recording(tmp_path)
    parts = opened(tmp_path)
    seen = [parts.fraction_read() for _ in parts.lines(ErrorLog("parts"))]
    assert seen == sorted(seen)
    assert seen[0] < seen[3] < 1.0 == parts.fraction_read()


def test_of_a_compressed_and_an_uncompressed_part_the_compressed_is_read(tmp_path: Path) -> None:
    """If a part exists packed and unpacked, the packed one is read. Both exist if a router ended
    after packing and before removing the original.
    """
    spec = recording(tmp_path)
    part(tmp_path, "requests-2.jsonl", SALTED, at(20), at(40))
    assert len(read(spec)) == 6


def test_a_torn_line_is_reported_and_left_out(tmp_path: Path) -> None:
    part(tmp_path, "a.jsonl", SALTED, at(0), torn='{"at": 17000')
    part(tmp_path, "b.jsonl", SALTED, at(1))
    (tmp_path / "c.jsonl").write_bytes(b"")  # begun, and nothing came
    stream = open_jobs(WorkloadSpec(str(tmp_path)))
    assert len(list(stream.jobs)) == 2
    assert stream.errors.total == 1
    assert "line 3" in stream.errors[0]


def test_the_error_for_a_damaged_part_names_it(tmp_path: Path) -> None:
    spec = recording(tmp_path)
    packed = tmp_path / "requests-2.jsonl.gz"
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(TraceError, match=r"requests-2.jsonl.gz, after line \d+: damaged"):
        read(spec)


def test_the_sample_is_found_in_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "simulator/data/conversation_sample.jsonl.gz"
    assert next(opened(Path(name)).lines(ErrorLog(name)))[0] == 1
    with pytest.raises(TraceError, match=r"simulator/data/another\.jsonl: cannot be read"):
        opened(Path("simulator/data/another.jsonl"))
    (tmp_path / "simulator" / "data").mkdir(parents=True)
    part(tmp_path, name, SALTED)
    (_, line), *others = opened(Path(name)).lines(ErrorLog(name))
    assert (json.loads(line), others) == (SALTED, [])
