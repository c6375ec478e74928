"""One worker serving requests that come at given times: an assignment without any router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import NamedTuple, cast

import numpy as np

import kvkernels
from engine.virtual import VirtualWorker
from policies.contract import Hashes
from simulator.limits.machines import Machine

NEVER = -1
MAX_QUEUE = 2**31 - 1


class Task(NamedTuple):
    """A request as it reaches a worker."""

    at_ns: int
    chain: Hashes
    prompt_tokens: int
    output_tokens: int
    priority: int = 0


class Served(NamedTuple):
    """When a task had its first and last token, or `NEVER`; prompt tokens found cached."""

    first_ns: int
    finish_ns: int
    hit_tokens: int


def new_worker(machine: Machine, *, native: bool = True) -> VirtualWorker:
    """A worker as the replay would make it, without KV events and with a queue that never fills."""
    kind = getattr(kvkernels, "VirtualWorker", None) if native else None
    return cast(type[VirtualWorker], kind or VirtualWorker)(
        blocks=machine.blocks,
        block_size=machine.block_size,
        step_time=astuple(machine.step_time),
        max_num_tokens=machine.max_num_tokens,
        max_batch_size=machine.max_batch_size,
        max_model_tokens=machine.sequence_tokens,
        max_queue=MAX_QUEUE,
        prefix_wait_tokens=machine.prefix_wait_tokens,
        record_events=False,
        speed=machine.speed,
    )


def serve(worker: VirtualWorker, tasks: Sequence[Task]) -> list[Served]:
    """Let `worker` serve `tasks`, which come in order of time and fit it, to the end."""
    first = [NEVER] * len(tasks)
    finish = [NEVER] * len(tasks)
    hit_tokens = [0] * len(tasks)

    def until(now_ns: int) -> None:
        while 0 <= (next_ns := worker.next_ns()) <= now_ns:
            began, cached, ended, _changes = worker.advance(next_ns)
            for row, tokens in zip(began, cached, strict=True):
                first[row], hit_tokens[row] = next_ns, tokens
            for row in ended:
                finish[row] = next_ns

    for row, task in enumerate(tasks):
        until(task.at_ns)
        refusal = worker.add(
            row, task.chain, task.prompt_tokens, task.output_tokens, task.priority, task.at_ns
        )
        assert not refusal, f"a request of {task.prompt_tokens} tokens was refused: {refusal}"
    until(np.iinfo(np.int64).max)
    return [Served(*times) for times in zip(first, finish, hit_tokens, strict=True)]


def warm(worker: VirtualWorker, chains: Sequence[tuple[Hashes, int]]) -> int:
    """Let an idle `worker` compute `chains` (full blocks, their tokens), one by one: ns it took."""
    now_ns = 0
    for number, (chain, tokens) in enumerate(chains):
        refusal = worker.add(number, chain, tokens, 1, 0, now_ns)
        assert not refusal, f"a prefix of {tokens} tokens was refused: {refusal}"
        while (next_ns := worker.next_ns()) >= 0:
            now_ns = next_ns
            worker.advance(now_ns)
    return now_ns
