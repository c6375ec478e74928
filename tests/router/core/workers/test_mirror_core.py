"""Tests of workers without events in the core: what it assumes about their caches, learns and
corrects.
"""

from __future__ import annotations

import pytest

from policies.facts import Failure, Finish, FirstToken, WorkerChange
from tests.router.core.core_world import BLOCK, World


def hit_blocks(world: World, blocks: list[int], worker_id: int = 0) -> int:
    choice = world.core.explain(world.arrival([*blocks, 999]))
    assert choice is not None
    hits = {c.worker_id: c.hit_tokens for c in choice.decision.candidates}
    return hits[worker_id] // BLOCK


def sent(world: World, blocks: list[int], cached_blocks: int | None, **fields: object) -> None:
    """Send a request, and answer it with this count of cached blocks."""
    arrival = world.arrival(blocks, **fields)
    world.core.on_arrival(arrival)
    world.core.on_first_token(FirstToken(world.now_s, arrival.request_id))
    cached = None if cached_blocks is None else cached_blocks * BLOCK
    world.core.on_finish(
        Finish(world.now_s, arrival.request_id, arrival.prompt_tokens, cached, output_tokens=1)
    )


def mirrored_world(workers: int = 1, **settings: object) -> World:
    world = World(workers=0, **settings)
    for worker_id in range(workers):
        world.join(worker_id, has_events=False, kv_capacity_tokens=20.0 * BLOCK)
    return world


def test_the_core_expects_no_more_blocks_than_the_cache_holds() -> None:
    world = mirrored_world()
    for family in range(4):
        sent(world, [family * 10 + n for n in range(8)], None)
    assert [hit_blocks(world, [family * 10 + n for n in range(8)]) for family in range(4)] == [
        0,
        4,
        8,
        8,
    ]


def test_the_core_corrects_the_mirror_by_cached_tokens() -> None:
    world = mirrored_world()
    for family in range(2):
        sent(world, [family * 10 + n for n in range(8)], 0)
    sent(world, list(range(8)), 2)  # its last six blocks were evicted: so was all that is colder
    assert hit_blocks(world, list(range(8))) == 8
    assert hit_blocks(world, [10 + n for n in range(8)]) == 8  # warmer than those were
    sent(world, [10 + n for n in range(8)], 0)
    sent(world, list(range(8)), 0)
    assert world.core.caches.mirrors.counters.fewer == 3
    assert world.core.caches.mirrors.room_blocks(0) < 20


@pytest.mark.parametrize("blame", ["worker", "client", "busy"])
def test_blocks_that_were_never_computed_are_not_expected(blame: str) -> None:
    world = mirrored_world(workers=2)
    sent(world, [1, 2], None)
    holder = 0 if hit_blocks(world, [1, 2], 0) else 1
    arrival = world.arrival([1, 2, 3, 4])
    (action,) = world.core.on_arrival(arrival)
    assert hit_blocks(world, [1, 2, 3, 4], action.worker_id) == 4  # siblings share it already
    world.core.on_failure(
        Failure(0.0, arrival.request_id, blame, retry=blame == "worker", reason="x")
    )
    assert hit_blocks(world, [1, 2, 3, 4], action.worker_id) == (
        2 if action.worker_id == holder else 0
    )


def test_a_refused_prompt_is_not_cached_and_that_of_a_broken_answer_is() -> None:
    world = mirrored_world()
    refused = world.arrival([1, 2, 3])
    world.core.on_arrival(refused)
    world.core.on_finish(Finish(0.0, refused.request_id, refused=True))
    assert hit_blocks(world, [1, 2, 3]) == 0
    broken = world.arrival([4, 5, 6])
    world.core.on_arrival(broken)
    world.core.on_first_token(FirstToken(0.0, broken.request_id))
    world.core.on_failure(Failure(0.1, broken.request_id, "worker", reason="closed early"))
    assert hit_blocks(world, [4, 5, 6]) == 3


def test_an_answer_without_token_counts_was_computed() -> None:
    """An answer without token counts, such as Triton's `generate` gives, counts as computed however
    soon it came.
    """
    world = mirrored_world()
    sent(world, [1, 2, 3], None)
    assert hit_blocks(world, [1, 2, 3]) == 3
    quick = world.arrival([4, 5, 6])
    world.core.on_arrival(quick)
    world.core.on_finish(Finish(0.0, quick.request_id))
    assert hit_blocks(world, [4, 5, 6]) == 3


def test_the_mirror_of_a_removed_worker_is_removed() -> None:
    world = mirrored_world()
    arrival = world.arrival([1, 2, 3])
    world.core.on_arrival(arrival)
    world.core.on_worker(WorkerChange(0.0, 0, "gone"))
    assert len(world.core.caches.mirrors) == 0
    world.join(1, has_events=False)  # in the same slot
    assert hit_blocks(world, [1, 2, 3], 1) == 0


def test_text_blocks_are_corrected_by_share_and_only_if_far_off() -> None:
    world = World(workers=1)  # with events, which tell nothing of text
    text = {"approximate": True}
    sent(world, list(range(32)), 0, **text)
    sent(world, list(range(32)), 28, **text)
    mirrors = world.core.caches.mirrors
    assert mirrors.counters.fewer == 0
    sent(world, list(range(32)), 20, **text)
    assert mirrors.counters.fewer == 1


def test_requests_with_several_prompts_do_not_correct_the_mirror() -> None:
    world = mirrored_world()
    sent(world, list(range(8)), 0)
    sent(world, list(range(8)), 0, prompt_tokens=100, longest_prompt_tokens=8 * BLOCK)
    assert world.core.caches.mirrors.counters.fewer == 0
