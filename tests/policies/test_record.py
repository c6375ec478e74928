"""Tests that records behave as frozen dataclasses do, except that they are not frozen."""

from __future__ import annotations

import dataclasses

import pytest

from policies.facts import Finish, FirstToken, LoadReport
from policies.record import record


@record
class Point:
    x: int
    y: int = 0


def test_records_are_compared_and_hashed_by_value() -> None:
    assert Point(1) == Point(1, 0)
    assert hash(Point(1)) == hash(Point(1, 0))
    assert Point(1) != Point(2)
    assert FirstToken(1.0, 2) != Finish(1.0, 2)
    assert repr(Point(1, 2)) == "Point(x=1, y=2)"


def test_a_record_has_only_its_fields() -> None:
    report = LoadReport(1.0, 2, 3, 4, 5.0)
    with pytest.raises(AttributeError):
        report.stray = 1  # type: ignore[attr-defined]
    assert not hasattr(report, "__dict__")
    later = dataclasses.replace(report, now_s=9.0)
    assert (later.now_s, later.worker_id, report.now_s) == (9.0, 2, 1.0)
    assert [f.name for f in dataclasses.fields(Point)] == ["x", "y"]
