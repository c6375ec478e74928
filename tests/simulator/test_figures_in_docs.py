"""Figures in README and docs are what their commands give today."""

from __future__ import annotations

import re

import pytest

from tests.simulator.figures_in_docs import (
    MARK,
    ROOT,
    SENTENCES,
    FigureError,
    blocks,
    documents,
    made,
)

AGAIN = "run `make figures`, and look at what has changed"
SLOW = ("plan", "sweep")  # many replays: only `make figures` does them


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def test_every_mark_is_understood() -> None:
    names = documents()
    assert {"README.md", "docs/demo.md", "docs/simulator.md"} < set(names)
    for name in names:
        text = text_of(name)
        found = list(blocks(text))
        assert len(found) == text.count("<!-- output:"), name
        for block in found:
            assert block.command[0] in {"replay", "plan", "sweep", "bound", "hits", "instances",
                                        "rate-match"}  # fmt: skip
            assert text[block.start : block.end].strip(), "it shows something"
    for name, before, after, _ in SENTENCES:
        assert len(re.findall(f"{before}.*?{after}", text_of(name), re.DOTALL)) == 1, before


@pytest.mark.parametrize("name", ["README.md", "docs/demo.md", "docs/triton.md"])
def test_what_is_there_is_what_is_made(name: str) -> None:
    assert made(name, text_of(name)) == text_of(name), AGAIN


@pytest.mark.live
@pytest.mark.timeout(400)  # it works for a minute or two, for the machine is full in this tier
@pytest.mark.parametrize("name", ["docs/simulator.md", "docs/disaggregation.md"])
def test_blocks_that_take_seconds_are_what_is_made(name: str) -> None:
    quick = lambda block: not block.reads_log and block.command[0] not in SLOW  # noqa: E731
    assert any(map(quick, blocks(text_of(name))))
    assert made(name, text_of(name), quick) == text_of(name), AGAIN


def test_wrong_figures_are_put_right_and_all_else_is_kept() -> None:
    before = "Some text 7.\n\n<!-- output: 2, until Knee -->\n```\n"
    asked = "--base-s 0.010 --per-request-s 0.002 \\\n    --rate 100 --p99-ms 40"
    shown = f"{before}$ warmroute-sim instances {asked}\nold 99\n```\nEnd 5.\n"
    right = made("none.md", shown)
    assert right.startswith(shown.partition("old 99")[0])
    assert right.endswith("```\nEnd 5.\n")
    assert "\nTake 1: p99 " in right
    assert "old 99" not in right
    assert "Knee" not in right.partition("-->")[2]
    assert made("none.md", right) == right
    asked = "warmroute-sim instances --base-s 0.01 --per-request-s 0.002 --rate 9 --p99-ms 40"
    elsewhere = f"2 1, 90 columns, of `{asked}`"
    given = made("none.md", shown.replace("2, until Knee", elsewhere)).split("```")[1]
    assert given.startswith("\nTake 1: p99 ")
    assert "\n\ngiven: " in given


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("<!-- output: 1 -->\n```\n$ ls\n```\n", "no `$ warmroute-sim"),
        ("<!-- output: 1 -->\n```\n$ warmroute-sim replay none.jsonl\n```\n", "status 2: "),
        ("<!-- output: 9 -->\n```\n$ warmroute-sim hits --help\n```\n", "paragraphs"),
        (
            "<!-- output: 1, until x -->\n```\n$ warmroute-sim hits --help\n```\n",
            "no line begins with x",
        ),
    ],
)
def test_a_block_that_cannot_be_made_is_named(block: str, said: str) -> None:
    assert MARK.search(block)
    with pytest.raises(FigureError, match=re.escape(said)):
        made("none.md", block)
