"""Tests of changing numbers of ranks, and of removals: each rank is always one worker."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import patch

import aiohttp
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from router.engines.worker_spec import parse_worker_spec
from router.fleet.context import FleetContext, FleetTerms
from router.fleet.manager import FleetManager
from router.fleet.member import Member
from router.http.reply import RelayLimits
from tests.effort import examples

SLOTS = 64
RANKS = st.sampled_from([(0,), (3,), (0, 1), (2, 3), (0, 1, 2), tuple(range(6))])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("restart"), RANKS, st.randoms(use_true_random=False)),
        st.tuples(st.just("remove"), st.integers(0, 5), st.none()),
    ),
    max_size=12,
)


async def idle(member: Member) -> None:
    """Do nothing in place of following a worker, since the test decides what is found at
    the URL.
    """
    await asyncio.Event().wait()


async def play(steps: list[tuple[str, object, object]]) -> None:
    context = zmq.asyncio.Context()
    terms = FleetTerms(0.5, 1.0, 1.0, 100, RelayLimits())
    async with aiohttp.ClientSession() as http:
        shared = FleetContext(http, context, time.monotonic, lambda fact: None, terms)
        fleet = FleetManager(shared, SLOTS)
        fleet.add(parse_worker_spec("http://127.0.0.1:9"))
        removed: set[int] = set()

        def staying() -> list[Member]:
            return [m for m in fleet.members.values() if not m.leaving]

        for what, value, chance in steps:
            if what == "remove":
                for member in staying():
                    if member.spec.rank == value:
                        removed.add(value)
                        fleet.leave(member, "test")
                continue
            assert isinstance(value, tuple)
            had = bool(staying())
            for _ in range(2):  # a member that got another rank is asked again
                members = staying()
                chance.shuffle(members)
                for member in members:
                    if not member.leaving:
                        fleet._fits(member, value)
            ranks = [m.spec.rank for m in staying()]
            assert len(ranks) == len(set(ranks))
            wanted = set(value) - removed if len(value) > 1 else {None}
            assert set(ranks) == (wanted if had else set())
            assert all(fleet._fits(m, value) for m in staying())
        fleet.sweep(lambda worker_id: 0)
        await fleet.aclose()
        assert not fleet.members
    context.destroy(linger=0)


@settings(max_examples=examples(100), deadline=None)
@given(STEPS)
def test_each_rank_is_one_worker_unless_it_was_removed(
    steps: list[tuple[str, object, object]],
) -> None:
    with patch.object(Member, "run", idle):
        asyncio.run(play(steps))
