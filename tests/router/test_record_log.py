"""The request log: what a line says, where it goes, and what is lost when it cannot be written."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from policies.facts import Arrival
from router.core.actions import Candidate, Decision, Dispatch, Reject, Stage
from router.http.errors import ClientError, WorkerError
from router.http.relay.reply import Outcome, Usage
from router.record.background import Background
from router.record.request_line import Header, RequestLine, hashes_of
from router.record.request_log import RequestLog
from tests.router.core_world import chain_of

CHAIN = chain_of([1, 2, 3])
HEADER = Header(5.0, "hybrid?x=1", 2)
SIZE = 4


def opened(path: Path, limit_bytes: int = 1 << 20) -> RequestLog:
    """A log whose clock stands at 10 s, which is 1,000,010 s unix time."""
    return RequestLog(path, limit_bytes, lambda: 10.0, lambda: 1_000_010.0, lambda now_s: HEADER)


def arrival(now_s: float = 9.0, **fields: Any) -> Arrival:
    chains = {8: CHAIN[:1], SIZE: CHAIN}
    return Arrival(now_s, 1, "m", 13, chains, **({"session": "ann"} | fields))


def dispatch(worker_id: int = 1, cost: float = 0.5) -> Dispatch:
    best = (Candidate(worker_id, cost, 8), Candidate(0, float("inf"), 0))
    decision = Decision("hybrid", "policy", 8, 13, best, False)
    return Dispatch(1, (Stage(worker_id, "both"),), decision)


def good(**fields: Any) -> Outcome:
    known = {"started_s": 9.0, "status": 200, "first_byte_s": 9.25, "events": 7}
    return Outcome(**(known | {"usage": Usage(13, 5, 8)} | fields))


def served(log: RequestLog, **fields: Any) -> None:
    with log.entry(arrival(**fields)) as entry:
        entry.dispatched(dispatch(), SIZE)
        entry.ended(good())


def read(path: Path) -> tuple[list[Header], list[RequestLine]]:
    """Headers and lines; raises for a line that is neither."""
    headers, lines = [], []
    for raw in path.read_bytes().splitlines():
        if b'"format"' in raw:
            headers.append(msgspec.json.decode(raw, type=Header))
        else:
            lines.append(msgspec.json.decode(raw, type=RequestLine))
    return headers, lines


def line_of(path: Path, tell: Callable[[RequestLog], None]) -> RequestLine:
    log = opened(path)
    tell(log)
    log.close()
    headers, lines = read(path)
    assert headers == [HEADER]
    assert path.read_bytes().startswith(msgspec.json.encode(HEADER) + b"\n")
    (line,) = lines
    return line


def test_a_line_says_what_became_of_a_request(tmp_path: Path) -> None:
    line = line_of(tmp_path / "log", lambda log: served(log, tenant="acme", priority=3))
    assert (line.at, line.e2e_ms, line.ttft_ms) == (1_000_009.0, 1000.0, 250.0)
    assert (line.prompt_tokens, line.output_tokens, line.cached_tokens) == (13, 5, 8)
    assert (line.block_size, hashes_of(line.chain).tolist()) == (SIZE, CHAIN.tolist())
    assert (line.worker, line.policy, line.reason, line.hit_tokens) == (1, "hybrid", "policy", 8)
    assert [(c.worker, c.cost, c.hit_tokens) for c in line.candidates] == [
        (1, 0.5, 8),
        (0, None, 0),
    ]
    assert (line.attempts, line.status, line.error, line.priority) == (1, 200, None, 3)
    assert line.stream
    assert not line.approximate
    raw = (tmp_path / "log").read_text()
    assert "ann" not in raw
    assert "acme" not in raw


def test_any_json_reader_gets_the_same_chain(tmp_path: Path) -> None:
    import base64
    import json

    line_of(tmp_path / "log", served)
    fields = json.loads((tmp_path / "log").read_text().splitlines()[1])
    assert np.frombuffer(base64.b64decode(fields["chain"]), "<u8").tolist() == CHAIN.tolist()


def test_a_whole_answer_has_no_first_token_and_a_stream_without_usage_counts_events(
    tmp_path,
) -> None:
    def tell(log: RequestLog) -> None:
        with log.entry(arrival(stream=False)) as entry:
            entry.dispatched(dispatch(), SIZE)
            entry.ended(good(usage=None))

    line = line_of(tmp_path / "log", tell)
    assert (line.ttft_ms, line.output_tokens, line.cached_tokens) == (None, 7, None)


def test_a_request_turned_away(tmp_path: Path) -> None:
    def tell(log: RequestLog) -> None:
        with log.entry(arrival()) as entry:
            entry.rejected(Reject(1, 503, "router_full", "x"), 503)

    line = line_of(tmp_path / "log", tell)
    assert (line.status, line.reason, line.worker, line.attempts) == (503, "router_full", None, 0)
    assert (line.policy, line.hit_tokens, line.candidates, line.error) == (None, None, (), None)
    assert (line.model, line.block_size) == ("m", SIZE)


def test_a_model_that_nobody_serves_is_the_clients_own_text(tmp_path: Path) -> None:
    def tell(log: RequestLog) -> None:
        with log.entry(Arrival(9.0, 1, "my secret", 3, {})) as entry:
            entry.rejected(Reject(1, 404, "model_not_found", "x"), 404)

    line = line_of(tmp_path / "log", tell)
    assert (line.model, line.block_size, line.chain, line.status) == (None, None, b"", 404)


def test_tries_are_counted_and_the_last_one_is_told(tmp_path: Path) -> None:
    def tell(log: RequestLog) -> None:
        with log.entry(arrival()) as entry:
            entry.dispatched(dispatch(0), SIZE)
            entry.ended(good(status=None, error=WorkerError("connect", "x"), usage=None))
            entry.dispatched(dispatch(1), SIZE)
            entry.ended(good())

    line = line_of(tmp_path / "log", tell)
    assert (line.attempts, line.worker, line.status, line.error) == (2, 1, 200, None)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (asyncio.CancelledError(), 499, "client"),
        (ConnectionResetError(), 499, "client"),
        (ValueError("ours"), 500, "internal_error"),
    ],
)
def test_a_handler_that_ends_early(tmp_path: Path, error: Any, status: int, told: str) -> None:
    def tell(log: RequestLog) -> None:
        with suppress(type(error)), log.entry(arrival()) as entry:
            entry.dispatched(dispatch(), SIZE)
            raise error

    line = line_of(tmp_path / "log", tell)
    assert (line.status, line.error, line.attempts) == (status, told, 1)


def test_errors_after_the_first_byte(tmp_path: Path) -> None:
    def tell(log: RequestLog) -> None:
        with log.entry(arrival()) as entry:
            entry.dispatched(dispatch(), SIZE)
            entry.ended(good(error=ClientError(499, "left"), usage=None))

    line = line_of(tmp_path / "log", tell)
    assert (line.status, line.error, line.output_tokens) == (200, "client", 7)


def test_sessions_compare_within_a_file_and_not_between_files(tmp_path: Path) -> None:
    seen = []
    for name in ("one", "two"):
        log = opened(tmp_path / name)
        for session in ("ann", "bob", "ann", None):
            served(log, session=session)
        log.close()
        seen.append([line.session for line in read(tmp_path / name)[1]])
    one, two = seen
    assert one[0] == one[2] != one[1]
    assert one[3] is None
    assert set(one) & set(two) == {None}


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    opened(tmp_path / "log").close()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_restart_goes_on_behind_another_header(tmp_path: Path) -> None:
    for _ in range(2):
        log = opened(tmp_path / "log")
        served(log)
        log.close()
    headers, lines = read(tmp_path / "log")
    assert (len(headers), len(lines)) == (2, 2)
    assert lines[0].session != lines[1].session


def test_beyond_its_limit_it_is_turned_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(30):  # one batch each
        log = opened(path, limit_bytes=4_096)
        served(log)
        log.close()
    kept, older = read(path), read(tmp_path / "log.1")
    assert kept[0][0] == older[0][0] == HEADER
    assert len(kept[1]) + len(older[1]) < 30  # a third file is not kept
    assert 3_000 < (tmp_path / "log.1").stat().st_size <= 4_096
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "log.1"]


def lines_reach(log: RequestLog, lines: int, lost: int = 0) -> None:
    """Wait for the thread."""
    done = threading.Event()
    for _ in range(400):
        if (log.lines, log.lost) == (lines, lost):
            return
        done.wait(0.025)
    raise AssertionError(f"{log.lines} written, {log.lost} lost; expected {lines}, {lost}")


def test_a_file_that_was_moved_away_is_begun_anew_when_told(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = opened(path)
    served(log)
    lines_reach(log, 1)
    log.reopen()  # nothing was moved: it goes on as it was
    served(log)
    lines_reach(log, 2)
    path.rename(tmp_path / "moved")
    log.reopen()
    while not path.exists():
        threading.Event().wait(0.01)
    served(log)
    log.close()
    assert [len(part) for part in read(tmp_path / "moved")] == [1, 2]
    assert [len(part) for part in read(path)] == [1, 1]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"request_log: cannot write {tmp_path}: Is a directory"):
        opened(tmp_path)
    with pytest.raises(OSError, match=r"cannot write .*/none/log: No such file or directory"):
        opened(tmp_path / "none" / "log")


def test_on_a_full_disk_lines_are_lost_counted_and_told_once(caplog) -> None:
    log = opened(Path("/dev/full"))
    for wanted in (1, 2, 3):
        served(log)
        lines_reach(log, 0, lost=wanted)
    log.close()
    assert caplog.text.count("lines are lost: cannot write /dev/full: No space left") == 1


FULL_THEN_FREE = """
import resource, sys
from pathlib import Path
from tests.router.test_record_log import lines_reach, opened, served
path = Path(sys.argv[1])
log = opened(path)
served(log)
lines_reach(log, 1)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
for lost in (1, 2):
    served(log)
    lines_reach(log, 1, lost)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
served(log)
log.close()
assert (log.lines, log.lost) == (2, 2)
"""


def test_when_there_is_room_again_it_goes_on_without_a_torn_line(tmp_path: Path) -> None:
    """The limit lets a hundred bytes of a line through: they must not stay."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_THEN_FREE, str(tmp_path / "log")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "goes on after 2 lost lines" in done.stderr
    assert [len(part) for part in read(tmp_path / "log")] == [1, 2]


class Blocked:
    """A sink on a disk that hangs until it is let go. Lifetime: test."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.busy = threading.Event()
        self.written: list[int] = []

    def write(self, items: Any) -> None:
        self.busy.set()
        self.go.wait()
        self.written += items

    def reopen(self) -> None:
        raise AssertionError("nobody asked")

    def close(self) -> None:
        self.written.append(-1)


@pytest.mark.parametrize(("items_max", "bytes_max", "room"), [(10, 1 << 20, 10), (99, 35, 4)])
def test_a_slow_disk_costs_items_and_never_time(items_max: int, bytes_max: int, room: int) -> None:
    sink = Blocked()
    queue: Background[int] = Background("slow", sink, items_max, bytes_max)
    assert queue.put(0, 0)
    assert sink.busy.wait(10)
    assert [queue.put(n, 10) for n in range(1, 21)] == [True] * room + [False] * (20 - room)
    assert queue.close(0.0) == room
    sink.go.set()
    assert queue.close(10.0) == 0
    assert sink.written == [*range(room + 1), -1]


def test_a_defect_of_the_sink_is_loud_and_harms_nobody_else(caplog) -> None:
    class Broken(Blocked):
        def write(self, items: Any) -> None:
            self.busy.set()
            raise ZeroDivisionError

    queue: Background[int] = Background("broken", Broken(), 10, 100)
    assert queue.put(1, 1)
    assert queue.close(10.0) == 0
    assert not queue.put(2, 1)
    assert "ZeroDivisionError" in caplog.text
