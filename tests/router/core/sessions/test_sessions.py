"""Tests of followed sessions: they are found by id or by prompt, stay with the worker they were
sent to, and are forgotten in time.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Identity
from router.core.sessions.sessions import Sessions, TrackedRequest
from tests.effort import EFFORT
from tests.router.core.sessions.session_history import (
    BLOCK,
    SLOTS,
    History,
    arrival,
    columns,
    come,
    prompt,
)
from tests.router.property_support import patient

STEPS = st.lists(
    st.tuples(st.integers(0, 14), st.integers(0, 20), st.integers(0, 20)), max_size=120
)
SYSTEM = (1, 6 * BLOCK)


def followed(limit: int = 64) -> Sessions:
    return Sessions(columns(), SLOTS, limit, 4_096)


def turn(sessions: Sessions, tokens: np.ndarray, now_s: float = 0.0, **fields: object) -> int:
    """Run a whole turn of a session on the first worker; return the session's row."""
    tracked = come(sessions, tokens, now_s, **fields)
    sessions.dispatched(tracked, 0)
    sessions.ended(tracked, 5, now_s)
    return tracked.row


@patient
@given(STEPS, st.sampled_from((2, 8, 64)))
def test_sums_equal_those_of_the_table_after_any_history(
    steps: list[tuple[int, int, int]], limit: int
) -> None:
    history = History(limit)
    for step in steps:
        history.step(*step)
        history.check()
    history.end_all()
    history.check()
    sets = history.sessions.sets
    assert len(history.sessions) == 0
    assert sets.trunks == 0
    assert sets.trunk_tokens.tolist() == [0.0] * SLOTS
    assert not sets.private_tokens.any()
    assert not sets.cold_work.any()


@patient
@given(STEPS, STEPS)
def test_the_same_history_gives_the_same_sums(
    before: list[tuple[int, int, int]], after: list[tuple[int, int, int]]
) -> None:
    """The same history gives the same sums; reading what the sums would be after a change does not
    change them.
    """
    plain, looked = History(), History()
    for step in [*before, *after]:
        plain.step(*step)
        looked.step(*step)
        talk = looked.talks[-1] if looked.talks else None
        if talk is not None:
            fact = arrival(talk.tokens, looked.now_s, session=talk.session, tenant=talk.tenant)
            looked.sessions.look(fact, fact.chains[BLOCK], BLOCK)
    for name in ("private_tokens", "cold_work", "trunk_tokens"):
        one, other = (getattr(history.sessions.sets, name) for history in (plain, looked))
        assert one.tolist() == other.tolist()
    assert plain.sessions.hazard._risk.tolist() == looked.sessions.hazard._risk.tolist()
    assert len(plain.sessions) == len(looked.sessions)
    assert [o.tracked for o in plain.open] == [o.tracked for o in looked.open]


@patient
@given(STEPS, st.integers(0, 20), st.integers(0, 4))
def test_a_lookup_returns_the_same_session_data_as_an_arrival(
    steps: list[tuple[int, int, int]], which: int, kind: int
) -> None:
    history = History(64)
    for step in steps:
        history.step(*step)
    if not history.talks:
        return
    talk = history.talks[which % len(history.talks)]
    cut = len(talk.tokens) * kind // 4
    tokens = np.concatenate((talk.tokens[:cut], prompt((99, 40))))
    fact = arrival(
        tokens,
        history.now_s,
        session=talk.session if kind else "other",
        tenant=talk.tenant,
    )
    seen = history.sessions.look(fact, fact.chains[BLOCK], BLOCK)
    tracked = history.sessions.arrived(fact, fact.chains[BLOCK], BLOCK)
    assert seen.row in (tracked.row, -1)
    assert (seen.row < 0) == (tracked.private_before == 0 and seen.row != tracked.row)
    assert (seen.trunk, seen.trunk_tokens) == (tracked.trunk, tracked.trunk_tokens)
    assert (seen.prompt_tokens, seen.private_before) == (
        tracked.prompt_tokens,
        tracked.private_before,
    )


# --- whose a request is -------------------------------------------------------------------------


def test_a_session_without_id_is_found_by_its_prompt() -> None:
    sessions = followed()
    first = turn(sessions, prompt(SYSTEM, (5, 200)))
    assert turn(sessions, prompt(SYSTEM, (5, 200), (6, 70)), 1.0) == first
    assert turn(sessions, prompt(SYSTEM, (5, 200), (6, 70), (7, 100)), 2.0) == first
    assert len(sessions) == 1


def test_a_session_is_found_if_the_next_turn_formats_the_ending_differently() -> None:
    sessions = followed()
    question, ask = prompt(SYSTEM, (5, 150)), prompt((8, 10))
    first = turn(sessions, np.concatenate((question, ask)))  # the ending fills a block
    assert len(question) % BLOCK + len(ask) >= BLOCK
    assert turn(sessions, np.concatenate((question, prompt((9, 90)))), 1.0) == first


@pytest.mark.parametrize("own", [BLOCK, 2 * BLOCK, 7 * BLOCK + 3])
def test_siblings_with_a_common_system_prompt_are_separate_sessions(own: int) -> None:
    sessions = followed()
    rows = [turn(sessions, prompt(SYSTEM, (n, own + 16)), float(n)) for n in range(5, 9)]
    assert len(set(rows)) == 4
    later = come(sessions, prompt(SYSTEM, (9, 50)), 20.0)
    assert later.trunk_tokens == SYSTEM[1]
    again = [turn(sessions, prompt(SYSTEM, (n, own + 16), (n + 50, 30)), 30.0) for n in range(5, 9)]
    assert again == rows


def test_siblings_with_short_prompts_are_separate_if_they_run_at_once() -> None:
    sessions = followed()
    at_once = [come(sessions, prompt(SYSTEM, (n, 3)), 0.0) for n in range(5, 9)]
    assert len({tracked.row for tracked in at_once}) == 4
    assert at_once[-1].trunk_tokens == SYSTEM[1]


def test_an_edited_history_makes_a_new_session() -> None:
    sessions = followed()
    first = turn(sessions, prompt(SYSTEM, (5, 100), (6, 100), (7, 100)))
    edited = turn(sessions, prompt(SYSTEM, (5, 100), (8, 100), (9, 200)), 1.0)
    assert edited != first
    assert turn(sessions, prompt(SYSTEM, (5, 100), (6, 100), (7, 100), (10, 99)), 2.0) == first


def test_a_sub_agent_shares_its_parents_prefix_and_is_a_separate_session() -> None:
    sessions = followed()
    parent = come(sessions, prompt(SYSTEM, (5, 200)), 0.0)
    sessions.dispatched(parent, 0)
    child = come(sessions, prompt(SYSTEM, (5, 200), (6, 100)), 0.5)
    assert child.row != parent.row
    assert child.trunk_tokens == (SYSTEM[1] + 200) // BLOCK * BLOCK
    named = come(sessions, prompt(SYSTEM, (5, 200), (7, 100)), 0.6, session="child")
    assert named.row not in (parent.row, child.row)


def test_sessions_of_different_tenants_or_models_are_separate() -> None:
    sessions = followed()
    ids = [("a", "m"), ("b", "m"), (None, "m"), ("a", "n")]
    for session in ("x", None):
        tokens = prompt((3 if session else 4, 200))
        rows = [turn(sessions, tokens, tenant=t, model=m, session=session) for t, m in ids]
        assert len(set(rows)) == len(ids)


def test_requests_with_and_without_the_id_belong_to_one_session() -> None:
    sessions = followed()
    first = turn(sessions, prompt(SYSTEM, (5, 200)))
    named = turn(sessions, prompt(SYSTEM, (5, 200), (6, 50)), 1.0, session="a")
    unnamed = turn(sessions, prompt(SYSTEM, (5, 200), (6, 50), (7, 50)), 2.0)
    assert first == named == unnamed
    assert turn(sessions, prompt((8, 90)), 3.0, session="a") == first
    other = turn(sessions, prompt((8, 90), (9, 90)), 4.0, session="b")
    assert other != first


def test_long_session_ids_are_shortened_and_stay_distinct() -> None:
    sessions = followed()
    name = "\ud800" + "n" * 1_000
    first = turn(sessions, prompt((5, 50)), session=name)
    assert turn(sessions, prompt((6, 50)), 1.0, session=name) == first
    assert turn(sessions, prompt((7, 50)), 2.0, session=name + "o") != first
    assert all(len(str(sessions._rows.key(row)[2])) <= 64 for row in range(2))


@pytest.mark.parametrize("session", ["a", None])
def test_a_returning_forgotten_session_has_no_trunk_with_its_own_past(
    session: str | None,
) -> None:
    sessions = followed()
    tokens = prompt(SYSTEM, (5, 400))
    turn(sessions, tokens, session=session)
    sessions.refresh(5_000.0)
    assert len(sessions) == 0
    back = come(sessions, np.concatenate((tokens, prompt((6, 50)))), 5_001.0, session=session)
    assert (back.trunk_tokens, back.private_before) == (0, 0.0)
    sibling = come(sessions, prompt(SYSTEM, (7, 400)), 5_002.0)
    assert sibling.row != back.row
    assert sibling.trunk_tokens == SYSTEM[1]


# --- bounds -------------------------------------------------------------------------------------


def test_a_full_table_evicts_the_longest_idle_session() -> None:
    sessions = followed(limit=20)
    for number in range(20):
        turn(sessions, prompt((5 + number, 40)), float(number), session=str(number))
    turn(sessions, prompt((90, 40)), 30.0, session="new")
    assert (len(sessions), sessions.crowded_out) == (20, 1)
    assert sessions._rows.find((None, "m", "0")) < 0
    assert sessions._rows.find((None, "m", "1")) >= 0


@patient
@given(st.lists(st.integers(0, 2_000), min_size=1, max_size=400))
def test_the_evicted_sessions_are_the_longest_idle(idle_s: list[int]) -> None:
    sessions = followed(limit=len(idle_s))
    rows = sessions._rows
    for number, since in enumerate(idle_s):
        rows.idle_s[rows.take(None, "m", str(number))] = since
    assert rows.full
    chosen = rows.longest_idle().tolist()
    assert len(set(chosen)) == len(chosen) == max(len(idle_s) // 256, 1)
    assert sorted(idle_s)[: len(chosen)] == sorted(idle_s[row] for row in chosen)


@patient
@given(STEPS)
def test_a_session_with_an_open_request_is_not_evicted(
    steps: list[tuple[int, int, int]],
) -> None:
    history = History(limit=4)
    for step in steps * EFFORT:
        history.step(*step)
        for todo in history.open:
            assert history.sessions._rows.serial[todo.tracked.row] > 0


# --- one id for several conversations -----------------------------------------------------------


def test_concurrent_conversations_under_one_id_are_separate_sessions() -> None:
    sessions = followed()
    main = come(sessions, prompt(SYSTEM, (1, 200)), session="s")
    child = come(sessions, prompt((2, 100)), session="s")
    other = come(sessions, prompt((3, 100)), session="s")
    assert len({main.row, child.row, other.row}) == 3
    for number, tracked in enumerate((main, child, other)):
        sessions.dispatched(tracked, number)
        sessions.ended(tracked, 5, 1.0)
    # The id alone says nothing any more, also of requests that come one after the other.
    assert turn(sessions, prompt((3, 100), (4, 60)), 2.0, session="s") == other.row
    assert turn(sessions, prompt(SYSTEM, (1, 200), (5, 60)), 3.0, session="s") == main.row
    assert turn(sessions, prompt((2, 100), (6, 60)), 4.0, session="s") == child.row
    assert turn(sessions, prompt((7, 100)), 5.0, session="s") not in (
        main.row,
        child.row,
        other.row,
    )


def test_a_session_keeps_its_row_after_a_compaction() -> None:
    """A session keeps its id when its client begins anew after a compaction, if no other request of
    the session is under way.
    """
    sessions = followed()
    first = turn(sessions, prompt(SYSTEM, (1, 400)), session="s")
    assert turn(sessions, prompt(SYSTEM, (2, 60)), 1.0, session="s") == first
    assert len(sessions) == 1


def test_concurrent_requests_that_continue_one_prompt_are_one_session() -> None:
    sessions = followed()
    row = turn(sessions, prompt((1, 200)), session="s")
    tries = [come(sessions, prompt((1, 200), (2, 50)), 1.0, session="s") for _ in range(3)]
    assert {one.row for one in tries} == {row}


def test_prompts_shorter_than_a_block_are_matched_by_their_id() -> None:
    sessions = followed()
    tries = [come(sessions, prompt((n, BLOCK - 1)), session="s") for n in range(1, 5)]
    assert len({one.row for one in tries}) == 1


def test_agents_that_share_a_cache_key_are_counted_like_those_with_own_keys() -> None:
    """If a main agent and its sub-agents share one cache key, all of their tokens count, as with a
    key for each agent.
    """
    counted = []
    for names in ({}, {"session": "each"}):
        sessions = followed()
        for number, tokens in enumerate((20_000, *[5_000] * 5)):
            fields = {key: f"{value} {number}" for key, value in names.items()}
            tracked = come(sessions, prompt((number, tokens)), **fields)
            sessions.dispatched(tracked, 0)
        counted.append(sessions.sets.tokens_at(0))
    assert counted == [45_000.0, 45_000.0]


def test_the_final_request_of_a_session_frees_its_room_at_once() -> None:
    sessions = followed()
    row = turn(sessions, prompt((1, 200)), session="s")
    assert sessions.sets.tokens_at(0) == 205.0
    last = prompt((1, 200), (2, 50))
    assert turn(sessions, last, 1.0, session="s", identity=Identity(final=True)) == row
    assert sessions.sets.tokens_at(0) == 0.0
    assert len(sessions) == 0


@patient
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(("s", "t", None)), st.booleans()),
        max_size=40,
    )
)
def test_concurrent_conversations_are_never_one_session(
    steps: list[tuple[int, str | None, bool]],
) -> None:
    """Five conversations at once whose ids change, each with at most one request under way, are
    never taken for one session.
    """
    sessions = followed()
    turns = dict.fromkeys(range(5), 0)
    under_way: dict[int, TrackedRequest] = {}
    for step, (talk, name, ends) in enumerate(steps):
        if talk in under_way:
            sessions.ended(under_way.pop(talk), 5, float(step))
        turns[talk] += 1
        tokens = prompt(*((10 * talk + 1 + n, 3 * BLOCK) for n in range(turns[talk])))
        tracked = come(sessions, tokens, float(step), session=name)
        assert tracked.row not in {other.row for other in under_way.values()}
        sessions.dispatched(tracked, 0)
        under_way[talk] = tracked
        if ends:
            sessions.ended(under_way.pop(talk), 5, float(step))
    for tracked in under_way.values():
        sessions.ended(tracked, 5, 1e3)
