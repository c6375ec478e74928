"""Tests that docs/reference/metrics.md lists what the router's registry contains."""

from __future__ import annotations

from pathlib import Path

from tests.router.collectors.metrics_page import SECTIONS, families, page, section_of

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


def test_the_metrics_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        f"run: python -m tests.router.collectors.metrics_page {PAGE}"
    )


def test_every_section_of_the_page_has_metrics() -> None:
    assert {section_of(family.name) for family in families()} == {one[0] for one in SECTIONS}
