"""Tests of the report page of a replay: text, tables and pictures, for the smallest and largest
replays.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.replay.result import NEVER, HotPrefix, ReplayResult
from simulator.report.figures import FIGURES
from simulator.report.plots import copies_plot, curve_plot, styles, worker_map
from simulator.report.replay_page import ONE_SEED, TAILS, lead_claims, render_page, verdict
from simulator.report.row import ReplayRow, summarize
from simulator.report.view import hit_rates, on_grid, view
from tests.simulator.browser import CHROMIUM, DESK, PHONE, seen
from tests.simulator.replayed import S, busy_result, rejected, result, samples, setup, totals
from tests.simulator.seen_page import Seen

POLICIES = (("round_robin", 300.0, 0.2), ("hybrid", 100.0, 0.6), ("kv_load", 130.0, 0.65))


def results(seeds: int = 1, workers: int = 8) -> list[ReplayResult]:
    return [
        busy_result(policy, seed, workers, wait_ms=wait_ms, hits=hits)
        for policy, wait_ms, hits in POLICIES
        for seed in range(seeds)
    ]


def page_of(given_results: list[ReplayResult]) -> str:
    rows = [summarize(one) for one in given_results]
    return render_page(rows, [view(one) for one in given_results], ["a <note>"], "A test & more")


def nothing_done() -> ReplayResult:
    return result([rejected()], rejections={"queue_full": 1}, notes=("Nobody <came>.",))


def row_of(policy: str, seed: int, first: float, output: int = 5) -> ReplayRow:
    rows = [{"first": first, "finish": first + 400, "output": output}]
    return summarize(result(rows, policy=policy, setup=setup(policy, seed)))


def test_the_page_names_every_figure_and_loads_nothing_else() -> None:
    page = page_of(results(seeds=3))
    seen = Seen()
    seen.feed(page)
    tails = [one.title for one in FIGURES if one.name in TAILS and not one.only]
    # Nothing was loaded from the host, and no request has a group.
    left_out = [*tails, "of host", *(one.title for one in FIGURES if one.only)]
    assert seen.rows[0] == ["policy", *(f.title for f in FIGURES if f.title not in left_out)]
    assert seen.rows[4] == [f"beside {POLICIES[0][0]}", "TTFT ratio", "good, points"]
    assert seen.rows[7] == ["policy", *tails]
    for first in (1, 8):
        assert [row[0] for row in seen.rows[first : first + 3]] == [one for one, _, _ in POLICIES]
    assert len(seen.rows) == 2 * (1 + 3) + (1 + 2) + 1 + 9
    # Three curves, hit rates, two maps and the copies of each policy, two splits.
    assert len(seen.images) == 3 + 1 + 2 * 3 + 3 + 2
    assert all(image["alt"] and (image["src"] or "").startswith("data:") for image in seen.images)
    assert seen.links == []
    assert not re.search(r"url\(|src=\"http|@import", page)
    assert "a &lt;note&gt;" in page
    assert "<title>warmroute: A test &amp; more</title>" in page
    assert page == page_of(results(seeds=3))


@pytest.mark.parametrize(
    ("given_results", "pictures"),
    [
        ([], 0),
        ([result([], workers=())], 0),
        ([nothing_done()], 0),
        ([result()], 3 + 1),  # one answer, no samples: its curves, and where its time went
        ([busy_result(workers=1)], 3 + 1 + 2 + 1 + 2),
    ],
)
def test_pages_with_little_data_have_no_empty_plots(
    given_results: list[ReplayResult], pictures: int
) -> None:
    page = page_of(given_results)
    seen = Seen()
    seen.feed(page)
    assert len(seen.images) == pictures
    assert "nan" not in re.sub(r'src="[^"]*"', "", page)


def test_notes_of_runs_are_shown_once() -> None:
    page = page_of([nothing_done(), replace(nothing_done(), policy="other")])
    assert page.count("Nobody &lt;came&gt;.") == 1
    assert "No request was completed." in page


def test_the_verdict_names_the_best_policy_its_lead_and_its_cost() -> None:
    # Neither is ever within both limits: one misses that of TTFT, the other that of TPOT.
    slow = [row_of("slow", seed, 205.0 + seed) for seed in range(3)]
    quick = [row_of("quick", seed, 105.0 + seed * 2, output=3) for seed in range(3)]
    told = verdict([*slow, *quick])
    assert told[0].startswith("quick is best by TTFT p90: 107 ms against 206 ms with slow, ")
    assert told[0].endswith(" times what the seeds are apart.")
    assert told[1].startswith(
        "What quick costs: mean TPOT 200 ms against 100 ms with slow; output "
    )
    assert ONE_SEED not in told


def test_a_lead_that_differs_between_seeds_is_marked_as_noise() -> None:
    times = ((90.0, 100.0), (130.0, 100.0), (70.0, 100.0))
    rows = [row_of("chance", seed, mine) for seed, (mine, _) in enumerate(times)]
    rows += [row_of("steady", seed, other) for seed, (_, other) in enumerate(times)]
    told = lead_claims(rows)
    assert told
    assert not any(one.holds for one in told)
    assert {one.sign for one in told} == {"~"}
    assert render_page(rows, []).count("~ within noise") == 1


def test_the_verdict_reports_one_seed_one_policy_or_no_difference() -> None:
    one, other = row_of("a", 0, 100.0), row_of("b", 0, 100.0)
    assert verdict([one, other]) == ["The policies cannot be told apart by any figure."]
    assert verdict([one, row_of("b", 0, 150.0)])[-1] == ONE_SEED
    assert verdict([one])[0].startswith("a was replayed alone: requests within the limits 100.0%")
    assert verdict([]) == ["Nothing was replayed."]
    lost = summarize(result([{}, rejected()], policy="c"))
    assert "Left without an answer: c 50.0%; times are of the others." in verdict([one, lost])


def test_the_split_of_time_and_tokens_agrees_with_a_computation_by_hand() -> None:
    made = result(
        [{"first": 100.0, "finish": 500.0}, {"first": 300.0, "finish": 400.0}, rejected()],
        workers=(totals(query_tokens=1000, hit_tokens=400, recomputed_tokens=50),),
    )
    held = made.table.dispatched_ns.copy()
    held[0] += 20_000_000
    seen = view(replace(made, table=replace(made.table, dispatched_ns=held)))
    assert seen.time is not None
    assert (seen.time.router_ms, seen.time.prefill_ms, seen.time.decode_ms) == (10.0, 190.0, 250.0)
    assert (seen.tokens.cached, seen.tokens.computed, seen.tokens.recomputed) == (400, 600, 50)
    assert (seen.ttft_ms[0], seen.ttft_ms[100], seen.ttft_ms[-1]) == (100.0, 200.0, 300.0)
    assert view(nothing_done()).time is None


def test_hit_rates_are_those_of_their_time_interval() -> None:
    given_samples = replace(
        samples(workers=2, count=4),
        query_tokens=np.array([[60, 40], [100, 100], [100, 100], [300, 100]]),
        hit_tokens=np.array([[10, 10], [40, 60], [40, 60], [40, 60]]),
    )
    times, rates = hit_rates(given_samples, 40)
    assert times.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert rates[[0, 1, 3]].tolist() == [0.2, 0.8, 0.0]
    assert np.isnan(rates[2])  # nothing was admitted
    assert hit_rates(given_samples, 2)[1].tolist() == [0.5, 0.0]
    assert hit_rates(samples(), 40)[1].size == 0


@given(st.lists(st.integers(1, 5 * S), min_size=1, max_size=30), st.integers(1, 50))
def test_a_grid_cell_shows_the_sample_at_its_middle(gaps: list[int], columns: int) -> None:
    time_ns = np.cumsum(np.array(gaps, dtype=np.int64))
    values = np.arange(len(gaps))[:, None] * np.array([[1, 100]])
    grid = on_grid(time_ns, values, columns)
    assert grid.shape == (2, min(columns, len(gaps)))
    width = time_ns[-1] / grid.shape[1]
    for column, shown in enumerate(grid[0].astype(int)):
        begin = time_ns[shown - 1] if shown else 0
        assert begin - 1 <= (column + 0.5) * width <= time_ns[shown] + 1
    assert np.array_equal(grid[1], grid[0] * 100)


def test_policies_have_distinct_line_styles() -> None:
    labels = ["hybrid", "round_robin", *(f"mine?n={n}" for n in range(9))]
    chosen = styles(labels)
    assert list(chosen) == labels
    assert len({str(style) for style in chosen.values()}) == len(labels)
    assert chosen["hybrid"] == ("#0072B2", "solid")


@pytest.mark.parametrize("workers", [1, 8, 9, 256, 3000])
def test_plots_of_any_pool_are_small_files(workers: int) -> None:
    some = samples(workers, 5)
    svg = worker_map(some, some.busy_share, 1.0, 10.0)
    assert "<svg" in svg
    assert len(svg) < 1_000_000


def test_plots_without_data_are_valid() -> None:
    none = HotPrefix(3, 9, np.full(4, NEVER, dtype=np.int32))
    for svg in (
        curve_plot({"a": np.zeros(0), "b": np.zeros(201)}, "x"),
        worker_map(samples(2, 0), samples(2, 0).waiting, 1, 10.0, log=True),
        copies_plot([none], samples(1, 4), 1, 4.0),
        copies_plot([], samples(1, 0), 1, 4.0),
    ):
        assert "<svg" in svg


def wide(workers: int) -> list[ReplayResult]:
    """Return results whose rows are as wide as possible: names with wrappers, times of minutes, and
    intervals everywhere.
    """
    return [
        busy_result(f"{policy}|bounded_load|progressive", seed, workers, wait_ms=240_000.0)
        for policy, _, _ in POLICIES
        for seed in range(2)
    ]


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_the_page_without_external_resources(tmp_path: Path) -> None:
    pages = [page_of(wide(workers)) for workers in (8, 256)]
    for page in pages:
        assert re.search(r">\d{3},\d{3}\n±\d{2,3},\d{3}<", page)
    few, many = seen(tmp_path, (pages[0], DESK), (pages[1], PHONE))
    assert few["images"] == many["images"] == 15
    assert not few["scrolled"], "on a desk tables are seen whole"
