"""Helpers for tests of the request log: a log whose clock does not move, requests to write, and a
reader of its lines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from policies.contract import Hashes
from policies.facts import Arrival
from router.core.contract.actions import Candidate, Decision, Dispatch, Stage
from router.http.reply import Outcome, Usage
from router.record.request_line import Header, RequestLine
from router.record.request_log import RequestLog, request_log_file
from router.record.request_record import Attempt, RequestRecord
from router.record.salt import salt_beside
from tests.router.core.core_world import chain_of

CHAIN = chain_of([1, 2, 3])
HEADER = Header(5.0, "hybrid?x=1", 2)
SIZE = 4


def open_log(path: Path, limit_bytes: int = 1 << 20) -> RequestLog:
    """Return a request log whose clock always shows 10 s, which is 1,000,010 s of Unix time."""
    parts = request_log_file(path, limit_bytes)
    return RequestLog(
        *parts, lambda: 10.0, lambda: 1_000_010.0, lambda now_s: HEADER, HEADER.policy
    )


def arrival(now_s: float = 9.0, **fields: Any) -> Arrival:
    chains = {8: CHAIN[:1], SIZE: CHAIN}
    return Arrival(now_s, 1, "m", 13, chains, **({"session": "ann"} | fields))


def dispatch(worker_id: int = 1, cost: float = 0.5) -> Dispatch:
    best = (Candidate(worker_id, cost, 8), Candidate(0, float("inf"), 0))
    decision = Decision("hybrid", "policy", 8, 13, best, False)
    return Dispatch(1, (Stage(worker_id, "both"),), decision)


def ok_outcome(**fields: Any) -> Outcome:
    known = {"started_s": 9.0, "status": 200, "first_byte_s": 9.25, "events": 7}
    return Outcome(**(known | {"usage": Usage(13, 5, 8)} | fields))


def attempt_of(of: Arrival, outcome: Outcome | None = None, worker_id: int = 1) -> Attempt:
    """Return an attempt at a worker, ended with `outcome`; None leaves it under way."""
    attempt = Attempt(of, dispatch(worker_id), 10.0, block_size=SIZE)
    if outcome is not None:
        attempt.end(outcome, 10.0)
    return attempt


def log_request(
    log: RequestLog, *outcomes: Outcome | None, of: Arrival | None = None, **end: Any
) -> None:
    """Log a finished request with one attempt for each of these outcomes."""
    of = of or arrival()
    attempts = [attempt_of(of, outcome, number % 2) for number, outcome in enumerate(outcomes, 1)]
    log.put(RequestRecord(9.0, 10.0, of, attempts, **end))


def log_served(log: RequestLog, **fields: Any) -> None:
    log_request(log, ok_outcome(), of=arrival(**fields))


def read(path: Path) -> tuple[list[Header], list[RequestLine]]:
    """Return the headers and the request lines of the file; raises if a line is neither."""
    headers, lines = [], []
    for raw in path.read_bytes().splitlines():
        if b'"format"' in raw:
            headers.append(msgspec.json.decode(raw, type=Header))
        else:
            lines.append(msgspec.json.decode(raw, type=RequestLine))
    return headers, lines


def salted(path: Path, chain: Hashes) -> list[int]:
    """Return the chain hashes keyed with the salt beside the log at `path`, as the log
    writes them.
    """
    keyed: list[int] = salt_beside(path).keyed(chain).tolist()
    return keyed


def line_of(path: Path, write_to: Callable[[RequestLog], None]) -> RequestLine:
    log = open_log(path)
    write_to(log)
    log.close()
    headers, lines = read(path)
    heading = msgspec.structs.replace(HEADER, salt=salt_beside(path).mark)
    assert headers == [heading]
    assert path.read_bytes().startswith(msgspec.json.encode(heading) + b"\n")
    (line,) = lines
    return line


def lines_reach(log: RequestLog, lines: int, lost: int = 0) -> None:
    """Wait until the log's thread has written `lines` lines and lost `lost`; fails after 10 s."""
    done = threading.Event()
    for _ in range(400):
        if (log.written, log.lost) == (lines, lost):
            return
        done.wait(0.025)
    raise AssertionError(f"{log.written} written, {log.lost} lost; expected {lines}, {lost}")
