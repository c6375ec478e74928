"""Tests of the loop that schedules a step while another one computes, compared with the loop that
does not.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.tiny import make_tiny
from engine.runner.load import Loaded
from engine.runner.needs import StepSettings
from engine.sampling.params import SamplingParams
from tests.effort import examples
from tests.engine.harness import eventually
from tests.engine.real import BLOCK_SIZE, COMPLETIONS, computing, greedy, ids_of, loaded
from tests.engine.runner.arrivals import (
    ARRIVALS,
    BLOCKS,
    Arrival,
    served,
)
from tests.oracles.block_pool import check_pool


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
def test_both_loops_give_the_same_tokens(arrivals: list[Arrival], model: Loaded) -> None:
    """Both loops give the same tokens while requests come and leave, in a cache that holds few of
    them.
    """
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


def test_several_steps_are_in_flight_at_once(model: Loaded) -> None:
    """Several steps are in flight together, and requests are preempted because the cache is too
    small for all.
    """
    sampling = SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5)
    arrivals = [Arrival((n, 1, 2), 40, sampling, frozenset(), 0, None) for n in range(6)]
    plain = asyncio.run(served(model, arrivals))
    overlapped = asyncio.run(served(replace(model, steps=StepSettings(overlap=True)), arrivals))
    assert overlapped.tokens == plain.tokens
    assert overlapped.runner.scheduler.preemptions_total
    assert overlapped.runner.scheduler.settings == plain.runner.scheduler.settings
    most = max(len(told) for told in plain.tokens.values())
    assert most == 40


async def test_text_after_a_stop_is_not_sent_and_disconnects_end_requests(model: Loaded) -> None:
    """The text after a stop string, which is found one step late, is not sent; clients that leave
    end their requests.
    """
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
