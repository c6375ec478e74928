"""Tests of engines that recompute the last block of each hit: the router learns this from answers,
and can unlearn it.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import Finish
from router.core.placement.choice import Choice
from router.core.workers.last_block import ANSWERS, LastBlocks
from tests.effort import examples
from tests.router.core.core_world import BLOCK, World, stored, tokens_of

SLOTS = 3
PROMPT = [1, 2, 3, 4, 5]
# What an answer found beside what events promised, in blocks.
OFF = st.sampled_from([-3, -1, -1, -1, -1, -1, 0, 0, 0, 1])


def answer_with(lessons: LastBlocks, slot: int, count: int, off: int, promised: int = 5) -> None:
    for _ in range(count):
        lessons.answered(slot, promised, promised + off, BLOCK)


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(2, 6), OFF), max_size=300))
@settings(max_examples=examples(200))
def test_the_required_number_of_answers_in_a_row_decides(
    answers: list[tuple[int, int, int]],
) -> None:
    """The number of answers in a row that the rule requires decides, compared with a list of all
    answers since the last change, by worker.
    """
    lessons = LastBlocks(SLOTS)
    learned, since = [False] * SLOTS, [list[int]() for _ in range(SLOTS)]
    for slot, promised, off in answers:
        found = max(promised + off, 0)
        lessons.answered(slot, promised, found, BLOCK)
        since[slot].append(found - promised if found else -promised)
        if since[slot][-ANSWERS:] == [0 if learned[slot] else -1] * ANSWERS:
            learned[slot], since[slot] = not learned[slot], []
        assert [lessons.learned(s) for s in range(SLOTS)] == learned


@given(st.lists(st.integers(0, 40), min_size=SLOTS, max_size=SLOTS), st.sets(st.integers(0, 2)))
@settings(max_examples=examples(200))
def test_a_learned_worker_loses_the_last_whole_block_of_each_hit(
    hits: list[int], taught: set[int]
) -> None:
    lessons = LastBlocks(SLOTS)
    for slot in taught:
        answer_with(lessons, slot, ANSWERS, -1)
    seen = lessons.without(np.array(hits, dtype=np.int64), slice(0, SLOTS)).tolist()
    for slot, hit in enumerate(hits):
        less = max(hit // BLOCK - 1, 0) * BLOCK
        assert seen[slot] == (less if slot in taught else hit)


def test_the_learned_rule_ends_with_its_engine() -> None:
    lessons = LastBlocks(SLOTS)
    answer_with(lessons, 1, ANSWERS, -1)
    lessons.forget(1)
    assert not lessons.learned(1)
    answer_with(lessons, 1, ANSWERS - 1, -1)
    lessons.forget(1)
    answer_with(lessons, 1, ANSWERS - 1, -1)
    assert not lessons.learned(1)


def test_answers_without_hits_do_not_change_the_learned_rule() -> None:
    lessons = LastBlocks(SLOTS)
    answer_with(lessons, 0, 3 * ANSWERS, -1, promised=1)
    assert not lessons.learned(0)


class Engine(World):
    """A worker that reported a prompt's blocks, and finds some blocks fewer. Lifetime: test."""

    def __init__(self) -> None:
        super().__init__(1)
        self.events(0, 0, stored(PROMPT))

    def ask(self, less: int, count: int = ANSWERS) -> None:
        for _ in range(count):
            arrival = self.arrival([*PROMPT, 7])
            self.core.on_arrival(arrival)
            cached_tokens = (len(PROMPT) - less) * BLOCK
            self.core.on_finish(
                Finish(self.now_s, arrival.request_id, arrival.prompt_tokens, cached_tokens, 1)
            )
            self.now_s += 1

    @property
    def expected(self) -> int:
        """Return how many blocks the next request is expected to find cached."""
        choice = self.core.explain(self.arrival([*PROMPT, 8]))
        assert isinstance(choice, Choice)
        return choice.decision.hit_tokens // BLOCK


def test_expected_hits_lack_the_last_block_for_a_worker_with_draft_heads() -> None:
    world = Engine()
    assert (len(tokens_of(PROMPT)), world.expected) == (5 * BLOCK, 5)
    world.ask(less=1, count=ANSWERS - 1)
    assert world.expected == 5
    world.ask(less=1, count=1)
    assert world.expected == 4
    world.ask(less=1, count=3 * ANSWERS)
    assert world.expected == 4


def test_a_wrongly_learned_rule_is_unlearned_from_answers() -> None:
    world = Engine()
    world.ask(less=1)
    world.ask(less=0, count=ANSWERS - 1)
    assert world.expected == 4
    world.ask(less=0, count=1)
    assert world.expected == 5
