"""The cost of reading a trace, compared with `json.loads`, and of naming an engine's blocks.

    python tests/bench/traces.py [FILE]

Every figure is the median of runs in one process; the ratio holds on machines of another speed.
Without FILE, the bench generates requests shaped like the Kimi traces (17 ids, 512 tokens each).
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import Chainer, open_jobs

RUNS = 5
REQUESTS = 20_000
ENGINE_BLOCKS = (512, 1024, 64, 16)


def made_up(path: Path) -> None:
    """Write a packed trace of `REQUESTS` lines."""
    random = Random(1)
    with gzip.open(path, "wt", compresslevel=1) as out:
        for at_ms in range(REQUESTS):
            ids = [0, *(random.randrange(1 << 20) for _ in range(random.randint(1, 32)))]
            line = {"timestamp": at_ms, "input_length": 512 * len(ids) - 1, "output_length": 180}
            out.write(json.dumps({**line, "hash_ids": ids}) + "\n")


def median_us(work: Callable[[], int]) -> float:
    """Return the median microseconds per request; `work` returns how many it handled."""
    figures = []
    for _ in range(RUNS):
        start_s = time.perf_counter()
        count = work()
        figures.append((time.perf_counter() - start_s) / count * 1e6)
    return statistics.median(figures)


def measure(path: Path) -> None:
    """Measure all figures of the trace and print the table."""
    spec = WorkloadSpec(str(path))

    def plain() -> int:
        with gzip.open(path) as lines:
            return sum(1 for line in lines if json.loads(line))

    base = median_us(plain)
    ours = median_us(lambda: sum(1 for _ in open_jobs(spec).jobs))
    print(f"{'gzip and json.loads':<28} {base:8.2f} us a request")
    print(f"{'open_jobs':<28} {ours:8.2f} us a request, {base / ours:.1f} times as fast")
    stream = open_jobs(spec)
    block, jobs = stream.block_tokens, list(stream.jobs)
    for engine_block in ENGINE_BLOCKS:
        if block % engine_block and engine_block % block:
            continue
        chain = Chainer(block, engine_block).chain

        def name_all(chain: Callable[..., object] = chain) -> int:
            for serial, job in enumerate(jobs):
                chain(job, serial)
            return len(jobs)

        print(f"{f'chain, {block} to {engine_block}':<28} {median_us(name_all):8.2f} us a request")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    options = parser.parse_args()
    if options.file is not None:
        measure(options.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made_up.jsonl.gz"
        made_up(path)
        measure(path)


if __name__ == "__main__":
    main()
