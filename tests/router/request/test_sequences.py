"""Tests that requests of one sequence stay with the worker that has its state."""

from __future__ import annotations

from router.body.scan import Sequenced
from router.request.sequences import Sequences


def test_a_sequence_is_remembered_until_it_ends_or_is_evicted() -> None:
    known, first = Sequences(most=2), Sequenced("1", start=True)
    assert known.worker_of("m", None, Sequenced("1")) is None
    known.sent("m", None, first, 5)
    assert known.worker_of("m", None, Sequenced("1")) == 5
    assert known.worker_of("m", "other", Sequenced("1")) is None
    assert known.worker_of("m", None, first) is None, "it begins anew, anywhere"
    known.sent("m", None, Sequenced("1", end=True), 5)
    assert len(known) == 0
    for number in range(3):
        known.sent("m", None, Sequenced(str(number)), number)
    assert [known.worker_of("m", None, Sequenced(str(n))) for n in range(3)] == [None, 1, 2]
