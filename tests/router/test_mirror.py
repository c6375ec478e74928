"""Mirrors of workers that tell nothing: bounded, right about an LRU, and right again once wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from kvkernels import chain_hashes
from policies.facts import Failure, Finish, FirstToken, WorkerChange
from router.core.mirror import Found, Mirrors, Prediction
from tests.effort import EFFORT
from tests.router.core_world import BLOCK, World
from tests.router.property_support import patient

Path = tuple[int, ...]


def chain_of(path: Path) -> np.ndarray:
    return chain_hashes(np.array(path, dtype=np.int32), 1)


class Engine:
    """A real cache that takes one request at a time. Lifetime: test."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, 1, record_events=False)

    def serve(self, path: Path, output_blocks: int = 0) -> int:
        """Blocks of the prompt that were cached."""
        chain = chain_of(path).tolist()
        hit = self.pool.hit(chain)
        held = self.pool.acquire(chain, hit)
        fresh = self.pool.allocate(len(chain) - hit + output_blocks)
        assert fresh is not None
        answer = [hash((path, n)) % 2**64 for n in range(output_blocks)]
        held += self.pool.publish(
            fresh,
            chain[hit:] + answer,
            chain[hit - 1] if hit else None,
            np.zeros(len(fresh), dtype=np.int32),
        )
        self.pool.release(held)
        return hit


def paths(seed: int, count: int, families: int = 30, depth: int = 12) -> list[Path]:
    """Prompts of a few families that share heads of any length; some families are hotter."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(count):
        family = min(int(rng.expovariate(4 / families)), families - 1)
        shared = rng.randint(1, depth)
        drawn.append((family, *[0] * shared, *[rng.randint(1, 2)] * (depth - shared)))
    return drawn


def errors(
    mirrors: Mirrors,
    engine: Engine,
    asked: list[Path],
    told: float,
    output_blocks: int = 0,
    corrected: bool = True,
) -> list[int]:
    """Blocks expected beyond those found, request by request."""
    beyond = []
    for path in asked:
        prediction = mirrors.expect(0, chain_of(path), told)
        found = engine.serve(path, output_blocks)
        mirrors.answered(prediction, Found(found, 0) if corrected else None, output_blocks)
        beyond.append(prediction.hit_blocks - found)
    return beyond


@pytest.mark.parametrize("seed", range(3 * EFFORT))
def test_told_the_truth_it_is_never_wrong(seed: int) -> None:
    asked = paths(seed, 600)
    assert set(errors(Mirrors(1, 4096), Engine(120), asked, told=120)) == {0}


@pytest.mark.parametrize("seed", range(3 * EFFORT))
@pytest.mark.parametrize(("told", "output_blocks"), [(240, 0), (1000, 0), (240, 6)])
def test_a_smaller_cache_than_told_is_found_out(seed: int, told: int, output_blocks: int) -> None:
    asked = paths(seed, 1200)
    mirrors, blind = Mirrors(1, 8192), Mirrors(1, 8192)
    beyond = errors(mirrors, Engine(120), asked, told, output_blocks)
    blindly = errors(blind, Engine(120), asked, told, output_blocks, corrected=False)
    late, late_blindly = np.abs(beyond[600:]), np.abs(blindly[600:])
    assert late.mean() < 0.35 * late_blindly.mean()
    assert (late > 1).mean() < 0.1
    assert mirrors.room_blocks(0) < 120 + 0.5 * (told - 120)
    assert mirrors.counters.fewer > 0


@pytest.mark.parametrize("seed", range(3 * EFFORT))
def test_answers_take_room_even_where_no_hits_are_told(seed: int) -> None:
    asked = paths(seed, 1200)
    beyond = errors(Mirrors(1, 8192), Engine(120), asked, 120, output_blocks=6, corrected=False)
    assert np.abs(beyond).mean() < 0.05


def test_a_larger_cache_than_told_is_found_out_as_far_as_is_remembered() -> None:
    asked = paths(5, 1500)
    mirrors = Mirrors(1, 4096)
    beyond = np.array(errors(mirrors, Engine(140), asked, told=80))
    assert 125 < mirrors.room_blocks(0) <= 160
    assert mirrors.counters.more > 0
    assert np.abs(beyond[750:]).mean() < 0.1


def test_one_odd_answer_does_not_empty_it_for_good() -> None:
    asked = paths(7, 1500)
    mirrors, engine = Mirrors(1, 4096), Engine(120)
    assert set(errors(mirrors, engine, asked[:500], told=120)) == {0}
    warm = asked[499]
    for _ in range(2):  # as after a reset, or of another router's traffic
        prediction = mirrors.expect(0, chain_of(warm), 120)
        assert prediction.hit_blocks == len(warm)
        engine.serve(warm)
        mirrors.answered(prediction, Found(0, 0))
    assert mirrors.room_blocks(0) < 120
    beyond = errors(mirrors, engine, asked[500:], told=120)
    assert np.abs(beyond[-500:]).mean() < 0.05
    assert mirrors.room_blocks(0) > 110


def test_what_siblings_still_compute_proves_nothing_when_it_is_missing() -> None:
    mirrors = Mirrors(1, 1024)
    mirrors.answered(mirrors.expect(0, chain_of((9, 9)), 64), None)
    path = (1, 2, 3, 4)
    first = mirrors.expect(0, chain_of(path), 64)
    second = mirrors.expect(0, chain_of(path), 64)
    assert (first.hit_blocks, second.hit_blocks) == (0, 4)
    mirrors.answered(second, Found(0, 1))  # both were computed at once
    assert mirrors.counters.fewer == 0
    assert mirrors.expect(0, chain_of((9, 9)), 64).hit_blocks == 2


def test_blocks_of_answers_are_no_proof_of_a_larger_cache() -> None:
    mirrors = Mirrors(1, 1024)
    mirrors.answered(mirrors.expect(0, chain_of((1, 2)), 64), None)
    prediction = mirrors.expect(0, chain_of((1, 2, 3, 4)), 64)  # 3: what was answered
    mirrors.answered(prediction, Found(3, 1))
    assert mirrors.room_blocks(0) == 64
    assert mirrors.counters.more == 0


def test_an_answer_from_before_the_cache_began_anew_says_nothing() -> None:
    mirrors = Mirrors(2, 1024)
    mirrors.answered(mirrors.expect(0, chain_of((1, 2, 3)), 64), None)
    early = mirrors.expect(0, chain_of((1, 2, 3)), 64)
    mirrors.clear_worker(0)
    later = mirrors.expect(0, chain_of((1, 2, 3)), 64)
    assert later.hit_blocks == 0
    mirrors.answered(early, Found(0, 0))
    mirrors.failed(early)
    assert mirrors.room_blocks(0) == 64
    assert mirrors.expect(0, chain_of((1, 2, 3)), 64).hit_blocks == 3


tree_paths = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)


@patient
@given(data=st.data(), max_blocks=st.integers(8, 200))
def test_it_is_bounded_whatever_it_is_told(data: st.DataObject, max_blocks: int) -> None:
    mirrors = Mirrors(4, max_blocks)
    running: list[Prediction] = []
    for _ in range(data.draw(st.integers(1, 60))):
        kind = data.draw(st.sampled_from(["expect", "expect", "answered", "failed", "clear"]))
        slot = data.draw(st.integers(0, 3))
        if kind == "expect":
            told = data.draw(st.sampled_from([float("nan"), float("inf"), 0.0, 1.0, 7.5, 50.0]))
            running.append(mirrors.expect(slot, chain_of(data.draw(tree_paths)), told))
        elif kind == "clear":
            mirrors.clear_worker(slot)
        elif running:
            prediction = running.pop(data.draw(st.integers(0, len(running) - 1)))
            found = Found(data.draw(st.integers(0, 12)), data.draw(st.integers(0, 2)))
            if kind == "failed":
                mirrors.failed(prediction)
            else:
                told_found = found if data.draw(st.booleans()) else None
                mirrors.answered(prediction, told_found, data.draw(st.integers(-3, 300)))
        rooms = [mirrors.room_blocks(s) for s in range(4)]
        assert len(mirrors) <= sum(room for room in rooms if room == room) <= max_blocks


@patient
@given(before=st.lists(tree_paths, max_size=8), failed=tree_paths, asked=st.lists(tree_paths))
def test_a_dispatch_that_failed_leaves_nothing(
    before: list[Path], failed: Path, asked: list[Path]
) -> None:
    def hits(mirrors: Mirrors, path: Path) -> int:
        blocks = np.zeros(1, dtype=np.int32)
        mirrors.raise_prefix(blocks, chain_of(path))
        return int(blocks[0])

    mirrors = Mirrors(1, 4096)
    for path in before:
        mirrors.answered(mirrors.expect(0, chain_of(path), 1000), None)
    wanted = [hits(mirrors, path) for path in [failed, *asked]]
    mirrors.failed(mirrors.expect(0, chain_of(failed), 1000))
    assert [hits(mirrors, path) for path in [failed, *asked]] == wanted


# --- through the core -------------------------------------------------------------------------


def hit_blocks(world: World, blocks: list[int], worker_id: int = 0) -> int:
    choice = world.core.explain(world.arrival([*blocks, 999]))
    assert choice is not None
    hits = {c.worker_id: c.hit_tokens for c in choice.decision.candidates}
    return hits[worker_id] // BLOCK


def sent(world: World, blocks: list[int], cached_blocks: int | None, **fields: object) -> None:
    """A request that was answered."""
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


def test_the_core_believes_as_much_as_the_cache_holds() -> None:
    world = mirrored_world()
    for family in range(4):
        sent(world, [family * 10 + n for n in range(8)], None)
    assert [hit_blocks(world, [family * 10 + n for n in range(8)]) for family in range(4)] == [
        0,
        4,
        8,
        8,
    ]


def test_the_core_learns_from_cached_tokens() -> None:
    world = mirrored_world()
    for family in range(2):
        sent(world, [family * 10 + n for n in range(8)], 0)
    sent(world, list(range(8)), 2)  # its last six blocks were evicted: so was all that is colder
    assert hit_blocks(world, list(range(8))) == 8
    assert hit_blocks(world, [10 + n for n in range(8)]) == 8  # warmer than those were
    sent(world, [10 + n for n in range(8)], 0)
    sent(world, list(range(8)), 0)
    assert world.core.roster.mirrors.counters.fewer == 3
    assert world.core.roster.mirrors.room_blocks(0) < 20


@pytest.mark.parametrize("blame", ["worker", "client", "busy"])
def test_what_was_never_computed_is_not_believed(blame: str) -> None:
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


def test_a_refused_prompt_was_not_computed_and_a_broken_answer_was() -> None:
    world = mirrored_world()
    refused = world.arrival([1, 2, 3])
    world.core.on_arrival(refused)
    world.core.on_finish(Finish(0.0, refused.request_id))  # its 400 went to the client
    assert hit_blocks(world, [1, 2, 3]) == 0
    broken = world.arrival([4, 5, 6])
    world.core.on_arrival(broken)
    world.core.on_first_token(FirstToken(0.0, broken.request_id))
    world.core.on_failure(Failure(0.1, broken.request_id, "worker", reason="closed early"))
    assert hit_blocks(world, [4, 5, 6]) == 3


def test_a_worker_that_left_takes_its_mirror_along() -> None:
    world = mirrored_world()
    arrival = world.arrival([1, 2, 3])
    world.core.on_arrival(arrival)
    world.core.on_worker(WorkerChange(0.0, 0, "gone"))
    assert len(world.core.roster.mirrors) == 0
    world.join(1, has_events=False)  # in the same slot
    assert hit_blocks(world, [1, 2, 3], 1) == 0


def test_text_blocks_are_corrected_by_their_share_and_only_where_far_off() -> None:
    world = World(workers=1)  # with events, which tell nothing of text
    text = {"approximate": True}
    sent(world, list(range(32)), 0, **text)
    sent(world, list(range(32)), 28, **text)
    mirrors = world.core.roster.mirrors
    assert mirrors.counters.fewer == 0
    sent(world, list(range(32)), 20, **text)
    assert mirrors.counters.fewer == 1


def test_of_several_prompts_in_one_request_nothing_is_learned() -> None:
    world = mirrored_world()
    sent(world, list(range(8)), 0)
    sent(world, list(range(8)), 0, prompt_tokens=100, longest_prompt_tokens=8 * BLOCK)
    assert world.core.roster.mirrors.counters.fewer == 0
