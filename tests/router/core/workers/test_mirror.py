"""Tests of the estimated caches of workers without events: bounded, right for an LRU cache, and
right again after an error.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from kvkernels import chain_hashes
from router.core.workers.mirror import Found, Mirrors, Prediction
from tests.effort import EFFORT
from tests.router.property_support import patient

Path = tuple[int, ...]


def chain_of(path: Path) -> np.ndarray:
    return chain_hashes(np.array(path, dtype=np.int32), 1)


class Engine:
    """A plain LRU cache that serves one request at a time, to compare with. Lifetime: test."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, 1, record_events=False)

    def serve(self, path: Path, output_blocks: int = 0) -> int:
        """Serve a prompt and return how many of its blocks were cached."""
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
    """Return prompts of a few families that share beginnings of any length; some families are more
    frequent.
    """
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
    requests: list[Path],
    capacity_blocks: float,
    output_blocks: int = 0,
    corrected: bool = True,
) -> list[int]:
    """Return for each request how many more blocks were expected than found."""
    beyond = []
    for path in requests:
        prediction = mirrors.expect(0, chain_of(path), capacity_blocks)
        found = engine.serve(path, output_blocks)
        mirrors.answered(prediction, Found(found, 0) if corrected else None, output_blocks)
        beyond.append(prediction.hit_blocks - found)
    return beyond


@pytest.mark.parametrize("seed", range(3 * EFFORT))
def test_a_mirror_with_the_right_capacity_is_always_exact(seed: int) -> None:
    requests = paths(seed, 600)
    assert set(errors(Mirrors(1, 4096), Engine(120), requests, capacity_blocks=120)) == {0}


@pytest.mark.parametrize("seed", range(3 * EFFORT))
@pytest.mark.parametrize(("capacity_blocks", "output_blocks"), [(240, 0), (1000, 0), (240, 6)])
def test_a_smaller_cache_than_configured_is_learned_from_answers(
    seed: int, capacity_blocks: int, output_blocks: int
) -> None:
    requests = paths(seed, 1200)
    mirrors, blind = Mirrors(1, 8192), Mirrors(1, 8192)
    beyond = errors(mirrors, Engine(120), requests, capacity_blocks, output_blocks)
    blindly = errors(blind, Engine(120), requests, capacity_blocks, output_blocks, corrected=False)
    late, late_blindly = np.abs(beyond[600:]), np.abs(blindly[600:])
    assert late.mean() < 0.35 * late_blindly.mean()
    assert (late > 1).mean() < 0.1
    assert mirrors.room_blocks(0) < 120 + 0.5 * (capacity_blocks - 120)
    assert mirrors.counters.fewer > 0


@pytest.mark.parametrize("seed", range(3 * EFFORT))
def test_answers_take_room_even_without_reported_hits(seed: int) -> None:
    requests = paths(seed, 1200)
    beyond = errors(Mirrors(1, 8192), Engine(120), requests, 120, output_blocks=6, corrected=False)
    assert np.abs(beyond).mean() < 0.05


def test_a_larger_cache_than_configured_is_learned_from_answers() -> None:
    requests = paths(5, 1500)
    mirrors = Mirrors(1, 4096)
    beyond = np.array(errors(mirrors, Engine(140), requests, capacity_blocks=80))
    assert 125 < mirrors.room_blocks(0) <= 160
    assert mirrors.counters.more > 0
    assert np.abs(beyond[750:]).mean() < 0.1


def test_odd_answers_do_not_shrink_the_mirror_permanently() -> None:
    requests = paths(7, 1500)
    mirrors, engine = Mirrors(1, 4096), Engine(120)
    assert set(errors(mirrors, engine, requests[:500], capacity_blocks=120)) == {0}
    warm = requests[499]
    for _ in range(2):  # as after a reset, or of another router's traffic
        prediction = mirrors.expect(0, chain_of(warm), 120)
        assert prediction.hit_blocks == len(warm)
        engine.serve(warm)
        mirrors.answered(prediction, Found(0, 0))
    assert mirrors.room_blocks(0) < 120
    beyond = errors(mirrors, engine, requests[500:], capacity_blocks=120)
    assert np.abs(beyond[-500:]).mean() < 0.05
    assert mirrors.room_blocks(0) > 110


def test_missing_hits_of_concurrent_siblings_do_not_shrink_the_mirror() -> None:
    mirrors = Mirrors(1, 1024)
    mirrors.answered(mirrors.expect(0, chain_of((9, 9)), 64), None)
    path = (1, 2, 3, 4)
    first = mirrors.expect(0, chain_of(path), 64)
    second = mirrors.expect(0, chain_of(path), 64)
    assert (first.hit_blocks, second.hit_blocks) == (0, 4)
    mirrors.answered(second, Found(0, 1))  # both were computed at once
    assert mirrors.counters.fewer == 0
    assert mirrors.expect(0, chain_of((9, 9)), 64).hit_blocks == 2


def test_hits_of_answer_blocks_do_not_enlarge_the_mirror() -> None:
    mirrors = Mirrors(1, 1024)
    mirrors.answered(mirrors.expect(0, chain_of((1, 2)), 64), None)
    prediction = mirrors.expect(0, chain_of((1, 2, 3, 4)), 64)  # 3: what was answered
    mirrors.answered(prediction, Found(3, 1))
    assert mirrors.room_blocks(0) == 64
    assert mirrors.counters.more == 0


def test_an_answer_from_before_a_cache_reset_is_ignored() -> None:
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
def test_a_mirror_is_bounded_for_any_input(data: st.DataObject, max_blocks: int) -> None:
    mirrors = Mirrors(4, max_blocks)
    running: list[Prediction] = []
    for _ in range(data.draw(st.integers(1, 60))):
        kind = data.draw(st.sampled_from(["expect", "expect", "answered", "failed", "clear"]))
        slot = data.draw(st.integers(0, 3))
        if kind == "expect":
            capacity_blocks = data.draw(
                st.sampled_from([float("nan"), float("inf"), 0.0, 1.0, 7.5, 50.0])
            )
            running.append(mirrors.expect(slot, chain_of(data.draw(tree_paths)), capacity_blocks))
        elif kind == "clear":
            mirrors.clear_worker(slot)
        elif running:
            prediction = running.pop(data.draw(st.integers(0, len(running) - 1)))
            found = Found(data.draw(st.integers(0, 12)), data.draw(st.integers(0, 2)))
            if kind == "failed":
                mirrors.failed(prediction)
            else:
                reported = found if data.draw(st.booleans()) else None
                mirrors.answered(prediction, reported, data.draw(st.integers(-3, 300)))
        rooms = [mirrors.room_blocks(s) for s in range(4)]
        assert len(mirrors) <= sum(room for room in rooms if room == room) <= max_blocks


@patient
@given(before=st.lists(tree_paths, max_size=8), failed=tree_paths, requests=st.lists(tree_paths))
def test_a_failed_dispatch_leaves_no_blocks_in_the_mirror(
    before: list[Path], failed: Path, requests: list[Path]
) -> None:
    def hits(mirrors: Mirrors, path: Path) -> int:
        blocks = np.zeros(1, dtype=np.int32)
        mirrors.raise_prefix(blocks, chain_of(path))
        return int(blocks[0])

    mirrors = Mirrors(1, 4096)
    for path in before:
        mirrors.answered(mirrors.expect(0, chain_of(path), 1000), None)
    wanted = [hits(mirrors, path) for path in [failed, *requests]]
    mirrors.failed(mirrors.expect(0, chain_of(failed), 1000))
    assert [hits(mirrors, path) for path in [failed, *requests]] == wanted
