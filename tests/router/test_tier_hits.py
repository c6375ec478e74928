"""Blocks below the GPU reach the policy as further hit tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.contract import FleetView, Floats, RequestView
from router.core.actions import Dispatch
from tests.effort import examples
from tests.router.core_world import BLOCK, World, chain_of, removed, stored

CHAIN = [1, 2, 3, 4, 5, 6]
SEEN: list[FleetView] = []  # what the policy was shown last


def looks(request: RequestView, fleet: FleetView, state: object) -> Floats:
    """Every worker costs the same; keeps what it saw."""
    SEEN[:] = [fleet]
    return np.zeros(len(fleet))


POLICY = "tests.router.test_tier_hits:looks"


def shown(world: World, **fields: object) -> list[tuple[int, int, int]]:
    """(gpu, host, disk) hit tokens of each worker for the whole chain."""
    world.core.explain(world.arrival(CHAIN, **fields))
    (fleet,) = SEEN
    columns = (fleet.hit_tokens, fleet.hit_tokens_host, fleet.hit_tokens_disk)
    return [tuple(map(int, row)) for row in zip(*columns, strict=True)]


def below(event, tier: str):
    return replace(event, tier=tier)


def test_host_goes_on_where_the_gpu_ends_and_disk_where_host_ends() -> None:
    world = World(workers=2, policy=POLICY)
    world.events(0, 0, stored(CHAIN[:2]), below(stored(CHAIN[:4]), "host"))
    world.events(0, 1, below(stored(CHAIN[:5], after=4), "disk"))
    assert shown(world, prompt_tokens=100) == [(2 * BLOCK, 2 * BLOCK, BLOCK), (0, 0, 0)]
    world.events(0, 2, replace(removed(CHAIN[:3]), tier="host"))
    assert shown(world, prompt_tokens=100) == [(2 * BLOCK, 0, 0), (0, 0, 0)]


def test_a_hole_in_the_gpu_that_host_fills_is_no_hole() -> None:
    world = World(workers=1, policy=POLICY)
    world.events(0, 0, stored(CHAIN), below(stored(CHAIN), "host"))
    world.events(0, 1, removed(CHAIN[:2]))
    assert shown(world, prompt_tokens=100) == [(BLOCK, 5 * BLOCK, 0)]


def test_one_token_is_left_to_compute() -> None:
    world = World(workers=1, policy=POLICY)
    world.events(0, 0, stored(CHAIN[:2]), below(stored(CHAIN), "disk"))
    assert shown(world) == [(2 * BLOCK, 0, 4 * BLOCK - 1)]


def test_what_a_dispatch_will_leave_on_the_gpu_counts_there() -> None:
    world = World(workers=1, policy=POLICY)
    world.events(0, 0, below(stored(CHAIN[:4]), "host"))
    (action,) = world.core.on_arrival(world.arrival(CHAIN[:3]))
    assert isinstance(action, Dispatch)
    assert shown(world, prompt_tokens=100) == [(3 * BLOCK, BLOCK, 0)]


@settings(max_examples=examples(100), deadline=None)
@given(
    held=st.lists(st.lists(st.sampled_from([0, 1, 2]), max_size=6), min_size=3, max_size=3),
    prompt_tokens=st.integers(1, 40),
)
def test_every_split_of_a_chain_over_tiers(held: list[list[int]], prompt_tokens: int) -> None:
    """`held[w][i]`: the tier where worker w holds block i, and there only."""
    world = World(workers=3, policy=POLICY)
    for worker_id, tiers in enumerate(held):
        events = [
            below(stored(CHAIN[: i + 1], after=i), ("gpu", "host", "disk")[tier])
            for i, tier in enumerate(tiers)
        ]
        world.events(worker_id, 0, *events)
    expected = []
    for tiers in held:
        reach = []
        for most in range(3):
            blocks = next((i for i, tier in enumerate(tiers) if tier > most), len(tiers))
            reach.append(min(blocks * BLOCK, prompt_tokens - 1))
        expected.append((reach[0], reach[1] - reach[0], reach[2] - reach[1]))
    assert shown(world, prompt_tokens=prompt_tokens) == expected


@pytest.mark.parametrize("size", [BLOCK, 2 * BLOCK])
def test_each_worker_is_looked_up_by_its_own_block_size(size: int) -> None:
    world = World(workers=1, policy=POLICY)
    world.join(1, block_size=size)
    world.events(0, 0, below(stored(CHAIN), "host"))
    chains = {BLOCK: chain_of(CHAIN), size: chain_of(CHAIN)}
    rows = shown(world, prompt_tokens=100, chains=chains)
    assert rows == [(0, 6 * BLOCK, 0), (0, 0, 0)]
