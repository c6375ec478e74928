"""Tests that docs/reference/fleet.md is what the contract says, and that the contract covers every
column.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from policies.contract import RequestView, TableFleet
from tests.policies.fleet_page import ContractError, fleet_rows, page, request_rows, row_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "fleet.md"


def test_the_fleet_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        f"run: python -m tests.policies.fleet_page {PAGE}"
    )


def test_every_column_and_field_has_a_row_in_the_page() -> None:
    assert [row.name for row in fleet_rows()] == [column.name for column in fields(TableFleet)]
    assert [row.name for row in request_rows()] == [field.name for field in fields(RequestView)]


def test_a_comment_without_an_age_is_an_error() -> None:
    assert row_of("a_s", "Floats", "Time. Unit: s. Source: a clock. Age: current.").unit == "s"
    with pytest.raises(ContractError, match="a_s: end the comment with"):
        row_of("a_s", "Floats", "Time. Unit: s. Source: a clock.")
