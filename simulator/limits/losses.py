"""Measures where a policy loses time: replays keep the policy's decisions and switch off one effect
after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from math import fsum
from typing import NamedTuple

import msgspec
import numpy as np

from kvkernels import VirtualWorker
from policies.contract import Hashes
from simulator.limits.work import Known, Machine

NEVER = -1
MAX_QUEUE = 2**31 - 1


class WorkerTask(NamedTuple):
    """A request in the form in which a worker gets it."""

    at_ns: int
    chain: Hashes
    prompt_tokens: int
    output_tokens: int
    priority: int = 0


class Served(NamedTuple):
    """The times of a task's first and last token, or `NEVER`, and its cached prompt tokens."""

    first_ns: int
    finish_ns: int
    hit_tokens: int


def new_worker(machine: Machine) -> VirtualWorker:
    """Return a worker as in a replay, but without KV events and with an unlimited queue."""
    return VirtualWorker(
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


def serve(worker: VirtualWorker, tasks: Sequence[WorkerTask]) -> list[Served]:
    """Let `worker` serve all `tasks`, which are in order of time and fit the worker."""
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
    """Let an idle `worker` compute `chains` (full blocks and their tokens) one by one; return the
    nanoseconds that this took.
    """
    now_ns = 0
    for number, (chain, tokens) in enumerate(chains):
        refusal = worker.add(number, chain, tokens, 1, 0, now_ns)
        assert not refusal, f"a prefix of {tokens} tokens was refused: {refusal}"
        while (next_ns := worker.next_ns()) >= 0:
            now_ns = next_ns
            worker.advance(now_ns)
    return now_ns


STALE, EVICTION, RECOMPUTE = "stale information", "memory, eviction", "recompute"
INTERFERENCE, IMBALANCE, REST = "interference", "imbalance", "order, parallel limits"
NAMES = (STALE, EVICTION, RECOMPUTE, INTERFERENCE, IMBALANCE, REST)
OWN = 20  # bits for a block's depth in a name of its own


class Loss(msgspec.Struct, frozen=True):
    """The mean time to first token, in ms, that is saved when one more effect is switched off; it
    can be negative.
    """

    name: str
    ttft_ms: float


class Decisions(msgspec.Struct, frozen=True):
    """The decisions of a policy: the worker of each request of `Known`, and when it was
    sent there.
    """

    workers: tuple[int, ...]
    sent_ns: tuple[int, ...]


def losses(
    known: Known,
    machines: Sequence[Machine],
    decisions: Decisions,
    network_ns: int,
    *,
    as_is_ms: float,
    fresh_ms: float,
    bound_ms: float,
) -> tuple[Loss, ...]:
    """Return the losses from `as_is_ms` down to `bound_ms`, in the order of `NAMES`. stale
    information: the same policy with all signals at once (`fresh_ms`; `decisions` are those of that
    run). memory, eviction: caches that keep everything, and room for every request at once.
    recompute: all blocks of earlier requests are cached on the chosen worker. interference: answers
    end with their first token, so no prefill shares a step with a decode. imbalance: one worker
    with the speed of all workers, first come first served; no less than each request takes alone.
    The rest is the time that the bound's best order saves, or that the bound leaves out.
    """
    pool = _Pool(known, machines, decisions, network_ns)
    levels = [as_is_ms, fresh_ms]
    levels.append(pool.mean_ms(warmed=False, decoding=True))
    levels.append(pool.mean_ms(warmed=True, decoding=True))
    levels.append(pool.mean_ms(warmed=True, decoding=False))
    levels.append(max(bound_ms, pool.as_one().mean_ms(warmed=True, decoding=False)))
    levels.append(bound_ms)
    return tuple(
        Loss(name, round(before - after, 3))
        for name, before, after in zip(NAMES, levels[:-1], levels[1:], strict=True)
    )


class _Pool:
    """The workers of a fleet, with caches that keep everything, and the tasks that each of them
    gets.
    """

    def __init__(
        self,
        known: Known,
        machines: Sequence[Machine],
        decisions: Decisions,
        network_ns: int,
    ) -> None:
        self._known, self._decisions = known, decisions
        self._network_ns = network_ns
        self._machines = [
            replace(machine, count=1) for machine in machines for _ in range(machine.count)
        ]

    def as_one(self) -> _Pool:
        """Return one worker in place of all workers: it is of the first one's kind, as fast as all
        together, and never full.
        """
        speed = sum(machine.speed for machine in self._machines)
        batch = sum(machine.max_batch_size for machine in self._machines)
        one = replace(
            self._machines[0],
            speed=speed,
            max_batch_size=batch,
            max_num_tokens=max(batch, self._machines[0].max_num_tokens),
            sequence_tokens=max(machine.sequence_tokens for machine in self._machines),
        )
        known, sent = self._known, [job.at_ns for job in self._known.jobs]
        decisions = Decisions(workers=(0,) * len(known), sent_ns=tuple(sent))
        return _Pool(known, [one], decisions, self._network_ns)

    def mean_ms(self, *, warmed: bool, decoding: bool) -> float:
        """Return the mean time to first token. With `warmed`, shared prefixes are cached at the
        workers of their requests before the run; without `decoding`, answers end with their first
        token.
        """
        flows: list[int] = []
        for worker, machine in enumerate(self._machines):
            order = [n for n, chosen in enumerate(self._decisions.workers) if chosen == worker]
            order.sort(key=lambda n: (self._decisions.sent_ns[n], n))
            served = self._serve(machine, order, warmed, decoding)
            flows += [
                one.first_ns + self._network_ns - self._known.jobs[n].at_ns
                for n, one in zip(order, served, strict=True)
            ]
        return fsum(flows) / len(flows) / 1e6

    def _serve(
        self, machine: Machine, order: list[int], warmed: bool, decoding: bool
    ) -> list[Served]:
        known = self._known
        chains = [own_chain(known, n) if warmed else known.chains[n] for n in order]
        engine = new_worker(self._roomy(machine, order))
        began_ns = 0
        if warmed:
            shared = [known.shared_tokens[n] for n in order]
            began_ns = warm(
                engine,
                [
                    (chain[: tokens // known.block_size], tokens)
                    for chain, tokens in zip(chains, shared, strict=True)
                    if tokens
                ],
            )
        tasks = []
        for n, chain in zip(order, chains, strict=True):
            job = known.jobs[n]
            at_ns = began_ns + self._decisions.sent_ns[n] + self._network_ns
            output_tokens = job.output_tokens if decoding else 1
            tasks.append(WorkerTask(at_ns, chain, job.prompt_tokens, output_tokens, job.priority))
        return [one._replace(first_ns=one.first_ns - began_ns) for one in serve(engine, tasks)]

    def _roomy(self, machine: Machine, order: list[int]) -> Machine:
        """Return the worker with enough memory for everything that the requests in
        `order` compute.
        """
        jobs = [self._known.jobs[n] for n in order]
        size = machine.block_size
        blocks = sum((job.prompt_tokens + job.output_tokens) // size + 2 for job in jobs)
        return replace(machine, blocks=max(machine.blocks, blocks + blocks // 50 + 16))


def own_chain(known: Known, n: int) -> Hashes:
    """Return names for the prompt's full blocks that no other request has, because blocks that
    requests share are computed before the run.
    """
    blocks = known.jobs[n].prompt_tokens // known.block_size
    names: Hashes = np.arange(blocks, dtype=np.uint64) + np.uint64((n + 1) << OWN)
    return names
