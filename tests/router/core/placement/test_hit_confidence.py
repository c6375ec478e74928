"""Tests of the confidence in a worker's KV events: an honest worker's events always count in full,
and those of a worker whose answers contradict them count less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import (
    Arrival,
    Cleared,
    Finish,
    FirstToken,
    Removed,
    ReplayEnd,
    Stored,
    WorkerChange,
)
from router.core.contract.actions import Action, Confirmed, Dispatch, Doubted, Resync
from router.core.placement.choice import Choice
from router.core.workers.mirror import ANSWERS
from tests.effort import examples
from tests.router.core.core_world import BLOCK, World, names_of, stored, tokens_of
from tests.router.record.record_play_support import RecordedDispatcher

BLOCKS = 10  # of a prompt
PROMPTS = 100


def prompt(family: int, blocks: int = BLOCKS) -> list[int]:
    return [100 * family + i + 1 for i in range(blocks)]


class Pool(World):
    """A pool of workers in which the test makes the events of worker 0. Lifetime: test."""

    def __init__(self, workers: int = 1, **settings: object) -> None:
        super().__init__(workers, **settings)  # type: ignore[arg-type]
        self.seq = 0
        self.claim_all()

    def claim(self, *events: object) -> list[Action]:
        self.seq += 1
        return self.events(0, self.seq - 1, *events)

    def claim_all(self) -> None:
        self.claim(*(stored(prompt(family)) for family in range(PROMPTS)))

    def ask(self, family: int, cached: int | None = 0, **fields: object) -> list[Action]:
        """Send a prompt to worker 0, which answers that this many of its blocks were cached."""
        arrival = self.arrival([*prompt(family), 7], **fields)
        (dispatch,) = self.core.on_arrival(arrival)
        assert isinstance(dispatch, Dispatch)
        assert dispatch.worker_id == 0
        cached_tokens = None if cached is None else cached * BLOCK
        fact = Finish(self.now_s, arrival.request_id, arrival.prompt_tokens, cached_tokens, 1)
        return self.core.on_finish(fact)

    def refute(self, answers: int = ANSWERS) -> list[Action]:
        """Let `answers` answers report no cached tokens; return the actions after the last one."""
        actions: list[Action] = []
        for family in range(answers):
            assert actions == []
            actions = self.ask(family)
        return actions

    @property
    def seen(self) -> Mapping[str, float]:
        """Return the data of worker 0 that policies see in a decision about a prompt that it claims
        to hold.
        """
        return self.seen_of(prompt(PROMPTS - 1))

    def seen_of(self, blocks: list[int]) -> Mapping[str, float]:
        choice = self.core.explain(self.arrival([*blocks, 7]))
        assert isinstance(choice, Choice)
        assert choice.decision.details is not None
        return choice.decision.details.seen[0].columns

    @property
    def confidence(self) -> float:
        return float(self.core.columns.hit_confidence[0])

    @property
    def hits(self) -> float:
        return self.seen["hit_tokens"] / BLOCK


def test_a_worker_that_never_has_its_claimed_hits_loses_them() -> None:
    world = Pool()
    world.refute(ANSWERS - 1)
    assert (world.confidence, world.hits) == (1.0, BLOCKS)
    assert world.ask(50) == [Doubted(0, "refuted", 0.0)]
    assert (world.confidence, world.hits, world.seen["hit_confidence"]) == (0.0, 0, 0.0)
    assert world.ask(51) == []  # it is told once


def test_another_worker_is_chosen_once_the_claimed_hits_are_refuted() -> None:
    world = Pool(workers=2, policy="kv_prefix")
    world.events(1, 0, stored(prompt(0)))
    world.refute()
    (dispatch,) = world.core.on_arrival(world.arrival([*prompt(0), 7]))
    assert dispatch.worker_id == 1


def test_refuted_answers_also_discount_the_claims_in_other_tiers() -> None:
    world = Pool()
    longer = prompt(PROMPTS - 1, BLOCKS + 2)
    names, tokens = names_of(longer), tuple(tokens_of(longer).tolist())
    world.claim(Stored(names, None, tokens, BLOCK, "host"))

    assert world.seen_of(longer)["hit_tokens_host"] == 2 * BLOCK
    world.refute()
    assert world.seen_of(longer)["hit_tokens_host"] == 0


def test_partly_true_claims_count_by_the_share_that_was_found() -> None:
    world = Pool()
    for family in range(4 * ANSWERS):
        world.ask(family, cached=4)
    assert world.confidence == pytest.approx(0.4)
    assert world.hits == int(0.4 * BLOCKS * BLOCK) / BLOCK


def test_confirming_answers_restore_the_confidence() -> None:
    world = Pool()
    world.refute()
    needed = 0
    while world.confidence < 1.0:
        before, actions = world.confidence, world.ask(needed, cached=BLOCKS)
        assert world.confidence > before
        needed += 1
    assert actions == [Confirmed(0)]
    assert needed <= 2 * ANSWERS
    assert world.hits == BLOCKS


@pytest.mark.parametrize(
    "how", ["cleared", "restarted", "down", "snapshot", "replayed", "given up"]
)
def test_a_reset_cache_regains_confidence_and_loses_it_sooner(how: str) -> None:
    world = Pool()
    world.refute()
    if how == "cleared":
        world.claim(Cleared())
    elif how == "restarted":
        world.seq = 0
        world.claim(stored(prompt(0)))
    elif how == "down":
        world.core.on_worker(WorkerChange(0.0, 0, "down"))
        world.core.on_worker(WorkerChange(0.0, 0, "ready"))
        world.seq = 0
    elif how == "snapshot":
        world.events(0, world.seq, stored(prompt(0)), source="snapshot")
        world.seq += 1
    else:
        world.seq += 1
        assert world.claim(stored(prompt(0))) == [Resync(0, world.seq - 2)]
        if how == "replayed":
            world.events(0, world.seq - 2, stored(prompt(1)), source="replay")
        world.core.on_replay_end(ReplayEnd(0.0, 0, answered=True))
    world.claim_all()
    assert (world.confidence, world.hits) == (1.0, BLOCKS)
    for family in range(3):
        assert world.ask(family) == []
    assert world.ask(3) == [Doubted(0, "refuted", 0.0)]  # it was at it before


def test_a_new_worker_in_the_slot_starts_with_full_confidence() -> None:
    world = Pool()
    world.refute()
    world.core.on_worker(WorkerChange(0.0, 0, "gone"))
    world.join(5)
    slot = world.core.workers.get(5).slot  # type: ignore[union-attr]
    assert (slot, world.confidence, world.core.caches.confidence.discounted) == (0, 1.0, 0)


def test_requests_from_before_a_restart_do_not_lower_the_confidence() -> None:
    """Requests that were under way when the worker went down or its cache was cleared do not lower
    the confidence in its events.
    """
    world = Pool()
    arrivals = [world.arrival([*prompt(family), 7]) for family in range(2 * ANSWERS)]
    for arrival in arrivals:
        world.core.on_arrival(arrival)
    world.core.on_worker(WorkerChange(0.0, 0, "down"))
    world.core.on_worker(WorkerChange(0.0, 0, "ready"))
    world.seq = 0
    world.claim_all()
    for arrival in arrivals:
        assert world.core.on_finish(Finish(0.0, arrival.request_id, 41, 0, 1)) == []
    assert world.confidence == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {"cached": None},  # it reports nothing
        {"cached": BLOCKS - 1},  # the last block is computed again, as with speculative decoding
        {"cached": BLOCKS + 5},  # it found more, in host memory perhaps
        {"longest_prompt_tokens": 5},  # of several prompts the sum is told
        {"approximate": True},
    ],
    ids=["silent", "last", "more", "several", "text"],
)
def test_inconclusive_answers_do_not_lower_the_confidence(fields: dict[str, object]) -> None:
    world = Pool()
    for family in range(3 * ANSWERS):
        assert world.ask(family, **fields) == []  # type: ignore[arg-type]
    assert world.confidence == 1.0


def test_a_minority_of_refuted_answers_does_not_lower_the_confidence() -> None:
    world = Pool()
    for family in range(PROMPTS):
        world.ask(family, cached=0 if family % 3 == 0 else BLOCKS)
        assert world.confidence == 1.0


def test_blocks_evicted_before_the_request_do_not_lower_the_confidence() -> None:
    world = Pool()
    for family in range(2 * ANSWERS):
        first, second = (world.arrival([*prompt(f), 7]) for f in (family, PROMPTS - 1 - family))
        for arrival in (first, second):
            world.core.on_arrival(arrival)
        world.claim(Removed(names_of(prompt(PROMPTS - 1 - family))))
        for arrival, cached in ((first, BLOCKS), (second, 0)):
            done = (arrival.request_id, arrival.prompt_tokens, cached * BLOCK, 1)
            assert world.core.on_finish(Finish(world.now_s, *done)) == []
    assert world.confidence == 1.0


def test_own_evictions_of_a_worker_do_not_excuse_missing_hits() -> None:
    """Evictions that a worker's own prompts cause do not excuse missing hits: the cache is full, so
    each computed prompt evicts another prompt, and the worker's hit confidence falls to 0.
    """
    world = Pool()
    for family in range(ANSWERS):
        arrival = world.arrival([*prompt(family), 7])
        world.core.on_arrival(arrival)
        world.claim(Removed(names_of(prompt(PROMPTS - 2 - family))))
        actions = world.core.on_finish(Finish(world.now_s, arrival.request_id, 41, 0, 1))
    assert actions == [Doubted(0, "refuted", 0.0)]


def test_hits_that_only_the_router_expected_do_not_lower_the_confidence() -> None:
    """Requests that share a prompt which is still being computed do not lower the confidence in the
    worker, since only the router expected those hits.
    """
    world = World(workers=1)
    world.events(0, 0)
    for _ in range(2 * ANSWERS):
        arrival = world.arrival(prompt(1))
        (dispatch,) = world.core.on_arrival(arrival)
        done = Finish(world.now_s, arrival.request_id, BLOCKS * BLOCK, 0, 1)
        assert world.core.on_finish(done) == []
    assert dispatch.decision.hit_tokens == BLOCKS * BLOCK - 1
    assert world.core.columns.hit_confidence[0] == 1.0


class HonestEngine:
    """Computes one prompt after the other, keeps the latest blocks, and reports all changes.
    Lifetime: test.
    """

    def __init__(self, world: World, room: int) -> None:
        self._world, self._room = world, room
        self._held: OrderedDict[tuple[int, ...], None] = OrderedDict()  # the coldest first
        self._queue: list[tuple[Arrival, list[int]]] = []
        self._seq = 0

    def take(self, blocks: list[int]) -> None:
        arrival = self._world.arrival(blocks)
        (dispatch,) = self._world.core.on_arrival(arrival)
        assert isinstance(dispatch, Dispatch)
        self._queue.append((arrival, blocks))

    @property
    def queued(self) -> int:
        return len(self._queue)

    def compute(self) -> None:
        """Compute the prompt that waits longest: its events, its first token, its end."""
        arrival, blocks = self._queue.pop(0)
        prefixes = [tuple(blocks[: i + 1]) for i in range(len(blocks))]
        found = 0
        while found < len(blocks) - 1 and prefixes[found] in self._held:
            found += 1
        for prefix in reversed(prefixes):  # its end is the first to go
            self._held[prefix] = None
            self._held.move_to_end(prefix)
        gone = [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self._room)]
        events = [Removed((names_of(list(prefix))[-1],)) for prefix in gone]
        self._world.events(0, self._seq, *events, stored(blocks))
        self._seq += 1
        number, core, now_s = arrival.request_id, self._world.core, self._world.now_s
        core.on_first_token(FirstToken(now_s, number))
        core.on_finish(Finish(now_s, number, len(blocks) * BLOCK, found * BLOCK, 1))


@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    room=st.integers(8, 60),
    families=st.integers(1, 12),
    queue=st.integers(1, 12),
)
def test_an_honest_worker_is_never_discounted(
    seed: int, room: int, families: int, queue: int
) -> None:
    """An honest worker's events always count in full, for any size of its cache and any length of
    its queue, because it reports evictions.
    """
    world, rng = World(workers=1), Random(seed)
    engine = HonestEngine(world, room)
    for number in range(300):
        engine.take(prompt(rng.choice([number, rng.randrange(families)]) % families))
        while engine.queued > rng.randrange(queue):
            engine.compute()
        assert world.core.columns.hit_confidence[0] == 1.0


@settings(max_examples=examples(50), deadline=None)
@given(
    before=st.integers(0, 3 * ANSWERS),
    finds=st.integers(0, 3),
    queued=st.integers(1, 6),
)
def test_a_lying_worker_loses_its_advantage_within_a_fixed_number_of_answers(
    before: int, finds: int, queued: int
) -> None:
    """A worker that lies loses its advantage within a fixed number of answers, however long it was
    honest before, and whatever waits in its queue.
    """
    world = Pool()
    for family in range(before):
        world.ask(family, cached=BLOCKS)
    answers = 0
    while world.confidence == 1.0:
        arrivals = [world.arrival([*prompt(n), 7]) for n in range(queued)]
        for arrival in arrivals:
            world.core.on_arrival(arrival)
        for arrival in arrivals:
            done = (arrival.request_id, arrival.prompt_tokens, finds * BLOCK, 1)
            world.core.on_finish(Finish(world.now_s, *done))
        answers += queued
        assert answers < 2 * ANSWERS + queued
    assert world.hits < BLOCKS / 2


def test_a_recording_with_a_lying_worker_plays_back(tmp_path: Path) -> None:
    desk = RecordedDispatcher(tmp_path / "facts")
    desk.join(0)
    desk.events(0, 0, *(stored(prompt(family)) for family in range(ANSWERS)))
    for number in range(ANSWERS):
        desk.arrive(number, [*prompt(number), 7])
        desk.tell(Finish(1.0, number, (BLOCKS + 1) * BLOCK, 0, 1))
    assert desk.core.columns.hit_confidence[0] == 0.0
    assert desk.played().ended == "the router ended"
