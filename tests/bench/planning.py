"""The host's CPU time for laying out a decode step: batch, page table, the kernels' plan.

    python -m tests.bench.planning [--steps 60] [--core 1] [--batch 64,128,256] [--tokens 8192]

Requests of `tokens` tokens each decode step after step, laid out as the runner does: in groups of
16 that share three quarters of their context, or with nothing shared. The bench prints the lowest
decile of CPU time over the steps, because cores are shared: of the single pieces; of a batch with
its plan, for no graph and for a graph's fixed buffers; of the batch without a plan; of the plan
alone; and of a plan made without the previous step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from time import thread_time
from typing import Any

import numpy as np
import torch

from engine.model.batch import fixed_batch, flat_batch
from engine.model.kernel_attention import KernelPlanner
from engine.runner.work import BlockRows, TokenPool, work_of
from engine.scheduler.request import Request
from engine.scheduler.types import Step
from kvkernels.ops.shared_costs import AttentionShape
from kvkernels.ops.shared_decode import SharedPlanner, plan_shared

SHAPE = AttentionShape(32, 8, 128, layers=32)
PAGE, GROUP, BLOCKS = 16, 16, 1 << 24


def requests_of(batch: int, tokens: int, has_groups: bool) -> list[Request]:
    """Return running requests with room for a few thousand more tokens."""
    pages, common = -(-tokens // PAGE) + 1, tokens * 3 // 4 // PAGE
    ids = np.random.default_rng(0).permutation(batch * pages + batch // GROUP * common)
    own = ids[: batch * pages].reshape(batch, pages)
    trunks = ids[batch * pages :].reshape(-1, common)
    made = []
    for row in range(batch):
        one = Request(row, np.zeros(tokens, dtype=np.int32), 1 << 20)
        one.block_ids = own[row].tolist()
        if has_groups:
            one.block_ids[:common] = trunks[row // GROUP].tolist()
        one.scheduled_tokens = tokens
        made.append(one)
    return made


def advance(requests: list[Request], number: int) -> None:
    """Append a token to each request, and a block where the last one is full."""
    for one in requests:
        one.output.append(1)
        one.visible_blocks = one.scheduled_tokens // PAGE
        one.scheduled_tokens += 1
        if one.scheduled_tokens > len(one.block_ids) * PAGE:
            one.block_ids.append(10_000_000 + number * 1000 + one.request_id)


def measure(batch: int, tokens: int, has_groups: bool, steps: int) -> None:
    requests = requests_of(batch, tokens, has_groups)
    planner, padded = (KernelPlanner(SHAPE, BLOCKS, PAGE) for _ in range(2))
    planned = SharedPlanner(BLOCKS, PAGE, SHAPE)
    pool, blocks = TokenPool(batch), BlockRows(batch)
    pages = -(-tokens // PAGE) + steps // PAGE + 2
    spent: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        begun_s = thread_time()
        made = run(*arguments, **named)
        spent.setdefault(name, []).append(thread_time() - begun_s)
        return made

    for number in range(steps):
        advance(requests, number)
        pieces = timed("pieces", work_of, Step(number, decodes=requests), pool, blocks).pieces
        flat = timed("flat", flat_batch, pieces, PAGE, planner=planner)
        timed("fixed", fixed_batch, pieces, batch, pages, PAGE, planner=padded)
        timed("without a plan", flat_batch, pieces, PAGE)
        given = torch.tensor([one[2] for one in flat.spans]), flat.page_table
        timed("plan", planned.step, *given)
        timed("plan anew", plan_shared, *given, BLOCKS, PAGE, SHAPE)
    kind = f"groups of {GROUP}" if has_groups else "nothing shared"
    print(
        f"{batch:>4} x {tokens}, {kind}: "
        + ", ".join(
            f"{name} {1e3 * np.quantile(values, 0.1):.2f} ms" for name, values in spent.items()
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--core", type=int, default=1, help="core to stay on")
    parser.add_argument("--batch", default="64,128,256")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    for batch in map(int, args.batch.split(",")):
        for has_groups in (True, False):
            measure(batch, args.tokens, has_groups, args.steps)


if __name__ == "__main__":
    main()
