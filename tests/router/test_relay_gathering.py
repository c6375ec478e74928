"""When the relay's thread lets events gather."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvkernels

MOST_S = 0.001
EVENT_BYTES = 200

pytestmark = pytest.mark.skipif(kvkernels.Relay is None, reason="no relay was built")


def after(
    gap_s: float, most_s: float = MOST_S, parts: int = 1, size: int = EVENT_BYTES
) -> list[float]:
    """What it rests after each of 1,000 turns, `gap_s` apart, of so many parts each."""
    gathering = kvkernels.RelayGathering(most_s)
    rests = []
    for turn in range(1, 1_001):
        for _ in range(parts):
            gathering.part(size)
        rests.append(gathering.rest_s(turn * gap_s))
    return rests


def test_a_few_streams_never_wait() -> None:
    assert set(after(gap_s=0.001)) == {0.0}  # 1,000 events/s


def test_events_of_many_wait_as_long_as_allowed() -> None:
    assert after(gap_s=0.0002)[-1] == MOST_S  # 5 more come in that time


def test_they_wait_no_longer_than_enough_take_to_come() -> None:
    assert after(gap_s=0.00005, parts=2)[-1] == pytest.approx(8 / 40_000, rel=0.05)


def test_a_turn_that_found_enough_or_nothing_is_followed_by_none() -> None:
    assert set(after(gap_s=0.0002, parts=8)) == {0.0}
    gathering = kvkernels.RelayGathering(MOST_S)
    for turn in range(1, 200):
        gathering.part(EVENT_BYTES)
        gathering.rest_s(turn * 0.0002)
    assert gathering.rest_s(0.04) == 0.0


def test_downloads_do_not_wait() -> None:
    assert set(after(gap_s=0.0002, size=65_536)) == {0.0}


def test_when_streams_end_so_does_waiting() -> None:
    gathering = kvkernels.RelayGathering(MOST_S)
    for turn in range(1, 200):
        gathering.part(EVENT_BYTES)
        gathering.rest_s(turn * 0.0002)
    gathering.part(EVENT_BYTES)
    assert gathering.rest_s(10.0) == 0.0


@given(
    st.floats(0.0, 0.02),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.lists(st.integers(0, 70_000), max_size=12))),
)
def test_it_never_rests_longer_than_it_may(
    most_s: float, turns: list[tuple[float, list[int]]]
) -> None:
    gathering, now_s = kvkernels.RelayGathering(most_s), 1e6
    for passed_s, parts in turns:
        now_s += passed_s
        for size in parts:
            gathering.part(size)
        rest_s = gathering.rest_s(now_s)
        assert 0.0 <= rest_s <= most_s
        assert not rest_s or 0 < len(parts) < 8
