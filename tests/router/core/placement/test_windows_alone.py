"""Tests of workers whose model has only sliding windows and no full attention: hits equal those
computed with plain sets of kept blocks.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkernels import EventBatch, chain_hashes
from policies.facts import KvEvents
from router.core.placement.eligible import Rows
from router.core.workers.kv_events import WireEvents
from tests.effort import examples
from tests.router.core.core_world import BLOCK, World, tokens_of
from tests.router.core.vllm_names import Engine

WINDOW = 2 * BLOCK + 2  # tokens
ENGINE = Engine(BLOCK, WINDOW)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 10, 11, 12, 13], [1, 14, 15, 16], [17, 18]]


def tokens(blocks: list[int]) -> list[int]:
    ids: list[int] = tokens_of(blocks).tolist()
    return ids


class Pair:
    """A worker whose model has only sliding windows, and the names of the blocks that its engine
    keeps.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.world = World(workers=1)
        self.engine = Engine(BLOCK, window)
        self.needed = 3 if window else 1  # blocks that end at a hit
        self.held: dict[int, int] = {}  # copies by name
        self.seq = 0

    def tell(self, *events: dict[str, Any]) -> None:
        batch = EventBatch(msgspec.msgpack.encode([0.0, events, 0]))
        fact = KvEvents(self.world.now_s, 0, self.seq, WireEvents(batch, "m"), "live")
        self.world.core.on_kv_events(fact)
        self.seq += 1

    def computed(self, blocks: list[int], first: int, kept: list[int]) -> None:
        """Compute the prompt's blocks from `first` on, of which the cache keeps some."""
        event = self.engine.store_event(tokens(blocks), first, kept)
        self.tell(event)
        for name in event["block_hashes"]:
            self.held[name] = 1

    def evicted(self, names: list[int]) -> None:
        self.tell({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": 0})
        for name in names:
            del self.held[name]

    def hit_blocks(self, blocks: list[int]) -> int:
        """Return how many blocks the router expects to be cached for the prompt with one more
        token.
        """
        chain = chain_hashes(tokens_of(blocks), BLOCK)
        rows, caches = Rows.of(self.world.core.workers), self.world.core.caches
        (hit,) = caches.hit_tokens(rows, {BLOCK: chain}, len(blocks) * BLOCK + 1)
        return int(hit) // BLOCK

    def allowed(self, blocks: list[int]) -> int:
        """Return the hit that the rule allows: the last blocks before its end are kept, or all
        blocks if there are fewer.
        """
        names = ENGINE.names(tokens(blocks))
        ends = range(len(blocks), 0, -1)
        found = (e for e in ends if all(n in self.held for n in names[max(0, e - self.needed) : e]))
        return next(found, 0)


class Histories(RuleBasedStateMachine):
    """Random histories in which prompts are computed in chunks, any of their blocks may be kept or
    evicted, and the cache is emptied.
    """

    @initialize(window=st.sampled_from([WINDOW, 0]))
    def start(self, window: int) -> None:
        self.pair = Pair(window)

    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, 8),
        cuts=st.sets(st.integers(1, 7)),
        kept=st.sets(st.integers(0, 7)),
        tail=st.booleans(),
    )
    def computed(
        self, prompt: list[int], length: int, cuts: set[int], kept: set[int], tail: bool
    ) -> None:
        blocks = prompt[:length]
        if tail:
            kept = {*kept, *range(len(blocks) - self.pair.needed, len(blocks))}
        names = ENGINE.names(tokens(blocks))
        first = self.pair.allowed(blocks)
        for cut in [*sorted(c for c in cuts if first < c < len(blocks)), len(blocks)]:
            new = [at for at in range(first, cut) if at in kept]
            new = [at for at in new if names[at] not in self.pair.held]
            if first < cut:
                self.pair.computed(blocks[:cut], first, new)
            first = cut

    @rule(data=st.data())
    def evicted(self, data: st.DataObject) -> None:
        if self.pair.held:
            some = st.lists(st.sampled_from(sorted(self.pair.held)), max_size=4, unique=True)
            self.pair.evicted(data.draw(some))

    @rule()
    def cleared(self) -> None:
        self.pair.tell({"type": "AllBlocksCleared"})
        self.pair.held.clear()

    @precondition(lambda self: hasattr(self, "pair"))
    @invariant()
    def hits_equal_those_of_plain_sets(self) -> None:
        for prompt in PROMPTS:
            for length in range(1, len(prompt) + 1):
                hit = self.pair.hit_blocks(prompt[:length])
                assert hit == self.pair.allowed(prompt[:length])


Histories.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=25, deadline=None
)
TestHistories = Histories.TestCase


def test_no_hits_are_expected_from_dispatches_alone() -> None:
    pair = Pair()
    pair.computed(PROMPTS[0], 0, [5, 6, 7])
    pair.world.core.on_arrival(pair.world.arrival(PROMPTS[1]))
    assert pair.hit_blocks(PROMPTS[1]) == 0
    assert pair.hit_blocks(PROMPTS[0]) == 8


def test_hits_are_the_same_after_the_record_is_saved_and_loaded() -> None:
    """A restarted router expects the same hits, from the record that the earlier router saved."""
    pair = Pair()
    pair.computed(PROMPTS[0], 0, [5, 6, 7])
    (worker,) = pair.world.core.workers
    before = worker.kv.blocks
    before.load(before.dump())
    assert before.is_hybrid
    assert pair.hit_blocks(PROMPTS[0]) == 8
    assert pair.hit_blocks(PROMPTS[0][:7]) == 0


def test_an_event_of_full_attention_ends_the_hits_by_windows_alone() -> None:
    pair = Pair()
    pair.computed(PROMPTS[0], 0, [5, 6, 7])
    full = ENGINE.store_event(tokens(PROMPTS[3]), 0, [0, 1])
    pair.tell({**full, "group_idx": 1, "kv_cache_spec_kind": "full_attention"})
    assert pair.hit_blocks(PROMPTS[0]) == 0
    (worker,) = pair.world.core.workers
    assert worker.kv.blocks.has_full_attention


def test_a_cache_with_unknown_block_names_is_estimated() -> None:
    pair = Pair()
    stranger = Engine(BLOCK, WINDOW, "another seed")
    for _ in range(64):
        pair.tell(stranger.store_event(tokens(PROMPTS[0]), 0, [5, 6, 7]))
    (worker,) = pair.world.core.workers
    assert worker.kv.guessed == "useless"
    assert not worker.has_usable_events
