"""The cost of the request log: on the event loop for each request, and in the thread that writes.

    python tests/bench/request_log.py [--requests N] [--runs N] [--core C]

Prompts have 32,768 tokens in blocks of 16, and three candidates each. `loop` is the request
handler's work for the log while the writing thread is idle; `thread` is making and writing the
line. Figures are medians on one pinned core, in microseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from policies.facts import Arrival
from router.core.contract.actions import Candidate, Decision, Dispatch, Stage
from router.http.reply import Outcome, Usage
from router.record.log_files import LogFile
from router.record.request_line import Header
from router.record.request_log import LineMaker, RequestLog, RequestSink
from router.record.request_record import Attempt, RequestRecord
from router.record.salt import SALT_BYTES, Salt

BLOCKS = 2_048
SALT = Salt(bytes(SALT_BYTES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--core", type=int, default=0)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    loop_us, thread_us = [], []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            loop_us.append(_loop_us(Path(folder) / "loop", args.requests))
            thread_us.append(_thread_us(Path(folder) / "thread", args.requests))
    print(f"loop   {statistics.median(loop_us):6.2f} us a request")
    print(f"thread {statistics.median(thread_us):6.2f} us a request")
    print(f"thread / loop {statistics.median(thread_us) / statistics.median(loop_us):.1f}")


def _header(started: float) -> Header:
    return Header(started, "hybrid", 8)


def _parts() -> tuple[Arrival, Dispatch, Outcome]:
    chain = np.arange(BLOCKS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    arrival = Arrival(1.0, 1, "m", BLOCKS * 16, {16: chain}, session="user-4711", tenant="team")
    best = tuple(Candidate(n, 0.001 * n, 16 * n) for n in range(3))
    decision = Decision("hybrid", "policy", 16_000, BLOCKS * 16, best, False)
    outcome = Outcome(1.0, 200, None, 999, 1.2, 1.9, 40, Usage(BLOCKS * 16, 40, 16_000))
    return arrival, Dispatch(1, (Stage(0, "both"),), decision), outcome


def _record(arrival: Arrival, dispatch: Dispatch, outcome: Outcome) -> RequestRecord:
    attempt = Attempt(arrival, dispatch, 1.0, block_size=16)
    attempt.end(outcome, 2.0)
    return RequestRecord(1.0, 2.0, arrival, [attempt])


def _loop_us(path: Path, requests: int) -> float:
    """Return the microseconds for each record that the event loop spends on the log: put as many
    records as the queue holds before its thread runs, and time only that.
    """
    log = RequestLog(LogFile(path, 1 << 30), SALT, time.monotonic, time.time, _header, "hybrid")
    arrival, dispatch, outcome = _parts()
    began_s = time.perf_counter()
    for _ in range(requests):
        log.put(_record(arrival, dispatch, outcome))
    spent_s = time.perf_counter() - began_s
    log.close()
    assert log.written + log.lost == requests
    return spent_s / requests * 1e6


def _thread_us(path: Path, requests: int) -> float:
    log = RequestLog(
        LogFile(Path(os.devnull), 1 << 30), SALT, time.monotonic, time.time, _header, "hybrid"
    )
    arrival, dispatch, outcome = _parts()
    ended = [("hybrid", _record(arrival, dispatch, outcome)) for _ in range(64)]
    log.close()
    maker = LineMaker(SALT, _header, time.time, 0.0)
    sink = RequestSink(LogFile(path, 1 << 30), maker)
    began_s = time.perf_counter()
    for _ in range(max(requests // 64, 1)):
        sink.write(ended)
    spent_s = time.perf_counter() - began_s
    sink.close()
    return spent_s / sink.written * 1e6


if __name__ == "__main__":
    main()
