"""Medians on a GPU: events, graphs for what is short, inputs in turn; the run's own ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

SAMPLES = 60
GRAPH_BELOW_US = 50.0
CEILING_BYTES = 1 << 30
MATMUL = 8_192
Run = Callable[[], object]


def _timed_us(run: Run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def median_us(runs: Sequence[Run], samples: int = SAMPLES) -> float:
    """Median microseconds of one of `runs`, which use other inputs each and take turns.

    Below GRAPH_BELOW_US all of them are replayed as one graph, so that launches by the host are
    not what is measured.
    """
    for run in runs:
        run()
    torch.cuda.synchronize()
    single = statistics.median([_timed_us(runs[number % len(runs)]) for number in range(samples)])
    if single >= GRAPH_BELOW_US:
        return single
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    torch.cuda.synchronize()
    return statistics.median([_timed_us(graph.replay) for _ in range(samples)]) / len(runs)


def ceilings(samples: int = SAMPLES) -> dict[str, float]:
    """Bytes a second of a copy (read and written) and of a read that is reduced, FLOP/s of bf16."""
    words = CEILING_BYTES // 4
    read, written = (torch.randn(words, device="cuda") for _ in range(2))
    copy_us = median_us([lambda: written.copy_(read)], samples)
    reductions = (torch.sum, torch.amax)
    stream_us = min(median_us([lambda f=f: f(read)], samples) for f in reductions)
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_us = median_us([lambda: a @ b], samples)
    return {
        "copy": 2 * CEILING_BYTES / copy_us * 1e6,
        "stream": CEILING_BYTES / stream_us * 1e6,
        "matmul": 2 * MATMUL**3 / matmul_us * 1e6,
    }
