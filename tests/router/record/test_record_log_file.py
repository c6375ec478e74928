"""Tests of the request log's file: where it is written, and what is lost if it cannot be
written.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from router.record.request_log import RequestLog, request_log_file
from tests.router.record.record_log_support import HEADER, lines_reach, log_served, open_log, read


def test_sessions_are_comparable_only_under_the_same_salt(tmp_path: Path) -> None:
    seen = []
    for name in ("one", "two"):
        log = open_log(tmp_path / name)
        for session in ("ann", "bob", "ann", None):
            log_served(log, session=session)
        log.close()
        seen.append([line.session for line in read(tmp_path / name)[1]])
    one, two = seen
    assert one[0] == one[2] != one[1]
    assert one[3] is None
    assert set(one) & set(two) == {None}


def test_only_the_owner_may_read_the_log(tmp_path: Path) -> None:
    open_log(tmp_path / "log").close()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_restart_appends_after_a_new_header(tmp_path: Path) -> None:
    for _ in range(2):
        log = open_log(tmp_path / "log")
        log_served(log)
        log.close()
    headers, lines = read(tmp_path / "log")
    assert (len(headers), len(lines)) == (2, 2)
    assert lines[0].session == lines[1].session
    assert headers[0].salt == headers[1].salt
    (tmp_path / "log.salt").unlink()  # whoever wants no more than that compared
    log = open_log(tmp_path / "log")
    log_served(log)
    log.close()
    headers, lines = read(tmp_path / "log")
    assert headers[1].salt != headers[2].salt
    assert lines[1].session != lines[2].session
    assert lines[1].chain != lines[2].chain


def test_a_policy_change_writes_a_header_between_the_lines(tmp_path: Path) -> None:
    """A policy change writes a header between the lines before and after it, even if all lines wait
    in the queue until after the change.
    """
    log = open_log(tmp_path / "log")
    log_served(log)
    log_served(log)
    log.set_policy("warmset?a=1")
    log_served(log)
    log.set_policy(HEADER.policy)
    log_served(log)
    log.close()
    said = [
        found["policy"] if "format" in (found := json.loads(line)) else "line"
        for line in (tmp_path / "log").read_text().splitlines()
    ]
    other = "warmset?a=1"
    assert said == [HEADER.policy, "line", "line", other, "line", HEADER.policy, "line"]
    headers, _ = read(tmp_path / "log")
    assert len({header.salt for header in headers}) == 1
    assert log.written == 4


def test_only_a_change_of_workers_writes_a_header(tmp_path: Path) -> None:
    workers = iter((2, 2, 3))
    log = RequestLog(
        *request_log_file(tmp_path / "log", 1 << 20),
        *(lambda: 10.0, lambda: 1_000_010.0),
        lambda now_s: msgspec.structs.replace(HEADER, started=now_s, workers=next(workers)),
        HEADER.policy,
    )
    for lines in (1, 2, 3):  # one batch each
        log_served(log)
        lines_reach(log, lines)
    log.close()
    headers, lines = read(tmp_path / "log")
    assert ([header.workers for header in headers], len(lines)) == ([2, 3], 3)


def test_a_log_beyond_its_limit_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(30):  # one batch each
        log = open_log(path, limit_bytes=4_096)
        log_served(log)
        log.close()
    kept, older = read(path), read(tmp_path / "log.1")
    assert kept[0][0] == older[0][0]
    assert kept[0][0].policy == HEADER.policy
    assert len(kept[1]) + len(older[1]) < 30  # a third file is not kept
    assert 3_000 < (tmp_path / "log.1").stat().st_size <= 4_096
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "log.1", "log.salt"]


def test_reopen_creates_a_new_file_after_the_old_one_was_moved(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = open_log(path)
    log_served(log)
    lines_reach(log, 1)
    log.reopen()  # no file was moved: the log continues in the same one
    log_served(log)
    lines_reach(log, 2)
    path.rename(tmp_path / "moved")
    log.reopen()
    while not path.exists():
        threading.Event().wait(0.01)
    log_served(log)
    log.close()
    assert [len(part) for part in read(tmp_path / "moved")] == [1, 2]
    assert [len(part) for part in read(path)] == [1, 1]


def test_an_unwritable_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"request_log: cannot write {tmp_path}: Is a directory"):
        open_log(tmp_path)
    with pytest.raises(OSError, match=r"cannot write .*/none/log: No such file or directory"):
        open_log(tmp_path / "none" / "log")


def test_lines_lost_on_a_full_disk_are_counted_and_logged_once(caplog) -> None:
    log = open_log(Path("/dev/full"))
    for wanted in (1, 2, 3):
        log_served(log)
        lines_reach(log, 0, lost=wanted)
    log.close()
    assert caplog.text.count("lines are lost: cannot write /dev/full: No space left") == 1


FULL_THEN_FREE = """
import resource, sys
from pathlib import Path
from tests.router.record.record_log_support import lines_reach, open_log, log_served
path = Path(sys.argv[1])
log = open_log(path)
log_served(log)
lines_reach(log, 1)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
for lost in (1, 2):
    log_served(log)
    lines_reach(log, 1, lost)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log_served(log)
log.close()
assert (log.written, log.lost) == (2, 2)
"""


def test_the_log_continues_without_a_torn_line_when_the_disk_has_room(tmp_path: Path) -> None:
    """When a full disk has room again, the log continues without an incomplete line: a hundred
    bytes of a line had still fitted, and the log must remove them.
    """
    done = subprocess.run(
        [sys.executable, "-c", FULL_THEN_FREE, str(tmp_path / "log")],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "goes on after 2 lost lines" in done.stderr
    assert [len(part) for part in read(tmp_path / "log")] == [1, 2]


def test_a_pipe_without_a_reader_is_refused_immediately(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=f"cannot write {pipe}: a pipe that nobody reads"):
        open_log(pipe)


def test_a_pipe_with_a_slow_reader_loses_no_lines(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)  # much less than the lines that follow
    log = open_log(pipe)
    for _ in range(64):
        log_served(log)
    os.set_blocking(reader, True)
    got = b""
    while got.count(b"\n") < 65:
        got += os.read(reader, 1000)
    log.close()
    os.close(reader)
    assert (log.written, log.lost) == (64, 0)


def test_the_warning_contains_the_path_that_prevents_rotation(tmp_path: Path, caplog) -> None:
    (tmp_path / "log.1").mkdir()
    log = open_log(tmp_path / "log", limit_bytes=200)
    log_served(log)
    lines_reach(log, 1)  # an empty file takes a line of any size
    log_served(log)
    log.close()
    assert (log.written, log.lost) == (1, 1)
    assert f"{tmp_path}/log.1" in caplog.text
