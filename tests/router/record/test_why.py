"""Tests of the sentence in a reply header that says why a request went to its worker."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.contract.actions import SECONDS, Candidate, Decision, Dispatch, Stage
from router.core.workers.hit_modes import EXACT, HitVerdict
from router.record.explain import explanation_line, why_sentence
from router.record.request_record import Attempt
from tests.router.record.record_log_support import arrival
from tests.told_decision import decision_in

BOUND = HitVerdict("degraded", "no-replay", "Events were missed.", "a flag")
GUESS = HitVerdict("approximate", "no-events", "There are no events.")


def decided(
    *best: tuple[int, float, int], reason: str = "policy", unit: str | None = SECONDS, **more: Any
) -> Decision:
    """Return a decision on a prompt of 3,600 tokens; the third number of each candidate is its hit
    tokens.
    """
    candidates = tuple(Candidate(*one) for one in best)
    approximate = more.get("approximate", False)
    return Decision("p", reason, best[0][2], 3_600, candidates, approximate, unit)


TWO = ((1, 0.010, 3_584), (2, 0.069, 0))


@pytest.mark.parametrize(
    ("decision", "size", "hits", "sentence"),
    [
        (
            decided(*TWO),
            16,
            EXACT,
            "worker 1 holds 224 of 225 blocks; worker 2 would take 59 ms longer",
        ),
        (
            decided(*TWO),
            16,
            BOUND,
            "worker 1 is known to hold 224 of 225 blocks; worker 2 would take 59 ms longer",
        ),
        (
            decided(*TWO),
            16,
            GUESS,
            "worker 1 holds about 224 of 225 blocks; worker 2 would take 59 ms longer",
        ),
        (
            decided(*TWO, approximate=True),
            64,
            EXACT,
            "worker 1 holds about 56 of 57 blocks; worker 2 would take 59 ms longer",
        ),
        (
            decided((3, 0.5, 0), (0, 2.75, 0)),
            None,
            None,
            "worker 3 holds 0 of 3600 tokens; worker 0 would take 2.25 s longer",
        ),
        (
            decided((3, 0.5, 16), reason="only_worker"),
            16,
            None,
            "worker 3 holds 1 of 225 blocks; no other worker could take it",
        ),
        (
            decided((3, 0.5, 16), (4, math.inf, 32)),
            16,
            None,
            "worker 3 holds 1 of 225 blocks; no other worker could take it",
        ),
        (
            decided((3, 0.5, 16), (4, 0.5, 16), reason="retry"),
            16,
            None,
            "worker 3 holds 1 of 225 blocks; worker 4 would do as well; another worker had "
            "failed it",
        ),
        (
            decided((3, 1.0, 16), (4, 3.5, 32), unit=None, reason="held"),
            16,
            None,
            "worker 3 holds 1 of 225 blocks; worker 4 holds 2 and costs 2.5 more; it had waited "
            "for a worker",
        ),
    ],
)
def test_the_sentence_has_the_held_blocks_and_the_cost_of_the_next_worker(
    decision: Decision, size: int | None, hits: HitVerdict | None, sentence: str
) -> None:
    assert why_sentence(int(sentence.split()[1]), decision, size, hits) == sentence


def attempt(worker_id: int, decision: Decision, leg: Any = "both") -> Attempt:
    stages = (Stage(worker_id, leg),)
    return Attempt(arrival(), Dispatch(1, stages, decision), 10.0, block_size=16)


def test_the_sentence_for_two_legs_has_the_prefill_and_the_decode_worker() -> None:
    one, first = attempt(7, decided((7, 0.1, 0)), "decode"), attempt(1, decided(*TWO), "prefill")
    first.hits = EXACT
    line = explanation_line(one, False, first).decode("ascii")
    assert line.startswith(
        "worker 1 prefills and holds 224 of 225 blocks; worker 2 would take 59 ms longer; worker 7 "
        'decodes; {"request":1,'
    )
    told = decision_in(line)
    assert (told["worker"], told["prefill_worker"]) == (7, 1)
    assert told["hits"] == {"mode": "exact", "cause": None, "reason": None, "lift": None}


def test_the_header_has_the_exactness_of_hits_if_known() -> None:
    one = attempt(1, decided(*TWO))
    assert "hits" not in decision_in(explanation_line(one, False).decode("ascii"))
    one.hits = BOUND
    told = decision_in(explanation_line(one, True).decode("ascii"))
    assert told["hits"] == {
        "mode": "degraded",
        "cause": "no-replay",
        "reason": "Events were missed.",
        "lift": "a flag",
    }


@given(
    best=st.lists(
        st.tuples(st.integers(0, 10**9), st.floats(allow_nan=True), st.integers(0, 10**9)),
        min_size=1,
        max_size=3,
    ),
    reason=st.sampled_from(["policy", "retry", "migration", "held", "fallback", "only_worker"]),
    unit=st.sampled_from([SECONDS, None]),
    size=st.none() | st.integers(1, 4_096),
    hits=st.sampled_from([None, EXACT, BOUND, GUESS]),
)
def test_the_sentence_is_a_short_header_value_for_any_decision(
    best: list[tuple[int, float, int]],
    reason: str,
    unit: str | None,
    size: int | None,
    hits: HitVerdict | None,
) -> None:
    sentence = why_sentence(best[0][0], decided(*best, reason=reason, unit=unit), size, hits)
    assert sentence.isascii()
    assert sentence.isprintable()
    assert "{" not in sentence
    assert len(sentence) < 250
