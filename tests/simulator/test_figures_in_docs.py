"""Tests that the figures in README and docs are those that their commands give today."""

from __future__ import annotations

import re

import pytest

from tests.simulator.figures_in_docs import (
    ROOT,
    SENTENCES,
    Block,
    FigureError,
    Sentence,
    blocks,
    documents,
    shown_of,
    updated,
)

AGAIN = "run `make figures`, and look at what has changed"
SLOW = ("plan", "sweep")  # many replays: only `make figures` does them


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def test_every_output_mark_in_the_docs_is_understood() -> None:
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
def test_figures_in_the_docs_are_up_to_date(name: str) -> None:
    assert updated(name, text_of(name)) == text_of(name), AGAIN


def takes_a_second(block: Block) -> bool:
    """Return whether a block comes from `hits` or from a replay with faults, which take about a
    second.
    """
    return block.command[0] == "hits" or "--faults" in block.command


def takes_seconds(block: Block) -> bool:
    return not block.reads_log and block.command[0] not in SLOW


@pytest.mark.live
def test_blocks_that_take_a_second_are_up_to_date() -> None:
    text = text_of("docs/simulator.md")
    assert sum(map(takes_a_second, blocks(text))) == 2
    assert updated("docs/simulator.md", text, takes_a_second) == text, AGAIN


@pytest.mark.full
@pytest.mark.timeout(400)  # it works for a minute or two, for the machine is full
@pytest.mark.parametrize("name", ["docs/simulator.md", "docs/disaggregation.md"])
def test_blocks_that_take_seconds_are_up_to_date(name: str) -> None:
    assert any(map(takes_seconds, blocks(text_of(name))))
    assert updated(name, text_of(name), takes_seconds) == text_of(name), AGAIN


@pytest.mark.full
@pytest.mark.parametrize("place", [p for p in SENTENCES if p[0] == "docs/simulator.md"])
def test_sentences_on_whole_replays_are_up_to_date(place: Sentence) -> None:
    """Sentences with figures of whole replays are up to date. CI makes those of the README and of
    docs/demo.md with their blocks.
    """
    name, before, after, make = place
    assert re.search(f"{before}{re.escape(make())}{after}", text_of(name)), AGAIN


def test_wrong_figures_are_corrected_and_other_text_is_kept() -> None:
    before = "Some text 7.\n\n<!-- output: 2, until Knee -->\n```\n"
    asked = "--base-s 0.010 --per-request-s 0.002 \\\n    --rate 100 --p99-ms 40"
    shown = f"{before}$ warmroute-sim instances {asked}\nold 99\n```\nEnd 5.\n"
    right = updated("none.md", shown)
    assert right.startswith(shown.partition("old 99")[0])
    assert right.endswith("```\nEnd 5.\n")
    assert "\nTake 1: p99 " in right
    assert "old 99" not in right
    assert "Knee" not in right.partition("-->")[2]
    asked = "warmroute-sim instances --base-s 0.01 --per-request-s 0.002 --rate 9 --p99-ms 40"
    elsewhere = f"2 1, 90 columns, of `{asked}`"
    given = updated("none.md", shown.replace("2, until Knee", elsewhere)).split("```")[1]
    assert given.startswith("\nTake 1: p99 ")
    assert "\n\ngiven: " in given


def test_the_error_for_a_block_without_a_working_command_names_it() -> None:
    for block, said in (
        ("<!-- output: 1 -->\n```\n$ ls\n```\n", "no `$ warmroute-sim"),
        ("<!-- output: 1 -->\n```\n$ warmroute-sim replay none.jsonl\n```\n", "status 2: "),
    ):
        with pytest.raises(FigureError, match=re.escape(said)):
            updated("none.md", block)


@pytest.mark.parametrize(
    ("asked", "said"),
    [("9", "has 2 paragraphs"), ("1, until x", "no line begins with x")],
)
def test_the_error_for_text_missing_in_the_output_names_it(asked: str, said: str) -> None:
    (block,) = blocks(f"<!-- output: {asked} -->\n```\n$ warmroute-sim hits --help\n```\n")
    with pytest.raises(FigureError, match=re.escape(said)):
        shown_of(block, "usage: hits\n\noptions: none\n")
