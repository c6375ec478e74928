"""The loop that schedules a step while one computes, beside the one that does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.model.tiny import make_tiny
from engine.runner.load import Loaded
from engine.runner.needs import StepSettings
from engine.sampling.params import SamplingParams
from engine.scheduler.request import Request
from engine.scheduler.types import Output, Step
from tests.effort import examples
from tests.engine.harness import eventually
from tests.engine.real import BLOCK_SIZE, COMPLETIONS, computing, greedy, ids_of, loaded
from tests.oracles.block_pool import check_pool

BLOCKS = 14
VOCAB = 264


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it comes, and the one before which its client leaves."""

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
    # Of a random model any token may come: enough of them that some end an answer.
    stops=st.sampled_from([frozenset[int](), frozenset(range(0, VOCAB, 9))]),
    at_step=st.integers(0, 12),
    leaves_at_step=st.none() | st.integers(1, 25),
)


class Clients:
    """They come and go by steps, those of an idle worker at once; what they were told."""

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
    """All of `arrivals` through one worker's loop, to their ends."""
    return await to_their_ends(Clients(model, arrivals))


async def to_their_ends(clients: Clients) -> Clients:
    async with asyncio.TaskGroup() as loops:
        running = loops.create_task(clients.runner.run())
        await clients.all_gone.wait()
        running.cancel()
    return clients


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = tmp_path_factory.mktemp("model")
    make_tiny(path)
    return loaded(
        path,
        kv_tokens=BLOCKS * BLOCK_SIZE,
        max_num_tokens=24,
        max_batch_size=4,
        min_chunk_tokens=4,
    )


@settings(max_examples=examples(15), deadline=None)
@given(arrivals=st.lists(ARRIVALS, min_size=1, max_size=10))
def test_both_loops_tell_the_same(arrivals: list[Arrival], model: Loaded) -> None:
    """Whatever comes and goes, in a cache that holds few of them."""
    arrivals = sorted(arrivals, key=lambda one: one.at_step)
    plain, overlapped = (
        asyncio.run(served(replace(model, steps=StepSettings(overlap=overlaps)), arrivals))
        for overlaps in (False, True)
    )
    for number in range(len(arrivals)):
        ours, theirs = overlapped.tokens[number], plain.tokens[number]
        shared = min(len(ours), len(theirs))
        assert ours[:shared] == theirs[:shared]
        if "left" not in (plain.ended[number], overlapped.ended[number]):
            assert len(ours) == len(theirs)
            assert plain.ended[number] == overlapped.ended[number]
    for clients in (plain, overlapped):
        assert clients.ended.keys() == clients.tokens.keys()
        assert clients.runner.scheduler.kv_used_blocks == 0


def test_steps_are_in_flight_together(model: Loaded) -> None:
    """And a cache too small for all puts requests back."""
    sampling = SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5)
    arrivals = [Arrival((n, 1, 2), 40, sampling, frozenset(), 0, None) for n in range(6)]
    plain = asyncio.run(served(model, arrivals))
    overlapped = asyncio.run(served(replace(model, steps=StepSettings(overlap=True)), arrivals))
    assert overlapped.tokens == plain.tokens
    assert overlapped.runner.scheduler.preemptions_total
    assert overlapped.runner.scheduler.settings == plain.runner.scheduler.settings
    most = max(len(told) for told in plain.tokens.values())
    assert most == 40


async def test_stop_strings_and_leaving_clients_over_http(model: Loaded) -> None:
    """The text that ends an answer is found a step late: what came after it is not told."""
    async with computing(replace(model, steps=StepSettings(overlap=True))) as worker:
        for seed in range(50):
            body = greedy([1, 2, 3], 30, temperature=1.0, seed=seed)
            _, whole = await worker.post(COMPLETIONS, body)
            plain = [one for one in whole["choices"][0]["text"] if one.isalnum()]
            if len(plain) > 3:
                break
        _, cut = await worker.post(COMPLETIONS, body | {"stop": plain[2]})
        (choice,) = cut["choices"]
        text = whole["choices"][0]["text"]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == text[: text.index(plain[2])]
        ids = await ids_of(worker, body)
        assert choice["token_ids"] == ids[: len(choice["token_ids"])]
        scheduler = worker.worker.runner.scheduler
        await eventually(lambda: scheduler.kv_used_blocks == 0, "its blocks are free")
        check_pool(scheduler.pool)
