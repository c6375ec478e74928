"""Tests of the garbage collector after `settle`: it no longer visits older objects, and still finds
new cycles.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from router.process.garbage import YOUNG_OBJECTS, release, settle


class Knot:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_objects_from_before_settle_are_no_longer_visited() -> None:
    before = [Knot() for _ in range(100)]
    settle()
    assert gc.get_freeze_count() > len(before)
    assert not [o for o in gc.get_objects() if isinstance(o, Knot)]


def test_cycles_from_before_settle_are_collected() -> None:
    gone = weakref.ref(Knot())
    settle()
    assert gone() is None


def test_new_cycles_are_still_collected() -> None:
    gc.disable()  # as `router.__main__` leaves it while modules are imported
    settle()
    gone = weakref.ref(Knot())
    kept: list[list[int]] = []
    while gone() is not None and len(kept) < 2 * YOUNG_OBJECTS:
        kept.append([])
    assert gone() is None


def test_frozen_objects_are_collected_after_release() -> None:
    knot = Knot()
    gone = weakref.ref(knot)
    settle()
    del knot
    gc.collect()
    assert gone() is not None
    release()
    gc.collect()
    assert gone() is None
