"""Tests of the shares of revisions: disaggregated requests are distributed by the capacity of each
revision.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.facts import Arrival, Failure, Prefilled, Silence, WorkerChange
from router.core.contract.actions import Dispatch
from router.core.placement.retries import OTHER_REVISION
from router.core.placement.revisions import in_order, shares_of
from tests.router.core.core_world import World

SESSIONS = 4_000
SERIALS = itertools.count()


@dataclass(frozen=True)
class Count:
    """The number of workers of each role in one revision."""

    prefill: int
    decode: int
    both: int = 0


def rollout(*counts: Count, serves_alone: bool = False, **settings: object) -> World:
    """Return a pool of revisions v0, v1 and so on, each of which disaggregates only
    within itself.
    """
    world = World(workers=0, disaggregation="always", **settings)
    for revision, count in enumerate(counts):
        roles = ["prefill"] * count.prefill + ["decode"] * count.decode + ["both"] * count.both
        for role in roles:
            join(world, len(list(world.core.workers)), role, revision, serves_alone)
    return world


def join(world: World, number: int, role: str, revision: int, serves_alone: bool = False) -> None:
    of = {"group": f"g@v{revision}", "revision": f"v{revision}"}
    world.join(number, role=role, serves_alone=serves_alone, **of)


def revision_of(world: World, session: str | None, **fields: object) -> str | None:
    """Return the revision whose workers get a request, which ends at once; None if it is held."""
    return revision_at(world, world.arrival([1, 2, 3], session=session, splits=True, **fields))


def revision_at(world: World, arrival: Arrival) -> str | None:
    (action,) = world.core.on_arrival(arrival)
    assert isinstance(action, Dispatch), action
    worker = world.core.workers.get(action.stages[0].worker_id)
    assert worker is not None
    if action.stages[0].role == "prefill":
        (second,) = world.core.on_prefilled(Prefilled(world.now_s, arrival.request_id, 0))
        assert isinstance(second, Dispatch)
        decode = world.core.workers.get(second.stages[0].worker_id)
        assert decode is not None
        assert decode.facts.revision == worker.facts.revision, "a pair of two revisions"
    world.core.on_failure(Failure(world.now_s, arrival.request_id, "client"))
    return worker.facts.revision


def homes(world: World, sessions: int = SESSIONS) -> dict[int, str | None]:
    return {n: revision_of(world, f"s{n}") for n in range(sessions)}


def test_the_scarcest_role_limits_the_share_of_a_revision() -> None:
    """The role with the fewest workers limits a revision: 2 prefill and 9 decode workers against 1
    and 1 have the capacities 1 and 1/9, so nine of ten sessions stay.
    """
    shares = shares_of(rollout(Count(2, 9), Count(1, 1), max_workers=16).core.workers)
    assert [(one.revision, one.weight) for one in shares] == [("v0", 1.0), ("v1", 1 / 9)]
    keys = (b"%d" % n for n in range(20_000))
    counts = Counter(one.revision for key in keys for one in in_order(shares, key)[:1])
    assert abs(counts["v1"] / 20_000 - 0.1) < 0.01


def test_a_single_revision_has_no_shares() -> None:
    assert shares_of(rollout(Count(2, 2)).core.workers) == ()


def test_only_the_necessary_sessions_move_when_shares_change() -> None:
    world = rollout(Count(2, 2), Count(1, 1))
    before = homes(world)
    assert before == homes(world)
    share = Counter(before.values())["v1"] / SESSIONS
    assert abs(share - 1 / 3) < 0.03
    join(world, 6, "prefill", 1)
    assert before == homes(world), "it has no more that decode"
    join(world, 7, "decode", 1)
    after = homes(world)
    moved = {(before[n], after[n]) for n in before if before[n] != after[n]}
    assert moved == {("v0", "v1")}
    assert abs(Counter(after.values())["v1"] / SESSIONS - 1 / 2) < 0.03


def test_a_revision_that_lacks_a_role_gets_no_requests() -> None:
    world = rollout(Count(2, 2), Count(0, 2))
    assert set(homes(world, 200).values()) == {"v0"}
    join(world, 7, "prefill", 1)
    assert set(homes(world, 200).values()) == {"v0", "v1"}


def test_other_revisions_take_the_share_of_a_draining_revision() -> None:
    world = rollout(Count(1, 1), Count(1, 1))
    before = homes(world, 500)
    world.core.on_worker(WorkerChange(world.now_s, 1, "draining"))
    assert set(homes(world, 500).values()) == {"v1"}
    world.core.on_worker(WorkerChange(world.now_s, 1, "ready"))
    assert homes(world, 500) == before


def test_requests_without_a_session_are_distributed_by_their_prompt() -> None:
    world = rollout(Count(1, 1), Count(1, 1))
    assert len({revision_of(world, None) for _ in range(50)}) == 1
    tenants = {revision_of(world, "s", tenant=f"t{n}") for n in range(50)}
    assert tenants == {"v0", "v1"}


def test_prompts_with_a_common_prefix_are_distributed_over_revisions() -> None:
    """Prompts with the same beginning (a system prompt of 50 blocks), followed by a block of their
    own or a few tokens more, are distributed over the revisions.
    """
    world = rollout(Count(2, 2), Count(1, 1))
    system = list(range(50))
    got: Counter[str | None] = Counter()
    for n in range(600):
        arrival = world.arrival([*system, 1_000 + n], splits=True)
        got[revision_at(world, arrival)] += 1
    assert abs(got["v1"] / 600 - 1 / 3) < 0.08
    tails = {
        revision_at(world, world.arrival(system, splits=True, prompt_tokens=50 * 16 + n))
        for n in range(1, 16)
    }
    assert tails == {"v0", "v1"}


def test_a_long_conversation_without_a_session_keeps_its_revision() -> None:
    world = rollout(Count(1, 1), Count(1, 1))
    (size,) = world.arrival([1], splits=True).chains
    turns = [list(range(16_384 // size + n)) for n in range(0, 200, 10)]
    assert len({revision_at(world, world.arrival(turn, splits=True)) for turn in turns}) == 1


@dataclass(frozen=True)
class Trouble:
    """An event that takes worker 4, the only prefill worker of v1, out of service."""

    name: str

    def happens(self, world: World) -> None:
        if self.name == "silent":
            world.core.on_silence(Silence(world.now_s, 4, 2, 3))
        elif self.name == "ejected":
            while world.core.workers.get(4).health.state == "healthy":
                arrival = world.arrival([9], session=f"z{next(SERIALS)}", splits=True)
                (sent,) = world.core.on_arrival(arrival)
                blame = "worker" if sent.stages[0].worker_id == 4 else "client"
                fact = Failure(world.now_s, arrival.request_id, blame, reason="status_5xx")
                world.core.on_failure(fact)


@pytest.mark.parametrize("trouble", [Trouble("silent"), Trouble("ejected")], ids=lambda t: t.name)
def test_a_revision_without_an_available_prefill_worker_gets_no_requests(
    trouble: Trouble,
) -> None:
    world = rollout(Count(2, 2), Count(1, 2), max_workers=16)
    assert set(homes(world, 50).values()) == {"v0", "v1"}
    trouble.happens(world)
    assert set(homes(world, 50).values()) == {"v0"}


def test_a_failed_prefill_leg_is_retried_in_another_revision() -> None:
    world = rollout(Count(2, 2), Count(1, 2), max_workers=16)
    failed = 0
    for n in range(40):
        arrival = world.arrival([1, 2, 3], session=f"s{n}", splits=True)
        (sent,) = world.core.on_arrival(arrival)
        assert isinstance(sent, Dispatch)
        if sent.stages[0].worker_id == 4:
            failed += 1
            fact = Failure(
                world.now_s, arrival.request_id, "worker", retry=True, reason="status_5xx"
            )
            (sent,) = world.core.on_failure(fact)
            assert isinstance(sent, Dispatch), sent
            assert sent.stages[0].worker_id in (0, 1)
            (second,) = world.core.on_prefilled(Prefilled(world.now_s, arrival.request_id, 0))
            assert isinstance(second, Dispatch)
            assert second.stages[0].worker_id in (2, 3)
        world.core.on_failure(Failure(world.now_s, arrival.request_id, "client"))
        world.core.workers.get(4).health.end_row()
        if failed == 2:
            return
    raise AssertionError("v1 got none")


def test_another_revision_prefills_if_the_chosen_revision_is_full() -> None:
    """If the chosen revision's only prefill worker is full, a worker of another revision computes
    the prompt; v1 has two decode workers here.
    """
    world = rollout(Count(2, 2), Count(1, 2), max_workers=16, worker_requests=1)
    prefills = []
    for n in range(3):
        arrival = world.arrival([n], session="same", splits=True)
        (action,) = world.core.on_arrival(arrival)
        assert isinstance(action, Dispatch)
        prefills.append(action.stages[0].worker_id)
    assert sorted(prefills) == [0, 1, 4]


def test_a_requested_revision_overrides_the_shares() -> None:
    world = rollout(Count(2, 2), Count(1, 1))
    for name, got in (("v1", {"v1"}), ("v0", {"v0"}), ("v9", {"v0", "v1"})):
        assert {revision_of(world, f"s{n}", revision=name) for n in range(100)} == got


def test_another_revision_serves_if_the_chosen_revision_is_full() -> None:
    world = rollout(Count(1, 1), Count(1, 1), worker_requests=1)
    for n in range(2):
        arrival = world.arrival([n], session="same", splits=True)
        (action,) = world.core.on_arrival(arrival)
        assert isinstance(action, Dispatch)
    assert world.core.held_requests == 0


def test_a_decode_worker_that_changed_its_revision_gets_no_decode_leg() -> None:
    """A decode worker that was updated in place to another revision while the prompt was computed
    does not get the request.
    """
    world = rollout(Count(1, 2))
    arrival = world.arrival([1, 2, 3], splits=True)
    world.core.on_arrival(arrival)
    promised = next(w for w in world.core.workers if world.core.ledger.decode_places_at(w.slot))
    join(world, promised.worker_id, "decode", 1)
    (second,) = world.core.on_prefilled(Prefilled(world.now_s, arrival.request_id, 0))
    assert isinstance(second, Dispatch)
    assert [(s.worker_id, s.role) for s in second.stages] == [(3 - promised.worker_id, "decode")]


def test_a_revision_change_is_no_failure_and_the_worker_is_tried_again() -> None:
    world = rollout(Count(1, 1), max_attempts=1)
    arrival = world.arrival([1, 2, 3], splits=True)
    world.core.on_arrival(arrival)
    world.core.on_prefilled(Prefilled(world.now_s, arrival.request_id, 0))
    for worker_id, role in enumerate(("prefill", "decode")):
        join(world, worker_id, role, 1)
    fact = Failure(world.now_s, arrival.request_id, "busy", retry=True, reason=OTHER_REVISION)
    (again,) = world.core.on_failure(fact)
    assert isinstance(again, Dispatch)
    assert [(s.worker_id, s.role) for s in again.stages] == [(0, "prefill")]
    assert [w.health.failures for w in world.core.workers] == [0, 0]


counts = st.builds(Count, st.integers(0, 3), st.integers(0, 3), st.integers(0, 1))


@given(st.lists(counts, min_size=1, max_size=4), st.booleans())
def test_shares_equal_those_of_the_oracle(pool: list[Count], serves_alone: bool) -> None:
    world = rollout(*pool, serves_alone=serves_alone, max_workers=32)
    got = {one.revision: one.weight for one in shares_of(world.core.workers)}
    there = {f"v{n}": one for n, one in enumerate(pool) if one.prefill + one.decode + one.both}
    if len(there) < 2:
        assert got == {}
        return
    prefill = {name: one.prefill + one.both for name, one in there.items()}
    decode = {name: one.decode + one.both for name, one in there.items()}
    most = max(*prefill.values(), 1), max(*decode.values(), 1)
    for name in there:
        parts = prefill[name] / most[0], decode[name] / most[1]
        alone = serves_alone and not prefill[name]
        assert math.isclose(got[name], parts[1] if alone else min(parts)), name


@given(st.dictionaries(st.integers(0, 5), st.floats(0.0, 1.0), max_size=6), st.binary())
@example({0: 5e-324}, b"\x01\x00")  # whose score is rounded to 0
def test_a_revision_with_weight_0_is_never_chosen(weights: dict[int, float], key: bytes) -> None:
    world = rollout(*(Count(1, 1) for _ in range(6)), max_workers=16)
    shares = shares_of(world.core.workers)
    weighted = [type(s)(s.revision, s.groups, weights.get(n, 0.0), s.seed)
                for n, s in enumerate(shares)]  # fmt: skip
    order = in_order(weighted, key)
    assert {one.revision for one in order} == {f"v{n}" for n, w in weights.items() if w > 0}
    assert all(one.weight > 0 for one in order)
