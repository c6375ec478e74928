"""The cost of a worker on virtual time for each request and step, native and in plain Python.

    python -m tests.bench.virtual [--requests 4000] [--runs 3] [--core 0]

One worker runs in a closed loop that keeps `batch` requests running: 17 prompt blocks of 512
tokens, 8 of which are one of 32 shared prefixes, and 1 to 359 output tokens, evenly distributed;
every `next_ns` is followed by an `advance`, as in a replay. Figures are medians of CPU time over
the runs. Last comes the memory of 16 native workers whose 75,000 blocks of 16 tokens were all used
once.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np

import kvkernels
from engine.profiles import profile
from tests.kernels.virtual_worker.virtual_pair import Twin, chain_of
from tests.oracles.virtual_worker import VirtualWorker

PROMPT_BLOCKS, SHARED_BLOCKS, TRUNKS, MOST_OUTPUT_TOKENS = 17, 8, 32, 359
BLOCK_SIZE = 512


def options(profile_name: str) -> dict[str, Any]:
    """Return the options of a worker with this profile."""
    machine = profile(profile_name)
    constants = astuple(machine.step_time)
    blocks = machine.kv_capacity_tokens // BLOCK_SIZE
    return {"blocks": blocks, "block_size": BLOCK_SIZE, "step_time": constants}


def chains(requests: int) -> list[np.ndarray]:
    trunks = [chain_of([trunk] * SHARED_BLOCKS) for trunk in range(TRUNKS)]
    own = range(PROMPT_BLOCKS - SHARED_BLOCKS)
    draw = random.Random(1)
    return [
        np.array([*trunks[at % TRUNKS], *(draw.getrandbits(64) for _ in own)], dtype=np.uint64)
        for at in range(requests)
    ]


def measure(
    make: Callable[..., Twin], setup: dict[str, Any], prompts: list[np.ndarray], batch: int
) -> tuple[float, int, int]:
    """Return (CPU seconds, steps, calls of `advance`) of one run."""
    worker = make(**setup)
    prompt_tokens = PROMPT_BLOCKS * BLOCK_SIZE + 100
    added = ended = advances = now_ns = 0
    start_s = process_time()
    while ended < len(prompts):
        while added < len(prompts) and added - ended < batch:
            output_tokens = 1 + added * 7919 % MOST_OUTPUT_TOKENS
            assert worker.add(added, prompts[added], prompt_tokens, output_tokens, 0, now_ns) == ""
            added += 1
        now_ns = worker.next_ns()
        ended += len(worker.advance(now_ns)[2])
        advances += 1
    return process_time() - start_s, worker.stats(now_ns).steps, advances


def resident_bytes() -> int:
    """Return this process's resident memory in bytes, as Linux counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_per_block(make: Callable[..., Twin], setup: dict[str, Any]) -> float:
    """Return a worker's memory in bytes for each block that was ever used, with everything else of
    the worker included.
    """
    workers, blocks, prompt_blocks = 16, 75_000, 1_000
    draw = random.Random(1)
    before = resident_bytes()
    alive = []
    for _ in range(workers):
        worker = make(**(setup | {"blocks": blocks, "block_size": 16}))
        now_ns = 0
        for request_id in range(blocks // prompt_blocks + 1):
            chain = np.frombuffer(draw.randbytes(8 * prompt_blocks), dtype=np.uint64)
            assert worker.add(request_id, chain, 16 * prompt_blocks, 1, 0, now_ns) == ""
            while (next_ns := worker.next_ns()) >= 0:
                now_ns = next_ns
                worker.advance(now_ns)
        alive.append(worker)
    return (resident_bytes() - before) / len(alive) / blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--core", type=int, default=0, help="core to stay on")
    parser.add_argument("--profile", default="qwen3-32b-h100-tp2")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    setup, prompts = options(args.profile), chains(args.requests)
    makers: list[tuple[str, Callable[..., Any] | None]] = [
        ("native", kvkernels.VirtualWorker),
        ("plain", VirtualWorker),
    ]
    for batch in (8, 64):
        costs: dict[str, float] = {}
        for name, make in makers:
            if make is None:
                continue
            few = prompts if name == "native" else prompts[: max(1, args.requests // 10)]
            runs = [measure(make, setup, few, batch) for _ in range(args.runs)]
            costs[name] = median(run[0] for run in runs) / len(few) * 1e6
            _cpu_s, steps, advances = runs[0]
            print(
                f"batch {batch:3d}, {name:6s}: {costs[name]:8.1f} us a request, "
                f"{costs[name] * len(few) / steps:7.2f} us a step, "
                f"{steps / len(few):5.1f} steps and {advances / len(few):5.1f} calls a request"
            )
        if len(costs) == 2:
            print(f"batch {batch:3d}: plain / native = {costs['plain'] / costs['native']:.0f}")
    print(f"memory: {bytes_per_block(kvkernels.VirtualWorker, setup):.1f} bytes a block")


if __name__ == "__main__":
    main()
