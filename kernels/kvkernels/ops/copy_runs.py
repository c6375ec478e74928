"""Copies of runs of bytes between pools and buffers. Kernel: `cuda/copy_runs.cuh`.

`torch.ops.warmroute.copy_runs(source, target, runs, moves)`:

    source, target  int8[bytes]: whole pools as bytes, see `as_bytes`
    runs            int64[R, 3]: offset in source, offset in target, length, in bytes
    moves           int64[M, 2]: what to add to every run's offsets; a negative one: no copy

`relayout.py` makes both. Runs of `target` must not overlap each other or what is read. On CUDA what
would leave a pool is not copied; on CPUs it raises ValueError. One launch; runs at multiples of 16
bytes are copied as such, those of 4 as those, else byte by byte.
"""

from __future__ import annotations

import torch

from kvkernels.ops.operator import define


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """A contiguous pool of any dtype as int8[bytes]; shares memory."""
    return pool.view(-1).view(torch.int8)


def copy_runs_on_cpu(
    source: torch.Tensor, target: torch.Tensor, runs: torch.Tensor, moves: torch.Tensor
) -> None:
    """Run by run."""
    lengths = runs.tolist()
    for source_base, target_base in moves.tolist():
        if source_base < 0 or target_base < 0:
            continue
        for source_offset, target_offset, length in lengths:
            first, into = source_base + source_offset, target_base + target_offset
            for name, pool, at in (("source", source, first), ("target", target, into)):
                if not 0 <= at <= at + length <= len(pool):
                    raise ValueError(
                        f"a run of {length} bytes at {at} leaves {name}, which has {len(pool)}: "
                        "plan it with the layouts that the pools have"
                    )
            target[into : into + length] = source[first : first + length]


define("copy_runs", copy_runs_on_cpu, ("target",))
