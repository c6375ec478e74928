"""Tests of the interface of the fleet: what builds one, what cannot be changed, and what
is copied.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from policies.contract import FleetView, TableFleet
from tests.policies.fleet import fleet_of


def test_building_the_interface_is_an_error_that_points_to_the_table() -> None:
    with pytest.raises(TypeError, match=r"TableFleet\(\.\.\.\)"):
        FleetView(worker_id=np.arange(2))


def test_a_table_has_every_column_of_the_interface() -> None:
    columns = {field.name for field in dataclasses.fields(TableFleet)}
    assert columns == FleetView.__abstractmethods__


def test_every_column_has_a_docstring() -> None:
    for name in FleetView.__abstractmethods__:
        assert getattr(FleetView, name).__doc__, name


def test_a_table_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fleet_of().step_s = np.zeros(1)  # type: ignore[misc]


def test_with_columns_replaces_columns_in_a_copy() -> None:
    fleet = fleet_of(worker_id=[3, 4], hit_tokens=[100, 0], pair_tokens=0.5)
    changed = fleet.with_columns(hit_tokens=np.array([1, 2]))
    assert changed.hit_tokens.tolist() == [1, 2]
    assert (changed.worker_id.tolist(), changed.pair_tokens) == ([3, 4], 0.5)
    assert fleet.hit_tokens.tolist() == [100, 0]
