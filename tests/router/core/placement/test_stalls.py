"""Tests of the detection of stalled workers by the times of their streams' last tokens."""

from __future__ import annotations

from router.core.placement.health import StallDetection


def test_a_worker_is_suspected_periodically_while_all_its_streams_are_silent() -> None:
    silence = StallDetection(0.5)
    silence.heard(1, 10, 0.0)
    silence.heard(1, 11, 0.4)
    silence.heard(2, 12, 0.8)
    assert silence.suspects(0.8) == []
    assert silence.suspects(0.9) == [1]
    assert silence.suspects(1.0) == []  # asked already
    assert silence.suspects(1.5) == [1, 2]


def test_one_byte_of_any_stream_clears_the_suspicion() -> None:
    silence = StallDetection(0.5)
    silence.heard(1, 10, 0.0)
    silence.heard(1, 11, 0.0)
    assert silence.suspects(0.5) == [1]
    assert silence.still(1)
    silence.heard(1, 11, 0.6)
    assert not silence.still(1)
    assert silence.suspects(0.7) == []


def test_a_worker_without_streams_is_never_suspected() -> None:
    silence = StallDetection(0.5)
    silence.heard(1, 10, 0.0)
    silence.over(1, 99)  # not one of those that began
    assert silence.suspects(0.5) == [1]
    silence.over(1, 10)
    assert not silence.still(1)
    assert silence.suspects(9.0) == []
    silence.heard(1, 13, 20.0)  # what was before does not count
    assert silence.suspects(20.4) == []
