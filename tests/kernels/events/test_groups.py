"""Tests of hybrid caches: how long a hit the engine allows, by histories of its cache groups and by
the rule.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkernels import EventBatch, HybridWorkers, PrefixIndex, WorkerBlocks, chain_hashes, chain_seed
from tests.effort import examples

SIZE = 4
FULL, WINDOW, STATE, OTHER = range(4)  # the cache groups' numbers
KINDS = {FULL: "full_attention", WINDOW: "sliding_window", STATE: "mamba"}
W = 11  # tokens; a hit needs the blocks of the last ten, which are three
PROMPTS = 4


def names_of(prompt: int, blocks: int) -> list[int]:
    """Return the names of a prompt's blocks. Prompts 0 and 1 share three blocks; prompts 2 and 3
    share one.
    """
    shared = 3 if prompt < 2 else 1
    return [100 * (prompt // 2 if at < shared else 2 + prompt) + at for at in range(blocks)]


def tokens_of(names: list[int]) -> list[int]:
    return [name * SIZE + i for name in names for i in range(SIZE)]


def chain_of(prompt: int, blocks: int) -> np.ndarray:
    ids = np.array(tokens_of(names_of(prompt, blocks)), dtype=np.int32)
    return chain_hashes(ids, SIZE, chain_seed("m", None, None))


def stored(group: int, names: list[int], at: int, **other: Any) -> dict[str, Any]:
    """Return the event that stores blocks of a prompt, the first of which follows `at` other
    blocks.
    """
    event = {
        "type": "BlockStored", "block_hashes": names, "token_ids": tokens_of(names),
        "block_size": SIZE, "medium": "GPU", "group_idx": group, "kv_cache_spec_kind": KINDS[group],
        "kv_cache_spec_sliding_window": W if group == WINDOW else None,
        "parent_block_hash": None if at == 0 else names[0] - 1,
    }  # fmt: skip
    return event | other


def removed(group: int, names: list[int]) -> dict[str, Any]:
    return {
        "type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": group
    }  # fmt: skip


class Worker:
    """One worker's blocks, and the part of a chain that it can reuse."""

    def __init__(self, groups: set[int], counts_copies: bool = False) -> None:
        self.index = PrefixIndex(2)
        self.blocks = WorkerBlocks(self.index, 1, SIZE, "m", counts_copies=counts_copies)
        self.hybrids = HybridWorkers(2)
        self.apply(*(stored(group, [], 0, token_ids=[]) for group in sorted(groups)))

    def apply(self, *events: dict[str, Any]) -> None:
        self.blocks.apply(EventBatch(msgspec.msgpack.encode([0, events, 0])))
        self.hybrids.set(1, self.blocks if self.blocks.is_hybrid else None)

    def hit(self, chain: np.ndarray, most: int = 99) -> int:
        hits = self.index.longest_prefix(chain)
        self.hybrids.limit(chain, hits, most)
        return int(hits[1])


class CacheGroupsMachine(RuleBasedStateMachine):
    """Applies stores and removals in any order, and checks the reusable blocks against plain sets
    by position.
    """

    @initialize(groups=st.sets(st.sampled_from([WINDOW, STATE]), min_size=1), counts=st.booleans())
    def start(self, groups: set[int], counts: bool) -> None:
        self.counts = counts
        self.groups = {FULL} | groups
        self.worker = Worker(self.groups, counts)
        self.held: dict[int, dict[int, int]] = {group: {} for group in self.groups}

    @rule(prompt=st.integers(0, 3), blocks=st.integers(1, 9), keeps=st.integers(0, 4))
    def computed(self, prompt: int, blocks: int, keeps: int) -> None:
        """Store a prompt: full attention reports all new blocks, and the other groups report their
        last ones, with other blocks masked.
        """
        names = names_of(prompt, blocks)
        for group in sorted(self.groups, reverse=True):
            new = [at for at in range(blocks) if names[at] not in self.held[group]]
            if group != FULL:
                new = new[len(new) - min(keeps, len(new)) :]
            if group == FULL and new:
                first = new[0]
                run = names[first:]
                parent = names[first - 1] if first else None
                self.worker.apply(stored(group, run, first, parent_block_hash=parent))
            elif new:
                run = [names[at] for at in new]
                self.worker.apply(stored(group, run, 0, token_ids=tokens_of(names)))
            else:
                run = []
            for name in run:
                times = self.held[group].get(name, 0)
                self.held[group][name] = times + 1 if self.counts else 1

    @rule(data=st.data())
    def evicted(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.groups)))
        if not self.held[group]:
            return
        gone = data.draw(
            st.lists(st.sampled_from(sorted(self.held[group])), max_size=4, unique=True)
        )
        self.worker.apply(removed(group, gone))
        for name in gone:
            self.held[group][name] -= 1
            if not self.held[group][name]:
                del self.held[group][name]

    @rule()
    def cleared(self) -> None:
        self.worker.apply({"type": "AllBlocksCleared"})
        for held in self.held.values():
            held.clear()

    @rule()
    def saved_and_loaded(self) -> None:
        fresh = Worker(set())
        fresh.blocks.load(self.worker.blocks.dump())
        fresh.hybrids.set(1, fresh.blocks)
        for prompt in range(PROMPTS):
            chain = chain_of(prompt, 9)
            assert fresh.hit(chain) == self.worker.hit(chain)

    @precondition(lambda self: hasattr(self, "worker"))
    @invariant()
    def as_sets_say(self) -> None:
        for prompt in range(PROMPTS):
            names = names_of(prompt, 9)
            for most in (9, 4):
                assert self.worker.hit(chain_of(prompt, 9), most) == self.reused(names, most)

    def reused(self, names: list[int], most: int) -> int:
        for end in range(most, 0, -1):
            needed = {FULL: range(end), WINDOW: range(max(0, end - 3), end), STATE: [end - 1]}
            if all(names[at] in self.held[group] for group in self.groups for at in needed[group]):
                return end
        return 0


CacheGroupsMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestCacheGroupsMachine = CacheGroupsMachine.TestCase


def test_a_long_history_of_three_groups() -> None:
    """Ten thousand random steps of one worker with three cache groups keep its answers right; the
    full run has at least ten times as many.
    """
    chance = random.Random(7)
    machine = CacheGroupsMachine()
    machine.start({WINDOW, STATE}, True)
    for step in range(examples(10_000)):
        if chance.random() < 0.6:
            machine.computed(chance.randrange(4), chance.randint(1, 9), chance.randint(0, 4))
        elif held := machine.held[group := chance.choice(sorted(machine.groups))]:
            gone = chance.sample(sorted(held), min(len(held), chance.randint(1, 3)))
            machine.worker.apply(removed(group, gone))
            for name in gone:
                held[name] -= 1
                if not held[name]:
                    del held[name]
        if step % 10 == 0:
            machine.as_sets_say()


def stored_in_all_groups(names: list[int], **other: Any) -> list[dict[str, Any]]:
    """Return the events that store a prompt in all groups."""
    return [stored(group, names, 0, **other) for group in (WINDOW, STATE, FULL)]


def test_the_order_of_groups_and_of_their_blocks_does_not_matter() -> None:
    names = names_of(0, 6)
    for events in (stored_in_all_groups(names), stored_in_all_groups(names)[::-1]):
        worker = Worker(set())
        worker.apply(*events)
        assert worker.hit(chain_of(0, 6)) == 6


def test_a_hit_needs_the_last_blocks_of_a_window_and_its_state() -> None:
    names = names_of(0, 8)
    worker = Worker({WINDOW, STATE})
    worker.apply(stored(FULL, names, 0))
    assert worker.hit(chain_of(0, 8)) == 0
    worker.apply(stored(WINDOW, names[3:8], 0, token_ids=tokens_of(names)))
    assert worker.hit(chain_of(0, 8)) == 0
    worker.apply(stored(STATE, [names[5]], 0, token_ids=tokens_of(names)))
    assert worker.hit(chain_of(0, 8)) == 6, "its window is blocks 3, 4, 5"
    assert worker.hit(chain_of(0, 8), most=5) == 0
    worker.apply(removed(WINDOW, [names[4]]))
    assert worker.hit(chain_of(0, 8)) == 0
    worker.apply(stored(STATE, [names[1]], 0))
    assert worker.hit(chain_of(0, 8)) == 0
    worker.apply(stored(WINDOW, names[:2], 0))
    assert worker.hit(chain_of(0, 8)) == 2, "a shorter prompt needs all of its blocks"


def test_a_window_of_one_token_needs_nothing() -> None:
    worker = Worker({FULL})
    worker.apply(stored(WINDOW, [], 0, kv_cache_spec_sliding_window=1))
    worker.apply(stored(FULL, names_of(0, 4), 0))
    assert worker.blocks.is_hybrid
    assert worker.hit(chain_of(0, 4)) == 4


@pytest.mark.parametrize(
    "other",
    [
        {"kv_cache_spec_kind": "a_kind_of_the_future"},
        {"kv_cache_spec_kind": "chunked_local_attention"},
        {"kv_cache_spec_sliding_window": 0},
        {"kv_cache_spec_sliding_window": None},
        {"block_size": SIZE + 1, "token_ids": []},
        {"block_size": 0, "token_ids": []},
    ],
)
def test_groups_that_are_not_understood_leave_an_upper_bound(other: dict[str, Any]) -> None:
    worker = Worker({FULL})
    names = names_of(0, 4)
    worker.apply(stored(FULL, names, 0), stored(WINDOW, names[:1], 0, **other))
    assert worker.hit(chain_of(0, 4)) == 4


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention"])
def test_full_attention_kinds_need_every_block(kind: str) -> None:
    worker = Worker(set())
    names = names_of(0, 4)
    worker.apply(
        stored(WINDOW, names[1:], 0, token_ids=tokens_of(names)),
        stored(FULL, names, 0, kv_cache_spec_kind=kind),
    )
    assert (worker.hit(chain_of(0, 4)), worker.hit(chain_of(0, 3))) == (4, 0)
    assert worker.blocks.has_full_attention


@pytest.mark.parametrize("kind", ["sliding_window", "sliding_window_mla"])
def test_window_kinds_need_only_the_window(kind: str) -> None:
    worker = Worker({FULL})
    names = names_of(0, 4)
    worker.apply(
        stored(FULL, names, 0),
        stored(WINDOW, names[1:], 0, token_ids=tokens_of(names), kv_cache_spec_kind=kind),
    )
    assert (worker.hit(chain_of(0, 4)), worker.hit(chain_of(0, 3))) == (4, 0)


def test_a_hit_ends_at_a_state_of_several_blocks() -> None:
    """With one state for every three blocks of full attention, a hit ends only where there is a
    state.
    """
    names = names_of(0, 8)
    worker = Worker({FULL})
    worker.apply(stored(FULL, names, 0))
    worker.apply(stored(STATE, [names[2]], 0, block_size=3 * SIZE))
    assert worker.hit(chain_of(0, 8)) == 3
    worker.apply(stored(STATE, [names[5], names[6]], 0, block_size=3 * SIZE))
    assert worker.hit(chain_of(0, 8)) == 6


def test_a_group_whose_settings_change_loses_its_blocks() -> None:
    names = names_of(0, 4)
    for other in ({"block_size": 2 * SIZE, "token_ids": []}, {"kv_cache_spec_sliding_window": 5}):
        worker = Worker(set())
        worker.apply(stored(FULL, names, 0), stored(WINDOW, names, 0))
        assert worker.hit(chain_of(0, 4)) == 4
        worker.apply(stored(WINDOW, [names[1]], 0, **other))
        assert worker.hit(chain_of(0, 4)) == 2


def test_a_reused_group_number_replaces_its_kind_and_groups_are_bounded() -> None:
    names = names_of(0, 4)
    worker = Worker(set())
    worker.apply(stored(FULL, names, 0), stored(WINDOW, names, 0, group_idx=1))
    worker.apply(stored(STATE, [names[2]], 0, group_idx=1))
    assert worker.hit(chain_of(0, 4)) == 3
    assert worker.blocks.groups() == [(1, "state", 0, SIZE, 1)]
    worker.apply(*(stored(STATE, [], 0, group_idx=number) for number in range(2, 40)))
    assert len(worker.blocks.groups()) == 16
    assert worker.blocks.skips() == {"no_room": 23}


def test_blocks_stored_again_by_full_attention_are_known_to_all_groups() -> None:
    """Blocks that full attention stores again after they had left are known to the other groups,
    whose blocks in the window had stayed.
    """
    names = names_of(0, 4)
    worker = Worker(set())
    worker.apply(*stored_in_all_groups(names))
    worker.apply(removed(FULL, names[2:]))
    assert worker.hit(chain_of(0, 4)) == 2
    worker.apply(stored(FULL, names[2:], 2, parent_block_hash=names[1]))
    assert worker.hit(chain_of(0, 4)) == 4


def test_masked_events_without_full_attention_are_skipped_and_counted() -> None:
    worker = Worker(set())
    names = names_of(0, 4)
    worker.apply(stored(WINDOW, names[2:], 0, group_idx=0, token_ids=tokens_of(names)))
    assert not worker.blocks.is_hybrid
    assert worker.blocks.skips() == {"masked": 1}
    assert worker.hit(chain_of(0, 4)) == 0


def test_hybrid_workers_refuse_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="workers"):
        HybridWorkers(0)
    hybrids = HybridWorkers(2)
    with pytest.raises(ValueError, match="worker must be"):
        hybrids.set(2, None)
    with pytest.raises(ValueError, match="hits must have 2"):
        hybrids.limit(chain_of(0, 1), np.zeros(1, dtype=np.int32), 3)
    assert len(hybrids) == 0
