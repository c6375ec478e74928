"""Tests of when a failing policy is suspended and tried again, compared with a plain implementation
of the rule.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.placement.guard import BACKOFF_MAX_S, BACKOFF_S, TRIAL_DECISIONS, Suspension


class Plain:
    """The rule of suspension in plain code, with lists instead of bits. Lifetime: test."""

    def __init__(self) -> None:
        self.decisions: list[bool] = []  # faulty or not, since the last suspension
        self.tried_again = False
        self.until_s: float | None = None
        self.backoff_s = BACKOFF_S

    def decided(self) -> None:
        self.decisions.append(False)
        if self.tried_again and len(self.decisions) > TRIAL_DECISIONS:
            self.tried_again, self.backoff_s = False, BACKOFF_S

    def fault(self, now_s: float) -> None:
        if self.until_s is not None:
            return
        if self.decisions:
            self.decisions[-1] = True
        else:
            self.decisions.append(True)
        five = self.decisions[-5:] == [True] * 5
        if self.tried_again or five or sum(self.decisions[-20:]) > 10:
            if self.tried_again:
                self.backoff_s = min(2 * self.backoff_s, BACKOFF_MAX_S)
            self.until_s = now_s + self.backoff_s

    def end(self, now_s: float) -> None:
        if self.until_s is not None and now_s >= self.until_s:
            self.until_s, self.tried_again, self.decisions = None, True, []


@given(st.lists(st.sampled_from(["good", "bad", "worse", "idle"]), max_size=200))
def test_suspensions_equal_those_of_the_plain_rule(steps: list[str]) -> None:
    real, plain, now_s = Suspension(), Plain(), 0.0
    for step in steps:
        now_s += 7.0 if step == "idle" else 0.125
        if real.active:
            real.end(now_s)
        plain.end(now_s)
        if not real.active and step != "idle":
            real.decided()
            plain.decided()
        for _ in range(("good", "bad", "worse").index(step) if step != "idle" else 0):
            real.fault(now_s)
            plain.fault(now_s)
        assert real.active == (plain.until_s is not None)
        assert real.backoff_s == plain.backoff_s
        if plain.until_s is not None:
            assert real.until_s == plain.until_s


def test_back_offs_double_up_to_ten_minutes_and_reset_after_a_good_trial() -> None:
    suspension, now_s, waits = Suspension(), 0.0, []
    for _ in range(5):
        suspension.decided()
        suspended = suspension.fault(now_s)
    assert suspended
    for _ in range(9):
        waits.append(suspension.until_s - now_s)
        now_s = suspension.until_s
        assert not suspension.end(now_s - 0.001)
        assert suspension.end(now_s)
        suspension.decided()
        assert suspension.fault(now_s)
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert suspension.end(suspension.until_s)
    for _ in range(TRIAL_DECISIONS + 1):
        suspension.decided()
    assert not suspension.fault(now_s)  # the trial is over: one fault is one fault
    assert suspension.backoff_s == BACKOFF_S


def test_faults_in_more_than_half_of_twenty_decisions_suspend_the_policy() -> None:
    suspension, faults = Suspension(), 0
    for _ in range(100):
        for _ in range(2):
            suspension.decided()
        assert not suspension.fault(0.0)
    for _ in range(2):
        suspension.decided()
        faults += suspension.fault(0.0)
    assert faults == 1
