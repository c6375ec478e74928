"""Tests of the figures on new sessions, later turns, waits and whole sessions, against figures
computed by hand.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.replay.result import NEVER, Verdict
from simulator.report.row import NO_WAITS, new_ones, summarize
from tests.effort import examples
from tests.simulator.replayed import S, rejected, result, table

LOST = {"first": 50.0, "finish": None, "verdict": Verdict.FAILED}


def test_turns_and_waits_agree_with_a_computation_by_hand() -> None:
    rows = [
        {"session": 0, "first": 100.0},
        {"session": 1, "first": 300.0, "held": 40.0},
        {"session": 0, "first": 20.0, "held": 10.0},
        {"first": 200.0},
        {"session": 1, **rejected(), "held": 1000.0},
        {"session": 0, "first": 40.0},
        {**LOST},
    ]
    row = summarize(result(rows, simulated_ns=10 * S))
    new, later = row.new_sessions, row.continuations
    assert (new.requests, new.completed, later.requests, later.completed) == (4, 3, 3, 2)
    assert (new.ttft_ms.mean, new.ttft_ms.p50, later.ttft_ms.mean) == (200.0, 200.0, 30.0)
    assert (new.waits.held, new.waits.mean_ms, new.waits.max_ms) == (1, 40.0, 40.0)
    assert (later.waits.held, later.waits.mean_ms, later.waits.max_ms) == (2, 505.0, 1000.0)
    assert (row.waits.held, row.waits.mean_ms, row.waits.max_ms) == (3, 350.0, 1000.0)
    # Session 0 was answered and 1 was not; one of the two requests without a session was.
    assert (row.sessions.begun, row.sessions.completed) == (4, 2)
    assert row.sessions.per_hour == 720.0


def test_figures_without_waits_or_requests_are_empty() -> None:
    row = summarize(result([{}]))
    assert row.waits == row.new_sessions.waits == NO_WAITS
    assert (row.continuations.requests, row.continuations.ttft_ms.mean) == (0, None)
    nothing = summarize(result([], simulated_ns=0))
    assert (nothing.sessions.begun, nothing.sessions.per_hour) == (0, None)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(NEVER, 3), st.booleans()), max_size=30))
def test_sessions_agree_with_a_plain_count(requests: list[tuple[int, bool]]) -> None:
    rows = [{"session": s, **({} if good else rejected())} for s, good in requests]
    named = [s for s, _ in requests if s != NEVER]
    begins = [
        s == NEVER or s not in [t for t, _ in requests[:n]] for n, (s, _) in enumerate(requests)
    ]
    assert new_ones(table(rows)).tolist() == begins
    found = summarize(result(rows)).sessions
    whole = [s for s in set(named) if all(good for t, good in requests if t == s)]
    alone = [good for s, good in requests if s == NEVER]
    assert (found.begun, found.completed) == (len(set(named)) + len(alone), len(whole) + sum(alone))
