"""Tests of comparisons of rules: ratios computed by hand, failed seeds, saturation, and what is
read, shown and refused.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from simulator.replay.setup import Setup
from simulator.report.figures import ratio_of_pairs
from simulator.report.row import ReplayRow
from simulator.runs.compare import run_compare
from simulator.runs.scenes import (
    compare_scene,
    keeps_up,
    ladder_of_scenes,
    load_of,
    read_scenes,
    rivalry,
    short_names,
)
from simulator.runs.task import SweepError
from simulator.traces.spec import WorkloadSpec
from tests.effort import examples
from tests.simulator.compared import row_of, written
from tests.simulator.synthetic import setup

TIMES = {"lmetric": (100.0, 400.0, 200.0), "ours": (50.0, 100.0, 100.0), "slow": (900.0, 200.0)}


def three_rules(rate: float = 10.0) -> list[tuple[Setup, ReplayRow | None]]:
    known = {"lmetric": "least_requests", "ours": "hybrid", "slow": "random"}
    asked = [
        (setup(known[name], seed, rate=rate), time)
        for name, times in TIMES.items()
        for seed, time in enumerate(times)
    ]
    return [(one, row_of(one, time)) for one, time in asked]


def test_compared_figures_agree_with_a_computation_by_hand(tmp_path: Path) -> None:
    [scene] = read_scenes([written(tmp_path / "W1.results.jsonl", three_rules())])
    assert scene.name == "W1"
    found = compare_scene(scene, "least_requests")
    assert [rule.policy for rule in found.rules] == ["hybrid", "least_requests", "random"]
    ours, base, slow = found.rules
    assert (ours.ttft_mean_ms, ours.ttft_median_ms, ours.ttft_worst_ms) == (250 / 3, 100.0, 100.0)
    assert found.collapse_ms == 250.0
    assert (ours.collapsed, base.collapsed, slow.collapsed) == (0, 1, 1)
    # Ratios of the seeds: 1/2, 1/4, 1/2.
    told = ours.ratios["ttft_mean"]
    assert told is not None
    assert told.mean == pytest.approx((1 / 16) ** (1 / 3), abs=1e-4)
    logs = [math.log(x) for x in (0.5, 0.25, 0.5)]
    half = 4.302653 * statistics.stdev(logs) / math.sqrt(3)
    assert told.low == pytest.approx(math.exp(statistics.fmean(logs) - half), abs=1e-4)
    assert told.high == pytest.approx(math.exp(statistics.fmean(logs) + half), abs=1e-4)
    paired = slow.ratios["ttft_mean"]
    assert paired is not None
    assert paired.seeds == 2
    assert paired.mean == pytest.approx(math.sqrt(9 * 0.5), abs=1e-4)
    even = base.ratios["e2e_mean"]
    assert even is not None
    assert (even.mean, even.low, even.high) == (1.0, 1.0, 1.0)


def test_good_answers_are_paired_by_seed_and_unresolved_ones_are_counted(tmp_path: Path) -> None:
    runs: list[tuple[Setup, ReplayRow | None]] = []
    for seed, base_good in enumerate((0.5, 0.9, 0.7)):
        for policy, more in (("least_requests", 0.0), ("hybrid", 0.05), ("random", 0.02 * seed)):
            asked = setup(policy, seed)
            runs.append((asked, row_of(asked, 100.0, base_good + more)))
    file = written(tmp_path / "a.jsonl", runs)
    [scene] = read_scenes([file])
    rules = {rule.policy: rule for rule in compare_scene(scene, "least_requests").rules}
    ours, drawn = rules["hybrid"], rules["random"]
    assert ours.good_difference is not None
    assert (ours.good_difference.low, ours.good_difference.high) == (0.05, 0.05)
    assert ours.more_seeds == {"ttft_mean": 0, "good": 0}
    assert drawn.good_difference is not None
    half = 4.302653 * 0.02 / math.sqrt(3)
    assert drawn.good_difference.high == pytest.approx(0.02 + half, abs=1e-6)
    assert drawn.more_seeds["good"]
    _, text = compared((file,), "least_requests")
    assert "+5.0 [+5.0, +5.0] " in text
    assert re.search(r"\+2\.0 \[-3\.0, \+7\.0\] ~", text)
    assert "More seeds that narrow an interval to 3 %: about random good " in text
    markdown = tmp_path / "out.md"
    compared((file,), "least_requests", markdown=markdown)
    assert "to 3 %: about random good " in markdown.read_text()
    alone = compare_scene(scene, "lpwl").rules[0]
    assert (alone.good_difference, alone.more_seeds) == (None, {"ttft_mean": None, "good": None})


def test_the_best_rival_is_chosen_on_half_of_the_seeds_and_judged_on_the_rest(
    tmp_path: Path,
) -> None:
    times = {
        "hybrid": (100.0, 100.0, 100.0, 100.0),
        "random": (50.0, 400.0, 50.0, 400.0),  # the best of the even seeds, by luck
        "lpwl": (200.0, 110.0, 200.0, 110.0),
        "kv_load": (1.0, 1.0, 1.0),  # has not run on all of them
    }
    runs: list[tuple[Setup, ReplayRow | None]] = [
        (asked, row_of(asked, ttft, good=ttft / 1000, grouped=True))
        for policy, known in times.items()
        for seed, ttft in enumerate(known)
        for asked in [setup(policy, seed)]
    ]
    file = written(tmp_path / "a.jsonl", runs)
    [scene] = read_scenes([file])
    found = rivalry(scene, "hybrid")
    assert found is not None
    # lpwl is chosen on the odd seeds and judged on the even ones, random the other way round.
    assert found.rivals_ttft == ("lpwl", "random")
    assert found.rival_ttft_ms == (200 + 400 + 200 + 400) / 4
    assert found.ttft is not None
    assert found.ttft.mean == pytest.approx(math.sqrt(100 / 200 * 100 / 400), abs=1e-4)
    # Of the good answers random has most on the odd seeds, lpwl on the even ones.
    assert found.rivals_good == ("random", "lpwl")
    assert found.points is not None
    assert found.points.mean == pytest.approx(0.1 - (0.05 + 0.11) / 2)
    assert found.rivals_later == ("lpwl", "random")
    assert (found.later_p99_ms, found.rival_later_p99_ms) == (300.0, 900.0)
    assert found.later_p99 == found.ttft
    assert found.rivals_task == ("lpwl", "random")
    assert (found.task_ms, found.rival_task_ms) == (10_000.0, 30_000.0)
    assert found.task == found.ttft
    assert rivalry(scene, "kv_load") is None
    assert rivalry(scene, "jsew") is None
    json, markdown, html = (tmp_path / f"out.{kind}" for kind in ("json", "md", "html"))
    _, text = compared((file,), "hybrid", json=json, markdown=markdown, html=html)
    report = msgspec.json.decode(json.read_bytes())
    for rule in report["scenes"][0]["rules"]:
        assert (rule["task_mean_ms"], rule["fairness"]) == (100 * rule["ttft_mean_ms"], 0.875)
        assert rule["ratios"]["task_mean"] == rule["ratios"]["ttft_mean"]
    for shown in (text, markdown.read_text(), html.read_text()):
        assert "The base beside the best other rule" in shown
        assert re.search(r"0\.3\S* lpwl, random", shown)
        assert re.search(r"0\.9\S* lpwl, random", shown)
        assert re.search(r"\b30\S* lpwl, random", shown)
        for column in ("task", "Jain", "task ratio", "0.875"):
            assert column in shown


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 1e4), st.floats(0.01, 1e4)), min_size=1, max_size=30))
def test_a_ratio_of_swapped_policies_is_the_inverse(pairs: list[tuple[float, float]]) -> None:
    there, back = ratio_of_pairs(pairs), ratio_of_pairs([(b, a) for a, b in pairs])
    assert there is not None
    assert back is not None
    assert there.mean * back.mean == pytest.approx(1, rel=1e-4)
    if there.low is not None and there.high is not None and back.high is not None:
        assert there.low <= there.mean <= there.high
        if there.low > 1e-300:
            assert there.low * back.high == pytest.approx(1, rel=1e-4)


def test_a_policy_that_rejects_requests_is_collapsed_and_no_baseline(tmp_path: Path) -> None:
    quick = setup("random", 0)
    runs = [*three_rules()[:6], (quick, row_of(quick, 1.0, lost=40))]
    [scene] = read_scenes([written(tmp_path / "a.jsonl", runs)])
    found = compare_scene(scene, "hybrid")
    assert found.collapse_ms == 250.0
    first = found.rules[0]
    assert (first.policy, first.collapsed, first.lost_share) == ("random", 1, 0.4)


def test_saturation_loads_agree_with_a_computation_by_hand(tmp_path: Path) -> None:
    def scene_at(rate: float, ttft_ms: float, good: float) -> list[tuple[Setup, ReplayRow | None]]:
        ours, other = setup("hybrid", 0, rate=rate), setup("random", 0, rate=rate)
        return [(ours, row_of(ours, ttft_ms, good)), (other, row_of(other, 9000.0, 0.5))]

    runs = scene_at(10, 500.0, 1.0) + scene_at(20, 1000.0, 0.98) + scene_at(40, 4000.0, 0.58)
    scenes = read_scenes([written(tmp_path / "ladder.yaml.results.jsonl", runs)])
    names = ["ladder rate_per_s=10", "ladder rate_per_s=20", "ladder rate_per_s=40"]
    assert [scene.name for scene in scenes] == names
    found = [compare_scene(scene, "random") for scene in scenes]
    assert [keeps_up(s.rules[0]) for s in found] == [True, True, False]
    steps = ladder_of_scenes("ladder", found[::-1])
    ours, other = steps.rules
    # 2 s is crossed half-way in logarithms, at 30; 90 % a fifth of the way, at 24.
    assert (ours.policy, ours.load, ours.beyond) == ("hybrid", 24.0, None)
    assert (other.load, other.below) == (None, 10.0)
    assert ladder_of_scenes("ladder", found[:2]).rules[0].beyond == 20.0


@pytest.mark.parametrize(
    ("source", "value", "bare"),
    [
        ("gen:agentic?rate=0.3&turns=5", 0.3, "gen:agentic?turns=5"),
        ("gen:agentic?turns=5&rate=0.3", 0.3, "gen:agentic?turns=5"),
        ("gen:agentic", 0.45, "gen:agentic"),
        ("gen:unheard", 2.0, "gen:unheard"),
        ("a/trace.jsonl", 2.0, "a/trace.jsonl"),
    ],
)
def test_the_offered_load_comes_from_the_source_or_the_speed(
    source: str, value: float, bare: str
) -> None:
    asked = setup()
    work = msgspec.structs.replace(asked.workload, source=source, rate_per_s=None, speed=2.0)
    found = load_of(msgspec.structs.replace(asked, workload=work))
    generated = "begun" in found.unit
    assert found.value == pytest.approx(value * 2 if generated else value)
    assert found.of.workload.source == bare
    assert found.of.workload.speed == 1.0


def test_a_file_of_sessions_has_a_rate() -> None:
    asked = setup()
    found = [
        load_of(msgspec.structs.replace(asked, workload=WorkloadSpec("a.jsonl", format=text)))
        for text in ("sessions?rate=0.04", "sessions?rate=0.07", "sessions", "sessions?rat=1")
    ]
    assert [load.value for load in found] == [0.04, 0.07, 1.0, 1.0]
    assert found[0].of == found[1].of
    assert found[0].unit == "begun per second"


def compared(results: Sequence[Path], base: str, *policies: str, **files: Path) -> tuple[bool, str]:
    console = Console(file=StringIO(), record=True, width=160, force_terminal=False)
    return run_compare(results, base, console, policies, **files), console.export_text()


def test_compare_shows_and_writes_all_results(tmp_path: Path) -> None:
    failed = setup("random", 7)
    runs = [*three_rules(), *three_rules(20.0), (failed, None)]
    file = written(tmp_path / "W4b.results.jsonl", runs)
    with file.open("ab") as torn:
        torn.write(b'{"key": "torn')
    json, html, markdown = (tmp_path / f"out.{kind}" for kind in ("json", "html", "md"))
    files = {"json": json, "html": html, "markdown": markdown}
    sound, text = compared((file,), "least_requests", **files)
    assert not sound
    assert "failed: W4b rate_per_s=10: random, seed 7: ValueError: no room" in text
    assert "W4b rate_per_s=20: 2-3 seeds; ratios to least_requests" in text
    assert "0.40 not resolved" in text
    assert "20 and more" in text
    report = msgspec.json.decode(json.read_bytes())
    assert [scene["load"] for scene in report["scenes"]] == [10.0, 20.0]
    assert "| `hybrid` | 0.083 (0.1 / 0.1) |" in markdown.read_text()
    page = html.read_text()
    assert page.count("<figure>") == 3
    assert "http" not in page.replace("http://www.w3.org", "")
    _, text = compared((file,), "least_requests", "hybrid")
    assert "hybrid" in text
    assert "random  " not in text


def test_the_last_successful_run_of_a_setup_counts(tmp_path: Path) -> None:
    asked = setup("hybrid", 0)
    runs: list[tuple[Setup, ReplayRow | None]] = [
        (asked, row_of(asked, 1.0)), (asked, row_of(asked, 2.0)), (asked, None),
    ]  # fmt: skip
    [scene] = read_scenes([written(tmp_path / "a.jsonl", runs)])
    assert scene.rows["hybrid"][0].ttft_ms.mean == 2.0
    assert scene.failed == []


def test_wrong_input_is_reported(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", three_rules())
    other, empty, broken = (tmp_path / name for name in ("other", "empty", "broken"))
    other.write_text("hello\n")
    written(empty, [])
    broken.write_bytes(file.read_bytes().splitlines(keepends=True)[0] + b"{}\n")
    for results, base, said in (
        ((tmp_path / "none",), "hybrid", "cannot be read: No such file"),
        ((other,), "hybrid", "not a file of sweep results"),
        ((empty,), "hybrid", "holds no run yet"),
        ((broken,), "hybrid", "broken:2: not a result"),
        ((file,), "hybird", r"no result is of it \(did you mean hybrid\?\); there are least_requ"),
    ):
        with pytest.raises(SweepError, match=said):
            compared(results, base)


def test_short_file_names_are_unique() -> None:
    paths = [Path("a/W1.results.jsonl"), Path("b/W1.jsonl"), Path("b/x.yaml.results.jsonl")]
    assert short_names(paths) == ["a/W1.results.jsonl", "b/W1.jsonl", "x"]
