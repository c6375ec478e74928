"""Tests of the anchors in a short form: rules rank as published, and ratios lie within a band.

The full form is `python -m tests.simulator.anchors`, which makes the tables of
docs/notes/anchors.md.
"""

from __future__ import annotations

import pytest

from tests.simulator.anchors.catalogue import ANCHORS
from tests.simulator.anchors.page import BEGIN, PAGE, PageError, markdown_of, replaced, unexplained
from tests.simulator.anchors.record import Anchor, Compared, Hardware, Measured, near

NAMES = [anchor.name for anchor in ANCHORS]


@pytest.mark.parametrize("anchor", ANCHORS, ids=NAMES)
def test_rules_rank_as_published(anchor: Anchor) -> None:
    if anchor.missing:
        pytest.skip(f"{', '.join(anchor.missing)} not here")
    found = anchor.measure(False)
    assert found.ordered, anchor.order
    for compared, ours in zip(anchor.compared, found.values, strict=True):
        if compared.short is not None:
            assert ours is not None, compared.what
            assert near(ours, compared.published, compared.short), compared.what


def test_the_anchors_page_has_all_anchors_with_their_sources() -> None:
    page = PAGE.read_text()
    for anchor in ANCHORS:
        assert f"| `{anchor.name}` | {anchor.source} |" in page
        for compared in anchor.compared:
            assert f"| {compared.what} |" in page
    assert len(set(NAMES)) == len(NAMES) >= 10


def anchor_with_reason(why: str) -> Anchor:
    """Return an anchor whose replay finds twice the published figure; `why` is its
    recorded reason.
    """
    hardware = Hardware("2 x H100", "no-such-profile", "qwen3-32b-h100-tp2")
    ratio = Compared("output, a / b", 1.5, why)
    return Anchor("made-up", "nobody, 2026", hardware, "none", "a = a", "a before b", (ratio,),
                  lambda full: Measured(full, (3.0,)))  # fmt: skip


def test_a_figure_far_from_the_published_one_needs_a_reason() -> None:
    found = Measured(ordered=True, values=(3.0,))
    assert unexplained(anchor_with_reason(""), found) == [anchor_with_reason("").compared[0]]
    assert not unexplained(anchor_with_reason("It leaves out the load."), found)
    text = markdown_of([(anchor_with_reason("It leaves out the load."), found)])
    assert "| `made-up` | as published | output, a / b | 1.50 | 3.00 | **no** |" in text
    assert "2 x H100; `qwen3-32b-h100-tp2`, in place of `no-such-profile` |" in text
    assert "- `made-up`: It leaves out the load." in text


def test_tables_are_replaced_between_two_comments() -> None:
    page = PAGE.read_text()
    anew = replaced(page, "new")
    assert anew.count("\n\nnew\n\n") == 1
    assert replaced(anew, "new") == anew
    with pytest.raises(PageError, match="there is no"):
        replaced(page.replace(BEGIN, ""), "new")
