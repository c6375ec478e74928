"""Tests of sliding windows and states next to full attention: what is reused, which events report
it, and that no block is lost.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkernels
from engine.block_pool import BlockPool
from engine.cache_groups import CacheGroup, parse_groups
from engine.scheduler.request import Request
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.types import SchedulerSettings
from engine.server.events import EventLog
from engine.wire.events import snapshot_payloads
from kvkernels import EventBatch, HybridWorkers, PrefixIndex, chain_hashes
from tests.effort import examples
from tests.engine.scheduler.machines import LIMITS, PolicyMachine, SchedulerMachine
from tests.engine.scheduling import SIZE, Driver, array, request
from tests.oracles import worker_blocks as oracle

GROUPS = parse_groups("window:6+state*2")
KINDS = ["window:6", "window:2*3", "state", "state*4", "window:9+state", "window:5+window:17*2"]


def hybrid(groups: tuple[CacheGroup, ...], blocks: int, size: int = SIZE, **limits: Any) -> Driver:
    given = {"max_num_tokens": 64, "max_batch_size": 16, "max_model_tokens": 4096} | limits
    return Driver(Scheduler(SchedulerSettings(**given), BlockPool(blocks, size, groups=groups)))


def served(driver: Driver, prompt: list[int], output_tokens: int = 1) -> Request:
    """Run a request while no other one runs; return it when it has ended."""
    number = len(driver.finished)
    one = request(number, prompt, output_tokens)
    driver.scheduler.add(one, driver.now_s)
    driver.run()
    return one


def test_cache_groups_are_parsed_from_kind_window_and_cost() -> None:
    assert parse_groups("window:1024*5+state") == (
        CacheGroup("window", 1024, 5),
        CacheGroup("state", 0, 1),
    )
    assert parse_groups("") == ()
    for wrong in (
        "window",
        "state:3",
        "window:1",
        "state*0",
        "full",
        "window:128*99999",
        "a b",
        "state+",
    ):
        with pytest.raises(ValueError, match=r"window|blocks"):
            parse_groups(wrong)
    with pytest.raises(ValueError, match="at most 8"):
        parse_groups("+".join(["state"] * 9))


def test_a_pool_too_small_for_its_cache_groups_is_rejected() -> None:
    with pytest.raises(ValueError, match="take 5 blocks of 4 tokens, and the cache has 5"):
        BlockPool(5, SIZE, groups=GROUPS)
    with pytest.raises(ValueError, match="not kept in host memory"):
        BlockPool(50, SIZE, groups=GROUPS, host_blocks=4)


@pytest.mark.parametrize("groups", ["window:128", "window:128*5", "state*7", "window:128+state"])
def test_prefixes_are_reused_as_by_vllm(groups: str) -> None:
    """Prefixes are reused as vLLM 0.32 does for Gemma 3 and gpt-oss, with blocks of 32 tokens and a
    window of 128.
    """
    driver = hybrid(parse_groups(groups), 2000, 32, max_num_tokens=256)
    prompt = [7] * 600
    first = served(driver, prompt, 100)
    assert first.cached_tokens == 0
    assert served(driver, prompt).cached_tokens == 576
    assert served(driver, prompt[:500]).cached_tokens == 0
    assert served(driver, prompt[:500]).cached_tokens == 480
    assert served(driver, prompt[:400] + [1] * 200).cached_tokens == 0
    assert served(driver, prompt[:400] + [2] * 200).cached_tokens == 384
    assert served(driver, prompt[:300] + [3] * 200).cached_tokens == 0
    assert served(driver, [*prompt, *first.output, *[4] * 50]).cached_tokens == 576
    exact = [9] * 640
    assert [served(driver, exact).cached_tokens for _ in range(2)] == [0, 608]


def test_a_request_waits_for_another_one_that_caches_a_usable_prefix() -> None:
    driver = hybrid(GROUPS, 64, max_num_tokens=16, prefix_wait_tokens=8)
    root = [1] * 40
    served(driver, [*root, 2])
    for number, last in ((10, 3), (11, 4)):  # the first of them leaves what the root needs
        driver.scheduler.add(request(number, [*root, last], 1), driver.now_s)
    requests = [driver.scheduler.requests[number] for number in (10, 11)]
    driver.run()
    assert [one.cached_tokens for one in requests] == [40, 40]
    other = [5] * 40
    for number in (20, 21):
        driver.scheduler.add(request(number, [*other, number], 1), driver.now_s)
    requests = [driver.scheduler.requests[number] for number in (20, 21)]
    driver.run()
    assert [one.cached_tokens for one in requests] == [0, 40]


class GroupMachine(SchedulerMachine):
    """Checks the promises of every scheduler for caches with windows and states."""

    def driven(self) -> Driver:
        return hybrid(GROUPS, 16, **LIMITS)


class GroupPolicyMachine(PolicyMachine):
    """Checks the same promises with every scheduling policy switched on."""

    def driven(self) -> Driver:
        return hybrid(GROUPS, 16, **self.limits)


LIVES = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = LIVES
TestGroupPolicyMachine = GroupPolicyMachine.TestCase
TestGroupPolicyMachine.settings = LIVES


class Listener:
    """A router's knowledge of a worker's cache, built from the worker's events."""

    def __init__(self, size: int, *, plain: bool) -> None:
        made: Any = (oracle if plain else kvkernels).WorkerBlocks
        self.index = PrefixIndex(1)
        self.blocks = made(self.index, 0, size, "m")
        self.size = size

    def apply(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            batch = EventBatch(payload)
            assert not batch.skipped
            self.blocks.apply(batch)
            assert not self.blocks.skips()

    def expected_tokens(self, prompt: list[int]) -> int:
        chain = chain_hashes(array(prompt), self.size)[: (len(prompt) - 1) // self.size]
        hits = self.index.longest_prefix(chain)
        expected = int(self.blocks.limit(chain, int(hits[0])))
        if not isinstance(self.blocks, oracle.WorkerBlocks) and self.blocks.is_hybrid:
            hybrids = HybridWorkers(1)
            hybrids.set(0, self.blocks)
            hybrids.limit(chain, hits, len(chain))
            assert hits[0] == expected
        return expected * self.size


def prompts(draw: random.Random, count: int) -> list[list[int]]:
    """Return prompts that are new, share a beginning, continue another, are cut short, or
    repeat.
    """
    made: list[list[int]] = []
    roots = [[draw.randrange(9) for _ in range(draw.randrange(4, 60))] for _ in range(3)]
    for _ in range(count):
        kind, tail = draw.randrange(5), [draw.randrange(9) for _ in range(draw.randrange(1, 30))]
        if kind == 0 or not made:
            made.append(tail * 2)
        elif kind == 1:
            made.append(draw.choice(roots) + tail)
        elif kind == 2:
            made.append((draw.choice(made) + tail)[:100])
        else:
            before = draw.choice(made)
            made.append(before[: draw.randrange(1, len(before) + 1)] if kind == 3 else before)
    return made


@pytest.mark.parametrize("plain", [False, True])
@settings(max_examples=examples(200), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.sampled_from(KINDS),
    blocks=st.sampled_from([60, 90, 2000]),
    chunk=st.sampled_from([16, 24, 128]),
)
def test_events_predict_the_hit_of_a_request_sent_alone(
    plain: bool, seed: int, groups: str, blocks: int, chunk: int
) -> None:
    """Events tell a router what a request will find in the cache, also if the router subscribes
    late and reads a snapshot. Each case has 50 requests, most with evictions.
    """
    driver = hybrid(parse_groups(groups), blocks, max_num_tokens=chunk, prefix_wait_tokens=0)
    pool, draw = driver.scheduler.pool, random.Random(seed)
    log, known = EventLog(pool, lambda: 0.0), Listener(SIZE, plain=plain)
    for number, prompt in enumerate(prompts(draw, 50)):
        late = Listener(SIZE, plain=False)
        late.apply(snapshot_payloads(log.snapshot())[1])
        expected = known.expected_tokens(prompt)
        assert late.expected_tokens(prompt) == expected
        one = served(driver, prompt, draw.randrange(1, 12))
        assert one.cached_tokens == expected, f"request {number}"
        if draw.random() < 0.02:
            pool.clear()
        batch = log.flush()
        known.apply([] if batch is None else [batch.payload])
    held = {number: count for number, _, _, _, count in known.blocks.groups()}
    assert sum(held.values()) == len(pool.groups or ())
    assert np.array_equal(known.blocks.chains(), np.sort(np.array(list(pool._by_hash), np.uint64)))
