"""Tests of recovery: a core and the task that requests missed events recover from any loss of
events and answers.
"""

from __future__ import annotations

import asyncio

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.effort import examples
from tests.router.events.recovery_world import BLOCKS, BUFFER, CAPACITY_BLOCKS, Recovery

WHOLE = st.just(0)
ANY = st.integers(0, 4)


def steps(answers: st.SearchStrategy[int]) -> st.SearchStrategy[list]:
    return st.lists(
        st.one_of(
            *[st.tuples(st.just("publish"), st.integers(0, BLOCKS - 1), st.booleans())] * 4,
            st.tuples(st.just("publish"), st.just(-1), st.booleans()),
            *[st.tuples(st.just("deliver"), st.integers(1, 2))] * 4,
            *[st.tuples(st.just("go_on"), answers)] * 5,
            *[st.tuples(st.just(name)) for name in ("reconnect", "restart", "restart_unseen")],
            *[st.tuples(st.just(name)) for name in ("save", "restart_router", "settle")],
        ),
        max_size=60,
    )


PUBLISHED = [*[("publish", block, False) for block in (0, 3, 4)], ("settle",)]
GAP = [*PUBLISHED, ("publish", 1, True), ("publish", 2, False), ("deliver", 1)]
# Nobody answers for a gap at first, neither replay nor snapshot: all is given up.
GIVEN_UP = [*GAP, ("go_on", 4), ("go_on", 4)]
# A replay that brings nothing of use: the one who asks is content, the core is not.
OF_NO_USE = [*GAP, ("go_on", 1), ("go_on", 0), ("go_on", 4)]
# Another publisher that shows in no number, and nobody answers who is to tell.
PROOF_UNANSWERED = [
    ("publish", 1, False),
    ("reconnect",),
    ("settle",),
    ("restart_unseen",),
    ("go_on", 3),
]


async def check_recovery(history: list, snapshot: bool, buffer: int) -> None:
    one = Recovery(snapshot, buffer)
    try:
        for name, *what in history:
            await getattr(one, name)(*what)
            await one.quiet()
            one.check()
        await one.settle()
        one.check()
        await one.publish(0, lost=False)  # a batch that arrives shows what is missing before it
        await one.settle()
        one.check()
        assert one.seen <= one.publisher.held
        if snapshot or len(one.publisher.payloads) <= buffer:
            assert one.kv.exact
            assert one.seen == one.publisher.held
        for n in range(2 * CAPACITY_BLOCKS):  # every other one stores a block
            await one.publish(n // 2 % BLOCKS, lost=False)
            await one.settle()
        assert one.kv.known
        one.check()
    finally:
        await one.stop()


@settings(max_examples=examples(150), deadline=None)
@given(history=steps(ANY))
@example(history=GIVEN_UP)
@example(history=OF_NO_USE)
@example(history=PROOF_UNANSWERED)
def test_a_worker_with_a_snapshot_becomes_exact_with_the_next_batch(history: list) -> None:
    asyncio.run(check_recovery(history, snapshot=True, buffer=BUFFER))


@settings(max_examples=examples(150), deadline=None)
@given(history=steps(ANY))
def test_a_worker_without_snapshots_is_a_lower_bound_until_its_cache_turns_over(
    history: list,
) -> None:
    asyncio.run(check_recovery(history, snapshot=False, buffer=0))


@settings(max_examples=examples(150), deadline=None)
@given(history=steps(WHOLE))
def test_a_worker_with_complete_replays_becomes_exact(history: list) -> None:
    asyncio.run(check_recovery(history, snapshot=False, buffer=10_000))
