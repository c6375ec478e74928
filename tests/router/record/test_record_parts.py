"""Tests of a recording in several files: a new file begins by size or by the hour, their total is
bounded, they are compressed, and no line is torn.
"""

from __future__ import annotations

import errno
import gzip
import logging
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.record.log_files import Parts, Recording, parts_in
from tests.effort import examples

HOUR_S = 3_600.0
START_S = 1_700_000_000.0  # 13 minutes and 20 seconds past an hour


class Clock:
    """A clock of Unix time that a test moves."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


def parts(folder: Path, clock: Clock, **limits: float) -> Parts:
    known = {"part_bytes": 1_000, "part_s": HOUR_S, "parts": 100, "total_bytes": 100_000}
    return Parts(folder, Recording(**(known | limits)), clock)  # type: ignore[arg-type]


def put(to: Parts, line: bytes) -> None:
    to.make_room(len(line))
    to.append(line)


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def line(number: int, size: int = 100) -> bytes:
    return b"%d" % number + b"x" * (size - len(b"%d\n" % number)) + b"\n"


def test_a_part_ends_when_it_is_full_or_its_hour_ends(tmp_path: Path) -> None:
    clock = Clock()
    to = parts(tmp_path / "dir", clock)
    for number in range(12):
        clock.now_s += 1
        put(to, line(number))
    clock.now_s += HOUR_S
    put(to, line(12))
    to.close()
    found = parts_in(tmp_path / "dir")
    assert [path.name.endswith(".gz") for path in found] == [True, True, False]
    assert [content(path).count(b"\n") for path in found] == [10, 2, 1]
    assert b"".join(map(content, found)) == b"".join(map(line, range(13)))
    assert found[0].name.startswith("requests-20231114T2213")
    for path in (*found, tmp_path / "dir" / "salt"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "dir").stat().st_mode) == 0o700


def test_a_restart_begins_a_new_part_with_the_same_salt(tmp_path: Path) -> None:
    clock = Clock()
    first = parts(tmp_path, clock)
    put(first, line(1))
    first.close()
    clock.now_s -= 500  # a clock set back: names go on upwards
    second = parts(tmp_path, clock)
    assert second.fresh
    put(second, line(2))
    assert not second.fresh
    second.close()
    assert [content(path) for path in parts_in(tmp_path)] == [line(1), line(2)]
    assert first.salt.mark == second.salt.mark


def test_two_routers_write_separate_parts(tmp_path: Path) -> None:
    clock = Clock()
    both = [parts(tmp_path, clock) for _ in range(2)]
    for number, one in enumerate(both):
        put(one, line(number))
        put(one, line(number))
    for one in both:
        one.close()
    assert [content(path) for path in parts_in(tmp_path)] == [line(0) * 2, line(1) * 2]


def test_without_lines_only_the_salt_is_written(tmp_path: Path) -> None:
    parts(tmp_path, Clock()).close()
    assert [path.name for path in tmp_path.iterdir()] == ["salt"]


def test_the_oldest_parts_are_removed_and_the_removal_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    (tmp_path / "keep.txt").write_text("nobody's")
    to = parts(tmp_path, clock, parts=3)
    with caplog.at_level(logging.INFO):
        for number in range(6):
            put(to, line(number))
            clock.now_s += HOUR_S
    to.close()
    assert [content(path) for path in parts_in(tmp_path)] == [line(n) for n in (3, 4, 5)]
    assert caplog.text.count("removed the oldest part") == 3
    assert (tmp_path / "keep.txt").exists()


@settings(max_examples=examples(15), deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(10, 400), st.floats(0, 2 * HOUR_S)), max_size=40),
    count=st.integers(2, 5),
    total=st.integers(2_000, 4_000),
)
def test_bounds_hold_for_any_lines_and_the_newest_lines_are_kept(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, float]],
    count: int,
    total: int,
) -> None:
    folder, clock = tmp_path_factory.mktemp("parts"), Clock()
    to = parts(folder, clock, parts=count, total_bytes=total)
    written = b""
    for number, (size, pause_s) in enumerate(steps):
        clock.now_s += pause_s
        put(to, line(number, size))
        written += line(number, size)
        found = parts_in(folder)
        assert len(found) <= count
        assert sum(path.stat().st_size for path in found) <= total
    to.close()
    kept = b"".join(map(content, parts_in(folder)))
    assert written.endswith(kept)
    assert bool(kept) == bool(steps)


def test_a_part_stays_uncompressed_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    to = parts(tmp_path, Clock())
    put(to, line(1, 900))

    def full(*of: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("router.record.log_files.shutil.copyfileobj", full)
    put(to, line(2, 900))
    to.close()
    assert [content(path) for path in parts_in(tmp_path)] == [line(1, 900), line(2, 900)]
    assert "stays unpacked: No space left" in caplog.text
    assert not list(tmp_path.glob("*.packing"))


def test_a_part_that_disappeared_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    to = parts(tmp_path, Clock())
    put(to, line(1, 900))
    parts_in(tmp_path)[0].unlink()
    put(to, line(2, 900))
    to.close()
    assert [content(path) for path in parts_in(tmp_path)] == [line(2, 900)]
    assert "was taken away" in caplog.text


def test_a_foreign_file_with_a_partlike_name_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "requests-99999999T999999.999999Z.jsonl").write_bytes(b"x\n")
    to = parts(tmp_path, Clock())
    put(to, line(1))
    to.close()
    assert len(parts_in(tmp_path)) == 2


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"record: cannot write .*/none/dir: No such file"):
        parts(tmp_path / "none" / "dir", Clock())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=r"record: cannot write .*/file"):
        parts(tmp_path / "file", Clock())
