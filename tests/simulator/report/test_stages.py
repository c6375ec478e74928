"""Tests of rising rates in stages: the figures of each stage computed by hand, and their tables and
pictures.
"""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from simulator.replay.result import NEVER, ReplayResult, Verdict
from simulator.replay.run import replay
from simulator.replay.setup import Setup, WorkerGroup
from simulator.report.console import replay_tables
from simulator.report.files import Report, encode
from simulator.report.replay_page import ladder_plot, render_page
from simulator.report.row import Ladders, ladders, rates, summarize, summarize_stages
from simulator.report.view import view
from simulator.traces.job import Stage
from simulator.traces.spec import WorkloadSpec
from tests.simulator.replayed import S, busy_result, rejected, result, setup

STAGES = (
    Stage(0, 2 * S, 1.0, 2, warm_up=True),
    Stage(5 * S, 7 * S, 2.5, 5),
    Stage(10 * S, 12 * S, 4.0, 8),
    Stage(20 * S, 22 * S, 9.0, 18),
)


def laddered(first: float = 100.0, policy: str = "hybrid", seed: int = 0) -> ReplayResult:
    """Return a result with two warm-up requests, three requests in the second stage, two in the
    third, and none after it.
    """
    rows = [
        {"arrival": 0.0, "first": 9_000.0, "finish": 9_500.0},
        {"arrival": 1_999.0},
        {"arrival": 5_000.0, "first": first, "finish": 1_000.0, "output": 30},
        {"arrival": 6_000.0, "first": 3 * first, "finish": 3_000.0, "output": 10, "hit": 32},
        {"arrival": 9_999.0, **rejected()},  # in the pause: it belongs to the stage before
        {"arrival": 10_000.0, "first": first, "finish": None, "verdict": Verdict.FAILED},
        {"arrival": 11_999.0, "first": 7.0, "finish": 2_001.0, "output": 80, "hit": 0},
    ]
    return result(rows, policy=policy, setup=setup(policy, seed), stages=STAGES)


def test_the_figures_of_stages_agree_with_a_computation_by_hand() -> None:
    second, third = summarize_stages(laddered())
    assert (second.rate_per_s, second.requests, second.completed) == (2.5, 3, 2)
    assert (second.ttft_ms.mean, second.ttft_ms.p90, second.ttft_ms.max) == (200.0, 280.0, 300.0)
    # 40 tokens from the stage's start at 5 s to its last answer at 9 s.
    assert second.output_tokens_per_s == 10.0
    assert second.hit_rate_tokens == round((80 + 32) / 320, 5)
    # The lost request counts and hit something in the cache, but gave no answer.
    assert (third.rate_per_s, third.requests, third.completed) == (4.0, 2, 1)
    assert (third.ttft_ms.mean, third.output_tokens_per_s) == (7.0, 20.0)
    assert third.hit_rate_tokens == round(80 / 320, 5)


def test_a_stage_without_answers_has_no_figures() -> None:
    lost = {"first": None, "finish": None, "hit": NEVER, "verdict": Verdict.FAILED}
    (only,) = summarize_stages(result([lost], stages=(Stage(0, S, 1.0, 1),)))
    assert (only.requests, only.completed) == (1, 0)
    assert only.ttft_ms.mean is only.output_tokens_per_s is only.hit_rate_tokens is None
    assert summarize_stages(result([])) == ()
    assert summarize_stages(result([], stages=STAGES)) == ()


def test_stages_are_part_of_the_hash_if_there_are_any() -> None:
    plain, given = summarize(replace(laddered(), stages=())), summarize(laddered())
    assert plain.stages == ()
    assert len(given.stages) == 2
    assert given.report_hash != plain.report_hash
    faster = (*STAGES[:1], replace(STAGES[1], rate_per_s=2.6), *STAGES[2:])
    assert summarize(replace(laddered(), stages=faster)).report_hash != given.report_hash


def test_a_report_keeps_its_stages(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    rows = [summarize(laddered())]
    path.write_bytes(encode(rows, {}))
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert list(report.results) == rows
    # A report written before stages existed can still be read.
    path.write_bytes(encode([summarize(busy_result())], {}).replace(b'"stages": []', b'"holds": 0'))
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert report.results[0].stages == ()


def test_a_ladder_is_the_mean_of_its_seeds_with_the_longest_seeds_stages() -> None:
    long, short = summarize(laddered(100.0)), summarize(laddered(200.0, seed=1))
    cut = msgspec.structs.replace(short, stages=short.stages[:1])
    groups = {"a": [long.stages, cut.stages], "b": [cut.stages]}
    assert rates(groups) == [2.5, 4.0]
    found = ladders(groups, lambda stage: stage.ttft_ms.mean)
    assert found == {"a": [300.0, 7.0], "b": [400.0, None]}
    assert rates({"a": [()]}) == []
    assert ladders({"a": [()]}, lambda stage: stage.hit_rate_tokens) == {"a": []}


@pytest.mark.parametrize("width", [30, 80])
def test_the_terminal_shows_each_figure_by_rate(width: int) -> None:
    rows = [summarize(laddered()), summarize(laddered(50.0, "round_robin"))]
    console = Console(file=StringIO(), record=True, width=width, force_terminal=False)
    console.print(replay_tables(rows, console.width))
    text = console.export_text()
    lines = text.split("by stage: TTFT p90, ms")[1].split("by stage: output tokens/s")[0]
    words = lines.split()
    assert [word for word in words if word.endswith("/s")] == ["2.5/s", "4/s"]
    assert {"280", "140", "7.0"} <= set(words)
    assert text.count("by stage") == 3
    console = Console(file=StringIO(), record=True, width=80)
    console.print(replay_tables([summarize(busy_result())], console.width))
    assert "by stage" not in console.export_text()


def test_the_page_plots_ladders_if_there_are_any() -> None:
    results = [laddered(), laddered(50.0, "round_robin")]
    page = render_page([summarize(one) for one in results], [view(one) for one in results])
    assert page.count("As the load rises") == 1
    assert "TTFT p90, ms against the rate. hybrid: 280 at 2.5/s, 7.0 at 4/s" in page
    assert "output tokens/s against the rate" in page
    without = render_page([summarize(busy_result())], [])
    assert "As the load rises" not in without


@pytest.mark.parametrize(
    "ladder", [{"a": [None, 3.0], "b": [None, None]}, {"a": [0.0]}, {"a": [None]}]
)
def test_ladders_with_gaps_or_one_stage_are_plotted(ladder: Ladders) -> None:
    offered = [1.0, 2.0][: len(ladder["a"])]
    assert "<svg" in ladder_plot(offered, ladder, "x", log=True)
    assert "<svg" in ladder_plot(offered, ladder, "x", log=False)


def test_a_real_replay_reports_its_stages() -> None:
    source = "gen:inference_perf?stages=1:4,2:5,8:5&warm_ups=1&output=8&pause_s=2"
    group = WorkerGroup(2, "llama-3.1-8b-h100")
    row = summarize(replay(Setup(WorkloadSpec(source), "round_robin", (group,), block_size=16)))
    assert [(stage.rate_per_s, stage.requests) for stage in row.stages] == [(2.0, 10), (8.0, 40)]
    assert sum(stage.completed for stage in row.stages) == row.completed - 4
    faster = WorkloadSpec(source, speed=2.0, requests=20)
    row = summarize(replay(Setup(faster, "round_robin", (group,), block_size=16)))
    assert [(stage.rate_per_s, stage.requests) for stage in row.stages] == [(4.0, 10), (16.0, 6)]
