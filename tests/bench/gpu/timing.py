"""Measures medians of GPU time alone, with inputs used in turn, and the device's ceilings in the
same way.

Events are recorded behind a sleep on the device that lasts longer than the host's launches, so that
no host time lies between them. Launches that can be captured are replayed as one graph of all
inputs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

SAMPLES = 60
SLEEP_HZ = 2e9  # cycles per second of `torch.cuda._sleep`, at least those of any device
CEILING_BYTES = 1 << 30
MATMUL = 8_192
Run = Callable[[], object]


def _captured(runs: Sequence[Run]) -> Run | None:
    """Return one graph of all runs, or None if one of them waits, allocates or copies from the
    host.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for run in runs:
                run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def _timed_us(launch: Run, sleep_cycles: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(sleep_cycles)
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def median_us(runs: Sequence[Run], samples: int = SAMPLES) -> tuple[float, str]:
    """Return the median microseconds of one of `runs`, which use different inputs in turn, and how
    they were launched: "graph" or "stream".
    """
    for run in runs:
        run()
    torch.cuda.synchronize()
    replay = _captured(runs)

    def one_by_one() -> None:
        for run in runs:
            run()

    launch = replay or one_by_one
    launch()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    launch()
    host_s = time.perf_counter() - begun
    torch.cuda.synchronize()
    cycles = int(SLEEP_HZ * (2 * host_s + 1e-4))
    median = statistics.median([_timed_us(launch, cycles) for _ in range(samples)])
    return median / len(runs), "graph" if replay else "stream"


def ceilings(samples: int = SAMPLES) -> dict[str, float]:
    """Return the device's ceilings: bytes/s of a copy (read and written) and of a reduced read,
    FLOP/s of bf16.
    """
    words = CEILING_BYTES // 4
    read, written = (torch.randn(words, device="cuda") for _ in range(2))
    copy_us, _ = median_us([lambda: written.copy_(read)], samples)
    reductions = (torch.sum, torch.amax)
    stream_us = min(median_us([lambda f=f: f(read)], samples)[0] for f in reductions)
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_us, _ = median_us([lambda: a @ b], samples)
    return {
        "copy": 2 * CEILING_BYTES / copy_us * 1e6,
        "stream": CEILING_BYTES / stream_us * 1e6,
        "matmul": 2 * MATMUL**3 / matmul_us * 1e6,
    }
