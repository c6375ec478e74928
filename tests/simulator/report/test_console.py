"""Tests of the terminal's tables at any width, and of the progress of long replays."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from simulator.replay.run import ReplayProgress
from simulator.report.board import Board, span
from simulator.report.console import replay_tables, show_replay
from simulator.report.figures import FIGURES
from simulator.report.page import MARK
from simulator.report.row import ReplayRow, summarize
from tests.simulator.replayed import busy_result, rejected, result, setup


def printed(rows: list[ReplayRow], width: int) -> str:
    console = Console(file=StringIO(), record=True, width=width, force_terminal=False)
    console.print(replay_tables(rows, console.width))
    return console.export_text()


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_every_figure_of_every_policy_is_shown_at_any_width(width: int) -> None:
    policies = ("round_robin", "power_of_two_choices", "hybrid")
    rows = [summarize(busy_result(p, s)) for p in policies for s in (0, 1, 2)]
    text = printed(rows, width)
    assert "…" not in text
    lines = text.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    headings = [line.split("policy", 1)[1] for line in lines if line.startswith("policy")]
    words = " ".join(headings).split()
    # Nothing was loaded from the host, and no request has a group.
    shown = [one for one in FIGURES if one.name != "host_hit_rate_tokens" and not one.only]
    assert [title for one in shown for title in one.title.split()] == words
    figures, _, beside = text.partition("the same 3 seeds, paired with")
    assert sum(line.startswith("hybrid ") for line in figures.splitlines()) == len(headings)
    assert any(line.startswith("hybrid ") for line in beside.splitlines())
    assert "±" in text
    assert "mean of 3 seeds" in " ".join(text.split())


def test_the_best_of_a_column_is_marked_and_ties_are_not() -> None:
    quick = summarize(result([{"first": 50.0}], policy="quick"))
    slow = summarize(result([{"first": 150.0}], policy="slow"))
    lines = printed([slow, quick], 160).splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines if line[:4] in ("quic", "slow")}
    # TTFT and its quantiles, and a rate of good answers; TPOT is the other one's.
    assert table["quick"][:3] == [f"50.0{MARK}"] * 3
    assert table["slow"][:4] == ["150", "150", "150", f"87.5{MARK}"]
    # Both policies hit the same share.
    assert (table["quick"][8], table["slow"][8]) == ("50.0%", "50.0%")
    assert "best of its column" in printed([slow, quick], 160)
    assert "best of its column" not in printed([quick], 160)


def test_a_lead_within_the_seeds_spread_is_not_marked() -> None:
    def row_of(policy: str, seed: int, first: float) -> ReplayRow:
        rows = [{"first": first, "finish": first + 400}]
        return summarize(result(rows, policy=policy, setup=setup(policy, seed)))

    times = ((90.0, 100.0), (130.0, 100.0), (70.0, 100.0))
    rows = [row_of("chance", seed, mine) for seed, (mine, _) in enumerate(times)]
    rows += [row_of("steady", seed, other) for seed, (_, other) in enumerate(times)]
    assert MARK not in printed(rows, 160)
    sure = [row_of("ahead", seed, 60.0) for seed in range(3)]
    assert f"60.0{MARK}" in printed([*rows[3:], *sure], 160)


def test_the_legend_has_the_goodput_limits_and_explains_imbalance() -> None:
    words = " ".join(printed([summarize(result([{"first": 50.0}]))], 160).split())
    assert "first token 200 ms (--good-ttft-ms), each later token 100 ms in the mean" in words
    assert "the busiest worker's busy time over the workers' mean; at light load a high" in words


def test_losses_are_reported_and_a_missing_figure_is_a_dash() -> None:
    given = replace(result([rejected()]), rejections={"queue_full": 1}, trace_errors=3)
    text = printed([summarize(given)], 80)
    assert "hybrid turned away: queue_full 1" in text
    assert "3 wrong lines" in text
    assert "TTFT" not in text  # no policy has a figure for it
    assert "Nothing was replayed" in printed([], 80)


class Clock:
    """A clock that a test sets. Lifetime: test."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_short_replays_show_no_progress_and_long_ones_a_line_now_and_then() -> None:
    clock = Clock()
    console = Console(file=StringIO(), record=True, width=120, force_terminal=False)
    with Board(console, clock) as board:
        for label in ("round_robin", "hybrid, seed 1"):
            board.start(label)
            for tenth in range(10 if label == "round_robin" else 200):
                clock.now_s += 0.125
                share = min(1.0, (tenth + 1) / 200)
                show_replay(board, label, ReplayProgress(tenth * 1_000, None, share, tenth * 10**9))
    lines = console.export_text().splitlines()
    assert len(lines) == 3
    # After two seconds, then every ten: the replay took 25.
    assert lines[0] == ("hybrid, seed 1: 8%, 7,500 requests/s, virtual 15 s, 23 s left")
    assert lines[1].startswith("hybrid, seed 1: 48%")


def test_a_terminal_gets_a_progress_bar() -> None:
    clock = Clock()
    console = Console(file=StringIO(), record=True, width=120, force_terminal=True)
    with Board(console, clock) as board:
        board.start("hybrid")
        show_replay(board, "hybrid", ReplayProgress(1_600, 16_000, 0.9, 0))
        clock.now_s += 4
        show_replay(board, "hybrid", ReplayProgress(8_000, 16_000, 0.9, 90 * 10**9))
    text = console.export_text()
    assert "hybrid" in text
    assert "50%" in text
    assert "2,000 requests/s, virtual 1:30 min, 4 s left" in text


def test_progress_without_a_known_total_shows_no_remaining_time() -> None:
    clock = Clock()
    console = Console(file=StringIO(), record=True, width=120, force_terminal=False)
    with Board(console, clock) as board:
        board.start("none")
        show_replay(board, "none", ReplayProgress(0, None, 0.0, 0))
        clock.now_s += 2
        show_replay(board, "none", ReplayProgress(0, None, 0.0, 0))
        board.count("any", 1, None)
        clock.now_s += 2
        board.count("any", 2, None)
        show_replay(board, "none", ReplayProgress(10, None, 1.0, 10**9))
        clock.now_s += 8
        show_replay(board, "none", ReplayProgress(60, None, 1.0, 10**9))
    assert console.export_text().splitlines() == [
        "none: 0 requests, 0 requests/s, virtual 0 s",
        "any: 2",
        "none: 60 requests, 5 requests/s, virtual 1 s",
    ]
    assert [span(s) for s in (59.4, 187, 7215)] == ["59 s", "3:07 min", "2:00:15 h"]
