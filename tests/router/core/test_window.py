"""Tests of counts over the last seconds, compared with a list of everything that was counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.contract.counters import Window

SPAN_S = 5.0
STEP_S = SPAN_S / 10

histories = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60
)


@given(histories)
def test_a_window_counts_the_current_step_and_the_nine_before_it(steps: list) -> None:
    window, everything, now_s = Window(SPAN_S), [], 0.0
    for pause_s, first, second in steps:
        now_s += pause_s
        window.add(now_s, first, second)
        everything.append((now_s // STEP_S, first, second))
        oldest = now_s // STEP_S - 9
        recent = [(one, other) for step, one, other in everything if step >= oldest]
        expected = (sum(one for one, _ in recent), sum(other for _, other in recent))
        assert window.sums(now_s) == expected


def test_counts_expire_after_the_span_and_clear_resets_them_at_once() -> None:
    window = Window(SPAN_S)
    window.add(1.0, 2, 3)
    assert window.sums(1.0 + SPAN_S + STEP_S) == (0, 0)
    window.add(9.0, 2, 3)
    window.clear()
    assert window.sums(9.0) == (0, 0)
