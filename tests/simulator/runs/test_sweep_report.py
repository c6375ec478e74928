"""Tests of a sweep's report: means over seeds, Pareto fronts against a plain computation, tables,
and its page in a browser.
"""

from __future__ import annotations

import io
import json
import math
import re
import statistics
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from engine.profiles import PROFILES, gpus_of
from simulator.report.figures import Interval, Ratio, figure
from simulator.runs.points import (
    LOST,
    OURS,
    PER_GPU,
    PER_USER,
    Point,
    beside,
    best,
    fleet_gpus,
    front,
    points_of,
)
from simulator.runs.sweep import as_json, best_tables, front_table, load_pictures, render_page
from simulator.runs.task import Keys, RunOutcome
from tests.simulator import synthetic
from tests.simulator.browser import CHROMIUM, DESK, PHONE, seen

TTFT, HITS = figure("ttft_ms.p90"), figure("hit_rate_tokens")


def outcome(
    policy: str = "hybrid", seed: int = 0, workers: int = 4, rate: float = 10.0
) -> RunOutcome:
    setup = synthetic.setup(policy, seed, workers, rate)
    return RunOutcome(Keys().task(setup), synthetic.evaluate(setup))


def swept() -> list[RunOutcome]:
    return [
        outcome(policy, seed, workers, rate)
        for policy in ("round_robin", "hybrid", "least_requests")
        for workers in (4, 8)
        for rate in (5.0, 12.0, 19.0)
        for seed in (1, 2, 3)
    ]


def made_up(x: float, y: float, lost: float = 0.0) -> Point:
    """Return a point of a sweep with two figures and a share of lost requests."""
    known = {PER_USER.name: x, PER_GPU.name: y, LOST.name: lost}
    figures = {
        one.name: Interval(known[one.name], None, None, 1) if one.name in known else None
        for one in OURS
    }
    return Point(synthetic.setup(), {}, (), figures)


def test_the_gpus_of_a_profile_are_its_degree_of_tensor_parallelism() -> None:
    known = {name: gpus_of(name) for name in PROFILES}
    assert known["qwen3-32b-h100-tp2"] == 2
    assert known["llama-3-70b-h200-tp8"] == 8
    assert known["llama-3.1-8b-h100"] == 1
    assert gpus_of("/profiles/tp9/measured-h100-tp4.json") == 4
    assert gpus_of("http-stp2.json") == 1
    assert fleet_gpus(synthetic.setup(workers=3)) == 6


def test_seeds_are_one_point_with_an_interval() -> None:
    points = points_of(swept())
    assert len(points) == 3 * 2 * 3
    point = points[0]
    assert point.name == "round_robin rate_per_s=5 workers=4"
    assert (point.choice, point.load) == ("round_robin workers=4", "rate_per_s=5")
    found = point.figures["ttft_ms.p90"]
    assert found is not None
    values = [row.ttft_ms.p90 or 0.0 for row in point.rows]
    assert found.mean == pytest.approx(sum(values) / 3)
    assert found.seeds == 3
    assert found.low is not None
    assert found.low < min(values)
    assert point.mean(PER_GPU.name) == pytest.approx(500 / 8)
    assert point.mean(PER_USER.name) == pytest.approx(
        sum(1000 / (row.tpot_ms.mean or 1) for row in point.rows) / 3, rel=1e-4
    )


def test_a_failed_seed_leaves_the_others() -> None:
    runs = [outcome(seed=seed) for seed in range(3)]
    runs[1] = RunOutcome(runs[1].task, None, "killed")
    (point,) = points_of(runs)
    assert [row.seed for row in point.rows] == [0, 2]
    assert points_of([runs[1]]) == []


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans()), max_size=30),
)
def test_the_front_has_the_points_that_no_other_dominates(
    places: list[tuple[int, int, bool]],
) -> None:
    points = [made_up(x, y, 0.5 if lost else 0.0) for x, y, lost in places]
    found = front(points, PER_USER, PER_GPU)
    able = [p for p in places if not p[2]] or places
    expected = {
        (x, y)
        for x, y, _ in able
        if not any((a, b) != (x, y) and a >= x and b >= y for a, b, _ in able)
    }
    pairs = [(p.mean(PER_USER.name), p.mean(PER_GPU.name)) for p in found]
    assert set(pairs) == expected
    assert len(pairs) == len(expected)
    assert pairs == sorted(pairs, key=lambda pair: -(pair[0] or 0))


def test_a_policy_that_rejects_requests_is_no_rival() -> None:
    quick, slow = outcome("hybrid"), outcome("round_robin")
    assert quick.row is not None
    turned = msgspec.structs.replace(quick.row, requests=100, rejected=5)
    points = points_of([RunOutcome(quick.task, turned), slow])
    assert [p.name for p in best(points, TTFT)] == ["round_robin"]
    assert [p.name for p in best(points[:1], TTFT)] == ["hybrid"]  # it is the only point


def test_tables_name_the_best_at_each_load() -> None:
    points = points_of(swept())
    console = Console(file=io.StringIO(), width=100)
    console.print(*best_tables(points), front_table(points))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for rate in (5, 12, 19):
        assert f"rate_per_s={rate}" in text
    assert re.search(r"TTFT p90 +hybrid workers=8 +\d+ ±\d", text)
    assert max(map(len, text.splitlines())) <= 100


def test_load_plots_exist_for_each_fleet_with_a_line_for_each_policy() -> None:
    pictures = load_pictures(points_of(swept()), TTFT)
    assert [each.title for each in pictures] == ["workers 4", "workers 8"]
    for each in pictures:
        assert list(each.curves) == ["round_robin", "hybrid", "least_requests"]
        assert [load for load, _ in each.curves["hybrid"]] == [5.0, 12.0, 19.0]
    many = [
        outcome(f"hybrid?load_factor={n}", 0, 4, rate) for n in range(11) for rate in (5.0, 9.0)
    ]
    (crowded,) = load_pictures(points_of(many), TTFT)
    assert len(crowded.curves) == 8
    assert crowded.left_out == 3
    by_workers = load_pictures(points_of([outcome(workers=n) for n in (2, 4, 8)]), TTFT)
    assert [load for load, _ in by_workers[0].curves["hybrid"]] == [2.0, 4.0, 8.0]
    assert load_pictures(points_of([outcome(seed=n) for n in (1, 2)]), TTFT) == []


def test_pages_with_little_data_are_valid() -> None:
    one = outcome()
    failed = RunOutcome(one.task, None, "ValueError: <nothing>")
    assert one.row is not None
    nothing = msgspec.structs.replace(
        one.row,
        ttft_ms=msgspec.structs.replace(one.row.ttft_ms, mean=None, p90=None),
        hit_rate_tokens=None,
    )
    for outcomes in ([], [failed], [one], [RunOutcome(one.task, nothing)]):
        page = render_page(outcomes, points_of(outcomes), "little")
        assert page.endswith("</html>\n")
        assert "nan" not in page.lower().replace("finance", "")
    assert "ValueError: &lt;nothing&gt;" in render_page([failed], [], "little")


def test_the_page_names_the_winner_and_is_reproducible() -> None:
    outcomes = [outcome(policy, seed) for policy in synthetic.FACTORS for seed in (1, 2)]
    page = render_page(outcomes, points_of(outcomes), "a sweep")
    assert page == render_page(outcomes, points_of(outcomes), "a sweep")
    assert "First tokens come soonest with hybrid: nine of ten within" in page
    assert "6 runs of 3 choices." in page


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_fits_its_window_and_loads_no_external_resources(tmp_path: Path) -> None:
    runs = [*swept(), RunOutcome(outcome(seed=9).task, None, "its process was killed")]
    page = render_page(runs, points_of(runs), "a test")
    assert [view["images"] for view in seen(tmp_path, (page, DESK), (page, PHONE))] == [4, 4]


def test_labels_of_a_crowded_front_do_not_overlap() -> None:
    crowded = [made_up(10 + n / 100, 10 - n / 100) for n in range(50)]
    far = [made_up(0.0, 20.0), made_up(20.0, 0.0)]
    page = render_page([], [*crowded, *far], "crowded")
    listed = re.findall(r"<li><code>hybrid</code>: ([\d.]+)", page)
    assert listed == ["20.0", "10.5", "0.0"]


def test_choices_are_paired_by_seed() -> None:
    """Choices are compared seed by seed, whatever the order of the seeds. The expected values are
    computed from the rows by hand.
    """
    runs = [outcome("hybrid", seed) for seed in (1, 2, 3)]
    runs += [outcome("round_robin", seed) for seed in (3, 4, 2, 1)]
    ours, other = points_of(runs)
    times = {
        name: {run.task.setup.seed: run.row.ttft_ms.p90 for run in runs if run.row.policy == name}
        for name in ("hybrid", "round_robin")
    }
    logs = [math.log(times["hybrid"][s] / times["round_robin"][s]) for s in (1, 2, 3)]
    half = 4.302653 * statistics.stdev(logs) / math.sqrt(3)
    found = beside(TTFT, ours, other)
    assert isinstance(found, Ratio)
    assert found.seeds == 3
    assert found.mean == pytest.approx(math.exp(statistics.fmean(logs)), rel=1e-5)
    assert found.high == pytest.approx(math.exp(statistics.fmean(logs) + half), rel=1e-5)
    hits = beside(HITS, ours, other)
    assert hits == Interval(0.3, 0.3, 0.3, 3), "shares are subtracted"
    assert beside(TTFT, ours, points_of([outcome("hybrid", 9)])[0]) is None, "no common seed"


def test_every_report_compares_the_best_with_the_second_best() -> None:
    outcomes = [o for o in swept() if o.task.setup.workload.rate_per_s == 12.0]
    points = points_of([o for o in outcomes if o.task.setup.groups[0].count == 4])
    console = Console(file=io.StringIO(), record=True, width=200, force_terminal=False)
    console.print(*best_tables(points))
    text = console.export_text()
    line = next(line for line in text.splitlines() if line.startswith(" TTFT p90"))
    first, second = best(points, TTFT)[:2]
    paired = beside(TTFT, first, second)
    assert isinstance(paired, Ratio)
    assert f"{paired.mean:.2f} [" in line
    assert re.search(r"hits .* \+20\.0 points \[\+20\.0, \+20\.0\]", text)
    page = render_page(outcomes, points, "a test")
    assert f"{paired.mean:.2f} [" in page
    assert f"beside {second.choice}" in page
    told = json.loads(as_json(outcomes, points))["points"]
    assert [one["versus"] for one in told] == [None, "round_robin", "round_robin"]
    assert told[1]["ttft_ratio"]["seeds"] == told[1]["good_difference"]["seeds"] == 3
    assert set(told[1]["more_seeds"]) == {"ttft", "good"}
    alone = points_of([outcome("hybrid", 1), outcome("round_robin", 1)])
    console.print(*best_tables(alone))
    assert "not resolved" not in console.export_text(), "one seed has no interval"
