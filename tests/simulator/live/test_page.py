"""Tests of the report page: it shows every row, needs no other file, and names what its pictures
show.
"""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from simulator.live.console import LoadBoard, claim_lines, print_rows, run_line
from simulator.live.demo import claims
from simulator.live.outcome import LiveVerdict, Outcome, summarize
from simulator.live.page import render_page, waits_over_time, worker_counts
from simulator.live.scrape import Sample, pool_samples
from simulator.live.stack import RunResult
from simulator.report.figures import live_table
from simulator.report.plots import (
    busy_scale,
    curve_plot,
    line_plot,
    log_labels,
    log_steps,
    share_plot,
)
from tests.simulator.made_up import counters, demo_runs, outcome
from tests.simulator.seen_page import Seen


def test_the_page_has_every_row_and_loads_nothing_else() -> None:
    runs = demo_runs()
    rows = [run.row for run in runs]
    page = render_page(runs, [], claims(rows), ["a <note>"])
    seen = Seen()
    seen.feed(page)
    shown = [row for row in seen.rows if row[0] != "policy"]
    tables = [
        live_table({row.policy: row for row in rows if row.workload == name})[0]
        for name in dict.fromkeys(row.workload for row in rows)
    ]
    assert shown == [list(row) for table in tables for row in table.rows]
    assert len(shown) == len(rows)
    # Pictures of the hot spot and its cure, of each run, of each act, and of turns over time.
    assert len(seen.images) == 2 + 2 * len(runs) + 4 + 2
    assert all(image["alt"] and (image["src"] or "").startswith("data:") for image in seen.images)
    assert seen.links == []
    assert not re.search(r"url\(|src=\"http|@import", page)
    assert 'name="viewport"' in page
    assert "a &lt;note&gt;" in page


def live_page(workers: list[str | None]) -> tuple[str, Seen]:
    """Return the page of a load whose replies came from `workers`, one reply each, without
    counters.
    """
    outcomes = tuple(outcome(serial, worker=name) for serial, name in enumerate(workers))
    row = summarize("live", "shared_prompts", outcomes)
    run = RunResult(row, outcomes, pool_samples([], 1.0), row.workers, ())
    page = render_page([run], [], [], [], "Load test", clock="wall time")
    seen = Seen()
    seen.feed(page)
    return page, seen


def test_the_page_has_no_worker_panels_if_the_endpoint_names_no_workers() -> None:
    page, seen = live_page([None] * 20)
    assert "does not name its workers" in page
    assert [image["alt"][:6] for image in seen.images if image["alt"]] == ["Curves"]
    assert "20 of 20 requests completed" in page
    assert not re.search("Busiest|model time|idle|Overruns|Hit rate", page)
    assert "milliseconds of wall time" in page
    assert seen.rows[0] == [
        *("policy", "TTFT", "TTFT p90", "TTFT p99", "good", "TPOT", "e2e", "tok/s", "rej.", "lost"),
    ]
    assert [len(row) for row in seen.rows] == [10, 10]


def test_named_workers_without_counters_show_their_requests() -> None:
    page, seen = live_page(["w0", "w1"] * 10)
    assert "Busiest worker 50% of requests" in page
    assert len(seen.images) == 2
    assert not re.search("idle|how busy|does not name", page)


@given(st.floats(1e-6, 1e4), st.floats(1.0, 1e6))
def test_a_logarithmic_axis_has_two_labels_at_least(low: float, factor: float) -> None:
    steps = log_steps(low, low * factor)
    assert steps[0] <= low
    assert low * factor <= steps[-1]
    assert 2 <= len(log_labels(steps)) <= 14


def test_axis_labels_are_round() -> None:
    assert log_labels(log_steps(0.0061, 0.0079)) == [0.005, 0.01]
    assert log_labels(log_steps(0.01, 0.01)) == [0.01, 0.02]
    assert log_labels(log_steps(0.03, 0.3)) == [0.02, 0.05, 0.1, 0.2, 0.5]
    assert log_labels(log_steps(0.05, 25.0)) == [0.1, 1.0, 10.0]


def test_the_same_runs_give_the_same_page() -> None:
    """The same runs give the same page; these runs have turns, so that the page has every kind of
    picture.
    """
    first, second = demo_runs()[7:8], demo_runs()[7:8]
    assert render_page(first, [], [], []) == render_page(second, [], [], [])


def test_busy_shares_are_the_growth_between_samples() -> None:
    samples = [
        Sample(0.0, (counters(busy_s=0.0), counters(busy_s=5.0))),
        Sample(2.0, (counters(busy_s=0.0), counters(busy_s=5.0))),
        Sample(3.0, (counters(busy_s=2.0), counters(busy_s=5.5))),
    ]
    pool = pool_samples(samples, speed=2.0)
    assert pool.time_ns.tolist() == [4_000_000_000, 6_000_000_000]
    # The first worker's step of two seconds ended in the second stretch and began in the first.
    assert np.array_equal(pool.busy_share, [[0.5, 0.0], [1.0, 0.5]])
    assert pool_samples(samples[:1], 1.0).busy_share.size == 0


def test_waits_are_means_by_arrival_time_in_model_time() -> None:
    outcomes = (
        outcome(0, scheduled_s=0.0, ttft_ms=1_000.0, turn=0),
        outcome(1, scheduled_s=1.0, ttft_ms=3_000.0, turn=1),
        outcome(2, scheduled_s=1.2, ttft_ms=None, verdict=LiveVerdict.REJECTED, turn=2),
        outcome(3, scheduled_s=10.0, ttft_ms=500.0, turn=3),
    )
    run = made_of(outcomes, speed=4.0)
    at_s, mean_s = waits_over_time(run, until_s=80.0)
    assert at_s[:2].tolist() == [2.0, 6.0]  # 20 bins of 4 s
    assert mean_s[[0, 1, 10]].tolist() == [4.0, 12.0, 2.0]
    assert np.isnan(np.delete(mean_s, [0, 1, 10])).all()
    assert np.isnan(waits_over_time(made_of(()), 80.0)[1]).all()


def made_of(outcomes: tuple[Outcome, ...], speed: float = 1.0) -> RunResult:
    """Return a run of these outcomes, without counters."""
    row = summarize("hybrid", "agents", outcomes, ["worker 0"], speed=speed)
    return RunResult(row, outcomes, pool_samples([], speed), row.workers, ())


def test_hits_are_counted_from_the_first_sample() -> None:
    samples = [
        Sample(0.5 * n, (counters(hit_tokens=100 + 10 * n, query_tokens=200 + 20 * n), counters()))
        for n in range(5)
    ]
    pool = pool_samples(samples, speed=2.0)
    assert pool.hit_tokens[:, 0].tolist() == [10, 20, 30, 40]
    assert pool.query_tokens[:, 0].tolist() == [20, 40, 60, 80]
    assert pool_samples([], 1.0).hit_tokens.size == 0


def test_plots_without_data_are_valid() -> None:
    lost = outcome(0, worker=None, verdict=LiveVerdict.FAILED, ttft_ms=None)
    pictures = (
        share_plot(*worker_counts(made_of((lost,)))),
        curve_plot({"hybrid": np.zeros(0)}, "x"),
        line_plot({"hybrid": waits_over_time(made_of((lost,)), 1.0)}, "x", "y", log="y"),
        line_plot({}, "x", "y"),
    )
    for svg in pictures:
        assert "<svg" in svg
    assert all(re.fullmatch(r"#[0-9a-f]{8}", colour) for colour in busy_scale())


def test_the_console_shows_every_run_and_every_failure() -> None:
    console = Console(record=True, width=80, force_terminal=False)
    rows = [run.row for run in demo_runs()]
    with LoadBoard(console, 1) as board:
        board.start_run("shared_prompt / hybrid", 2)
        board.note(outcome(0))
        board.note(outcome(1, verdict=LiveVerdict.FAILED, error="HTTP 500: oops"))
        board.end_run(run_line(rows[0]))
    print_rows(console, rows)
    for line in claim_lines(claims(rows)):
        console.print(line)
    text = console.export_text()
    assert "lost request 1: HTTP 500: oops" in text
    assert all(f"\n{row.policy} " in text for row in rows)
    assert "…" not in text
    assert "not shown" not in text
    assert "conversation: 400 requests, times in ms" in text
    assert "agents: 400 to 480 requests, times in ms" in text
