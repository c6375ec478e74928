"""Sends many requests to a worker that computes, and records the tokens that each receives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.runner.load import Loaded
from engine.sampling.params import SamplingParams
from engine.scheduler.request import Request
from engine.scheduler.types import Output, Step
from tests.engine.real import BLOCK_SIZE
from tests.oracles.block_pool import check_pool

BLOCKS = 14
VOCAB = 264


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it arrives, and the step before which its client leaves."""

    prompt: tuple[int, ...]
    output_tokens: int
    sampling: SamplingParams
    stops: frozenset[int]
    at_step: int
    leaves_at_step: int | None


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 9),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logprobs=st.sampled_from([None, 2]),
    min_tokens=st.sampled_from([0, 3]),
)
ARRIVALS = st.builds(
    Arrival,
    prompt=st.builds(
        lambda trunk, tokens, tail: (*[trunk] * tokens, *tail),
        st.integers(0, 1),
        st.integers(0, 24),
        st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple),
    ),
    output_tokens=st.integers(1, 24),
    sampling=PARAMS,
    # A random model may give any token; with so many stop tokens, some of them end an answer.
    stops=st.sampled_from([frozenset[int](), frozenset(range(0, VOCAB, 9))]),
    at_step=st.integers(0, 12),
    leaves_at_step=st.none() | st.integers(1, 25),
)


class Clients:
    """Clients that come and leave before given steps (at once if the worker is idle), with the
    tokens that they received.
    """

    def __init__(self, model: Loaded, arrivals: Sequence[Arrival]) -> None:
        self.tokens: dict[int, list[tuple[int, object]]] = {n: [] for n in range(len(arrivals))}
        self.ended: dict[int, str] = {}
        self.all_gone = asyncio.Event()
        pool = BlockPool(BLOCKS, BLOCK_SIZE, host_blocks=model.capacity.host_blocks)
        self.runner = model.runner(pool, self.on_step, self.on_failed)
        self._arrivals = arrivals
        self._come = 0
        self._steps = 0
        self._turn()

    def on_step(self, step: Step, outputs: list[Output], now_s: float) -> None:
        for request, token, finished in outputs:
            number = request.request_id
            assert number not in self.ended
            self.tokens[number].append((token, self.runner.logprobs.get(number)))
            if finished:
                self.ended[number] = finished
        self._steps += 1
        check_pool(self.runner.scheduler.pool)
        self._turn()

    def on_failed(self, requests: Sequence[Request], why: str) -> None:
        raise AssertionError(why)

    def _turn(self) -> None:
        scheduler, arrivals = self.runner.scheduler, self._arrivals
        for number, one in enumerate(arrivals):
            if one.leaves_at_step == self._steps and self.runner.cancel(number):
                self.ended[number] = "left"
        while self._come < len(arrivals) and (
            not scheduler.requests or arrivals[self._come].at_step <= self._steps
        ):
            self._submit(self._come)
            self._come += 1
        if self._come == len(arrivals) and not scheduler.requests and not scheduler._in_flight:
            self.all_gone.set()

    def _submit(self, number: int) -> None:
        one = self._arrivals[number]
        prompt = np.array(one.prompt, dtype=np.int32)
        self.runner.submit(
            Request(number, prompt, one.output_tokens, stop_tokens=one.stops, sampling=one.sampling)
        )


async def served(model: Loaded, arrivals: Sequence[Arrival]) -> Clients:
    """Serve all of `arrivals` in one worker's loop until the last request has ended; return the
    clients.
    """
    return await run_until_all_end(Clients(model, arrivals))


async def run_until_all_end(clients: Clients) -> Clients:
    async with asyncio.TaskGroup() as loops:
        running = loops.create_task(clients.runner.run())
        await clients.all_gone.wait()
        running.cancel()
    return clients
