"""Tests of the detection of stalled workers by the times of their streams' last tokens."""

from __future__ import annotations

from router.core.placement.health import StallDetection


def test_a_worker_is_suspected_periodically_while_all_its_streams_are_silent() -> None:
    silence = StallDetection(0.5)
    silence.on_stream_progress(1, 10, 0.0)
    silence.on_stream_progress(1, 11, 0.4)
    silence.on_stream_progress(2, 12, 0.8)
    assert silence.workers_to_probe(0.8) == []
    assert silence.workers_to_probe(0.9) == [1]
    assert silence.workers_to_probe(1.0) == []  # asked already
    assert silence.workers_to_probe(1.5) == [1, 2]


def test_one_byte_of_any_stream_clears_the_suspicion() -> None:
    silence = StallDetection(0.5)
    silence.on_stream_progress(1, 10, 0.0)
    silence.on_stream_progress(1, 11, 0.0)
    assert silence.workers_to_probe(0.5) == [1]
    assert silence.still(1)
    silence.on_stream_progress(1, 11, 0.6)
    assert not silence.still(1)
    assert silence.workers_to_probe(0.7) == []


def test_a_worker_without_streams_is_never_suspected() -> None:
    silence = StallDetection(0.5)
    silence.on_stream_progress(1, 10, 0.0)
    silence.over(1, 99)  # not one of those that began
    assert silence.workers_to_probe(0.5) == [1]
    silence.over(1, 10)
    assert not silence.still(1)
    assert silence.workers_to_probe(9.0) == []
    silence.on_stream_progress(1, 13, 20.0)  # what was before does not count
    assert silence.workers_to_probe(20.4) == []
