"""Tests of many random requests at a computing worker whose cache is too small for them: each is
answered once.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.runner.load import Loaded
from tests.effort import examples
from tests.engine.harness import Running, eventually
from tests.engine.real import Reference, computing, loaded
from tests.oracles.block_pool import check_pool

KV_TOKENS = 160
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Visit:
    """The request of one client. Lifetime: example."""

    prompt_tokens: int
    output_tokens: int
    choices: int
    streams: bool
    leaves_after: int | None  # events; 0: before the first


VISITS = st.builds(
    Visit,
    prompt_tokens=st.integers(1, 60),
    output_tokens=st.integers(1, 30),
    choices=st.integers(1, 3),
    streams=st.booleans(),
    leaves_after=st.none() | st.integers(0, 6),
)


@pytest.fixture(scope="module")
def model(folder: Path) -> Loaded:
    limits = {"max_num_tokens": 32, "max_batch_size": 6, "min_chunk_tokens": 8}
    return loaded(folder, kv_tokens=KV_TOKENS, **limits)


async def visit(worker: Running, one: Visit) -> list[list[int]] | None:
    """Send the request; return the token ids of each choice, or None if the client left."""
    body = {"prompt": list(range(one.prompt_tokens)), "max_tokens": one.output_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "n": one.choices}
    url = worker.url + "/v1/completions"
    async with worker.http.post(url, json=body | {"stream": one.streams}) as reply:
        assert reply.status == 200, await reply.text()
        if not one.streams:
            choices = (await reply.json())["choices"]
            assert {choice["finish_reason"] for choice in choices} == {"length"}
            return [choice["token_ids"] for choice in choices]
        said: list[list[int]] = [[] for _ in range(one.choices)]
        ends = events = 0
        while one.leaves_after is None or events < one.leaves_after:
            line = await reply.content.readline()
            if line == b"data: [DONE]\n":
                assert ends == one.choices
                assert (await reply.content.read()).strip() == b""
                return said
            if line.startswith(b"data: "):
                events += 1
                (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                said[choice["index"]] += choice["token_ids"]
                ends += choice["finish_reason"] is not None
    return None


@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(visits=st.lists(VISITS, min_size=1, max_size=10))
def test_each_request_is_answered_once_and_its_blocks_are_freed(
    model: Loaded, reference: Reference, visits: list[Visit]
) -> None:
    async def crowd() -> list[list[list[int]] | None]:
        async with computing(model) as worker, asyncio.timeout(DEADLINE_S):
            answers = await asyncio.gather(*(visit(worker, one) for one in visits))
            scheduler = worker.worker.runner.scheduler
            await eventually(lambda: not scheduler.requests, "all have left")
            assert (scheduler.kv_used_blocks, worker.worker.unfinished) == (0, 0)
            check_pool(scheduler.pool)
            finished = worker.worker.counters.finished
            assert sum(finished.values()) == sum(one.choices for one in visits)
            return answers

    for one, answer in zip(visits, asyncio.run(crowd()), strict=True):
        if answer is not None:
            prompt = list(range(one.prompt_tokens))
            assert answer == [reference.greedy(prompt, one.output_tokens)] * one.choices
        else:
            assert one.leaves_after is not None
