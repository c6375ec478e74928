"""Tests of the time from a session's turn to its next one, pause and decode time, which an
overloaded pool does not lengthen.
"""

from __future__ import annotations

import numpy as np
import pytest

from router.core.sessions.sessions import Cycle
from router.core.workers.columns import WorkerColumns

ALL = np.arange(3)


def columns() -> WorkerColumns:
    made = WorkerColumns(4)  # the last slot is nobody's
    for slot, step_s in enumerate((0.010, 0.010, 0.020)):
        made.open(slot, slot)
        made.step_s[slot] = step_s
    return made


def calm(made: WorkerColumns) -> Cycle:
    cycle = Cycle(made)
    cycle.returned(4.0)
    cycle.answered(100)
    cycle.tick(0.0)
    return cycle


def test_the_cycle_is_0_before_the_first_return() -> None:
    cycle = Cycle(columns())
    cycle.answered(100)
    cycle.tick(0.0)
    assert cycle.seconds(ALL) == 0.0
    cycle.returned(4.0)
    assert cycle.seconds(ALL) > 4.0


def test_the_cycle_is_the_pause_plus_the_decode_time_of_the_workers() -> None:
    cycle = calm(columns())
    assert cycle.seconds(ALL) == pytest.approx(4.0 + 100 * 0.040 / 3)
    assert cycle.seconds(np.array([2])) == pytest.approx(4.0 + 100 * 0.020)


def test_the_cycle_follows_an_overloaded_pool_only_slowly() -> None:
    made = columns()
    cycle = calm(made)
    made.step_s[:3] *= 10.0
    cycle.tick(1.0)
    assert cycle.seconds(ALL) == pytest.approx(4.0 + 1.3 * 100 * 0.040 / 3, rel=0.01)
    for now_s in range(2, 3_600):
        cycle.tick(float(now_s))
    assert cycle.seconds(ALL) == pytest.approx(4.0 + 100 * 0.40 / 3)  # it is slower by now


def test_reading_the_cycle_does_not_change_it() -> None:
    read, unread = calm(made := columns()), calm(made)
    for now_s in range(1, 50):
        made.step_s[0] = 0.010 + now_s / 1e3
        read.tick(float(now_s))
        unread.tick(float(now_s))
        for _ in range(now_s):
            read.seconds(ALL)
    assert read.seconds(ALL) == unread.seconds(ALL)


@pytest.mark.parametrize("ticked_between", [False, True])
def test_a_new_worker_in_a_slot_does_not_inherit_the_cycle_of_the_slot(
    ticked_between: bool,
) -> None:
    made = columns()
    cycle = calm(made)
    cycle.worker_lost(0)
    made.open(0, -1)
    if ticked_between:
        cycle.tick(1.0)  # a slot of nobody holds a step of 10 ms
    made.open(0, 9)
    made.step_s[0] = 0.200
    cycle.tick(2.0)
    assert cycle.seconds(np.array([0])) == pytest.approx(4.0 + 100 * 0.200)
