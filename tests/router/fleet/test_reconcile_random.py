"""Tests of workers that are configured, added and removed in any order: the fleet always has the
right ones.
"""

from __future__ import annotations

import asyncio
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from router.engines.spec import WorkerSpec
from router.fleet.manager import DuplicateWorkerError, FleetManager, reconcile
from router.fleet.member import Member
from router.fleet.wanted import WantedWorker, key_of
from tests.effort import examples
from tests.router.fleet.fleet_support import fleet_of

SLOTS = 64
HOSTS = "ab"
SPECS = st.builds(
    lambda host, weight, size: WorkerSpec(f"http://{host}", weight=weight, block_size=size),
    st.sampled_from(HOSTS),
    st.sampled_from([1.0, 2.0]),
    st.sampled_from([None, 64]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("name"), st.lists(SPECS, max_size=2, unique_by=lambda s: s.url)),
        st.tuples(st.just("add"), SPECS),
        st.tuples(st.just("leave"), st.sampled_from(HOSTS)),
        st.tuples(st.just("sweep"), st.none()),
        st.tuples(st.just("forgive"), st.none()),
    ),
    min_size=12,
    max_size=40,
)


async def idle(member: Member) -> None:
    """Do nothing in place of following a worker, since no engine is at the URL."""
    await asyncio.Event().wait()


class ExpectedFleet:
    """The workers that the fleet should have, as sets. Lifetime: one history."""

    def __init__(self) -> None:
        self.named: dict[str, WorkerSpec] = {}
        self.by_hand: dict[str, WorkerSpec] = {}
        self.dismissed: set[str] = set()

    def staying(self) -> dict[str, WorkerSpec]:
        named = {url: s for url, s in self.named.items() if url not in self.dismissed}
        both = named | self.by_hand
        # A source that lists it, too, sets its thresholds and weight.
        for url, spec in self.by_hand.items():
            if url in named and named[url].block_size == spec.block_size:
                self.by_hand[url] = both[url] = named[url]
        return both


async def play(steps: list[tuple[str, object]]) -> None:
    async with fleet_of(SLOTS) as (fleet, _):
        oracle = ExpectedFleet()
        for what, value in steps:
            _step(fleet, oracle, what, value)
            if what == "sweep":
                await asyncio.sleep(0)
            staying = [m for m in fleet.members.values() if not m.leaving]
            assert len({key_of(m.spec) for m in staying}) == len(staying)
            if what == "name":
                assert {m.spec.url: m.spec for m in staying} == oracle.staying()
            assert all(m.draining for m in fleet.members.values() if m.leaving)
            assert not any(m.draining for m in staying)


def _step(fleet: FleetManager, oracle: ExpectedFleet, what: str, value: object) -> None:
    if what == "name":
        assert isinstance(value, list)
        oracle.named = {spec.url: spec for spec in value}
        oracle.dismissed &= oracle.named.keys()
        assert reconcile(fleet, [WantedWorker(spec, "test") for spec in value]) == []
    elif what == "add":
        assert isinstance(value, WorkerSpec)
        try:
            fleet.add(value, "admin", by_hand=True)
        except DuplicateWorkerError:
            return
        oracle.by_hand[value.url] = value
        oracle.dismissed.discard(value.url)
    elif what == "leave":
        for member in list(fleet.members.values()):
            if member.spec.url == f"http://{value}" and not member.leaving:
                oracle.by_hand.pop(member.spec.url, None)
                oracle.dismissed.add(member.spec.url)
                fleet.leave(member, "admin")
    elif what == "sweep":
        fleet.sweep(lambda worker_id: worker_id % 2)
    else:
        fleet.allow_removed_workers()
        oracle.dismissed.clear()


@settings(max_examples=examples(100), deadline=None)
@given(STEPS)
def test_the_fleet_has_the_configured_workers_and_those_added_by_hand(
    steps: list[tuple[str, object]],
) -> None:
    with patch.object(Member, "run", idle):
        asyncio.run(play(steps))
