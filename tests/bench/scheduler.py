"""The steps and requests a second that the engine's scheduler itself handles, without computing.

    python -m tests.bench.scheduler [--seconds 2] [--runs 5] [--core 0]

A closed loop keeps `batch` requests in the engine, each with a shared prefix of 1,024 tokens, 256
own tokens and 64 output tokens, in blocks of 16. The bench prints the median over the runs, per
second of CPU time.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from time import process_time

import numpy as np

from engine.block_pool import BlockPool
from engine.scheduler.scheduler import Request, Scheduler, SchedulerSettings

BLOCK_SIZE = 16
TRUNK_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 1024, 256, 64
TRUNKS = 32


def prompt(serial: int) -> np.ndarray:
    tokens = np.empty(TRUNK_TOKENS + OWN_TOKENS, dtype=np.int32)
    tokens[:TRUNK_TOKENS] = serial % TRUNKS
    tokens[TRUNK_TOKENS:] = np.arange(OWN_TOKENS, dtype=np.int32) + serial * 7919 % 1_000_000
    return tokens


def measure(batch: int, seconds: float, record_events: bool) -> tuple[float, float]:
    """Return (steps per second, finished requests per second) of one run."""
    pool = BlockPool(60_000, BLOCK_SIZE, record_events=record_events)
    scheduler = Scheduler(SchedulerSettings(max_batch_size=batch), pool)
    serial = finished = 0
    start_s = now_s = process_time()  # CPU seconds: other programs do not count
    first_step = first_finished = 0
    warm = False
    while now_s - start_s < seconds:
        while len(scheduler.requests) < batch:
            scheduler.add(Request(serial, prompt(serial), OUTPUT_TOKENS), now_s)
            serial += 1
        step = scheduler.schedule(now_s)
        assert step is not None
        tokens = {one.request_id: 7 for one in step.sampled}
        for output in scheduler.complete(step, tokens, now_s):
            finished += output.finished is not None
        pool.drain_events()
        now_s = process_time()
        if not warm and finished >= batch:  # the first wave computes the trunks
            warm, start_s = True, now_s
            first_step, first_finished = scheduler.steps_total, finished
    cpu_s = now_s - start_s
    return (scheduler.steps_total - first_step) / cpu_s, (finished - first_finished) / cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--core", type=int, default=0, help="core to stay on")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    for batch in (64, 256):
        for record_events in (True, False):
            runs = [measure(batch, args.seconds, record_events) for _ in range(args.runs)]
            steps_per_s = median(run[0] for run in runs)
            requests_per_s = median(run[1] for run in runs)
            print(
                f"batch {batch:3d}, events {'on ' if record_events else 'off'}: "
                f"{steps_per_s:7.0f} steps/s, {requests_per_s:6.0f} requests/s, "
                f"{1e6 / steps_per_s / batch:5.2f} us a request and step"
            )


if __name__ == "__main__":
    main()
