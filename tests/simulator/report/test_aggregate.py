"""Tests of sums over seeds, against intervals computed by hand, and of the JSON report as
a file.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.report.figures import (
    FIGURES,
    RESOLVED,
    Aggregate,
    Interval,
    Ratio,
    aggregate,
    figure,
    interval,
    labels,
    marks,
    mean_text,
    more_seeds,
    paired,
    points_text,
    ratio_of_pairs,
    ratio_text,
    seeds_needed,
    student_t,
)
from simulator.report.files import Report, encode, write_json
from simulator.report.row import ReplayRow, SessionsRow, StageRow, TurnsRow, Waits, summarize
from tests.effort import examples
from tests.simulator.replayed import busy_result, rejected, result, setup


def row_of(policy: str, seed: int, ttft_ms: float, **params: float) -> ReplayRow:
    """Return the row of a replay of one request with this time to first token."""
    rows = [{"first": ttft_ms, "finish": ttft_ms + 400}]
    return summarize(result(rows, policy=policy, params=params, setup=setup(policy, seed)))


def test_mean_and_interval_agree_with_a_computation_by_hand() -> None:
    told = interval([10.0, 12.0, 14.0])
    assert told is not None
    half = 4.302653 * 2.0 / math.sqrt(3)  # deviation 2, two degrees of freedom
    assert told.mean == 12.0
    assert told.low == pytest.approx(12 - half, abs=1e-6)
    assert told.high == pytest.approx(12 + half, abs=1e-6)
    assert told.half == pytest.approx(half, abs=1e-6)
    assert told.excludes_zero()
    alone = interval([3.0])
    assert alone is not None
    assert (alone.low, alone.high, alone.half) == (None, None, None)
    assert not alone.excludes_zero()
    assert interval([]) is None


@pytest.mark.parametrize("freedom", [1, 2, 5, 30, 31, 60, 500])
def test_t_values_leave_five_percent_outside_the_interval(freedom: int) -> None:
    """The t-values of confidence intervals leave five percent outside. The test integrates the
    density of Student's t by Simpson's rule, over the angle whose tangent is t / sqrt n.
    """
    end = math.atan(student_t(freedom) / math.sqrt(freedom))
    steps = 2_000
    width = end / steps
    heights = [math.cos(n * width) ** (freedom - 1) for n in range(steps + 1)]
    area = heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    inside = 2 * scale / math.sqrt(math.pi) * area * width / 3
    assert inside == pytest.approx(0.95, abs=1e-6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8))
@settings(max_examples=examples(100))
def test_an_interval_contains_its_mean_and_does_not_depend_on_order(sample: list[float]) -> None:
    told = interval(sample)
    assert told is not None
    assert told.low is not None
    assert told.high is not None
    assert told.low <= told.mean <= told.high
    assert told == interval(sample[::-1])


def test_differences_are_taken_within_each_seed() -> None:
    slow = [row_of("round_robin", seed, 100.0 + 50 * seed) for seed in range(3)]
    # Always 10 ms faster, whatever the seed: far less than the seeds differ.
    quick = [row_of("hybrid", seed, 90.0 + 50 * seed) for seed in (2, 1, 0)]
    first, second = aggregate([*slow, *quick])
    assert (first.label, first.versus, first.differences) == ("round_robin", None, {})
    assert (second.label, second.versus, second.seeds) == ("hybrid", "round_robin", (2, 1, 0))
    told = second.differences["ttft_ms.mean"]
    assert told is not None
    assert (told.mean, told.low, told.high, told.seeds) == (-10.0, -10.0, -10.0, 3)
    spread = first.figures["ttft_ms.mean"]
    assert spread is not None
    assert spread.half is not None
    assert spread.half > 100
    assert set(second.figures) == {one.name for one in FIGURES}


def test_only_common_seeds_are_compared_and_nulls_are_ignored() -> None:
    ours = [row_of("hybrid", seed, 50.0) for seed in (0, 1)]
    theirs = [row_of("kv_load", seed, 70.0) for seed in (1, 2)]
    ttft = figure("ttft_ms.mean")
    told = paired(ttft, ours, theirs)
    assert told is not None
    assert (told.mean, told.seeds) == (-20.0, 1)
    assert paired(ttft, ours[:1], theirs) is None
    nothing = summarize(result([rejected()], setup=setup("kv_load", 1), policy="kv_load"))
    assert paired(ttft, ours, [nothing]) is None
    summed = aggregate([*ours, nothing])
    assert summed[1].figures["ttft_ms.mean"] is None
    assert aggregate([]) == ()


def test_policies_of_one_name_are_labelled_by_their_parameters() -> None:
    rows = [
        row_of("hybrid", 0, 1.0, load_factor=0.5, depth=4),
        row_of("hybrid", 0, 1.0, load_factor=2.0, depth=4),
        row_of("kv_load", 0, 1.0, depth=4),
    ]
    assert labels(rows) == ["hybrid?load_factor=0.5", "hybrid?load_factor=2", "kv_load"]
    assert len(aggregate(rows)) == 3
    with pytest.raises(ValueError, match="kv_load has two rows of seed 0"):
        aggregate([rows[2], rows[2]])


def test_an_unknown_figure_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"ttft_ms\.p90"):
        figure("ttft")


def test_the_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    rows = [summarize(busy_result(policy, seed)) for policy in ("a", "b") for seed in (0, 1)]
    rows.append(summarize(result([], policy="c")))  # nulls wherever there can be
    file = tmp_path / "report.json"
    write_json(file, rows, {"setup": setup()})
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert report.results == tuple(rows)
    assert report.policies == aggregate(rows)
    assert report.about["setup"]["policy"] == "hybrid"
    first = msgspec.json.decode(file.read_bytes())
    assert list(first) == ["format", "version", "about", "results", "policies"]
    assert list(first["results"][0]) == list(ReplayRow.__struct_fields__)
    assert encode(rows, {"setup": setup()}) == file.read_bytes()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (b'"version": 1', b'"version": 2', r"version"),
        (b'"hit_rate_mean"', b'"hit_rate"', r"results"),
        (b'"seed": 0', b'"seed": "0"', r"results\[0\]\.seed"),
        (b"{", b"", r"Expected `object`"),
    ],
)
def test_the_error_for_another_file_names_the_field(before: bytes, after: bytes, told: str) -> None:
    text = encode([summarize(result())], {}).replace(before, after, 1)
    with pytest.raises(msgspec.DecodeError, match=told):
        msgspec.json.decode(text, type=Report)


def test_equal_runs_differ_only_in_wall_time() -> None:
    one, other = busy_result(), replace(busy_result(), wall_s=9.0)
    rows = [
        msgspec.structs.replace(summarize(r), wall_s=0, requests_per_wall_s=0) for r in (one, other)
    ]
    assert rows[0] == rows[1]


def test_every_field_of_the_json_report_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "reports.md").read_text()
    section = text.partition("\n## JSON")[2].partition("\n## ")[0]
    for kind in (Report, ReplayRow, StageRow, TurnsRow, Waits, SessionsRow, Aggregate):
        missing = [name for name in kind.__struct_fields__ if f"`{name}`" not in section]
        assert missing == [n for n in missing if f'"{n}"' in section]


def interval_of(values: list[float]) -> Interval:
    found = interval(values)
    assert found is not None
    return found


def test_the_stated_number_of_seeds_resolves_and_one_fewer_does_not() -> None:
    """The stated number of seeds is enough to tell two results apart, and one seed fewer is not,
    for samples of the same spread.
    """
    for count in (2, 5, 40):
        sample = [0.05 * (-1) ** n for n in range(count)]
        more = more_seeds(interval_of(sample))
        assert more
        deviation = statistics.stdev(sample)

        def width(seeds: int, deviation: float = deviation) -> float:
            return 2 * student_t(seeds - 1) * deviation / math.sqrt(seeds)

        assert width(count + more) <= RESOLVED < width(count + more - 1)


def test_a_narrow_interval_is_resolved_and_one_seed_gives_no_number() -> None:
    assert more_seeds(None) is None
    assert more_seeds(interval_of([0.3])) is None
    assert more_seeds(interval_of([0.3, 0.3])) == 0
    assert more_seeds(Ratio(0.2, 0.2 * 0.986, 0.2 / 0.986, 9)) == 0
    assert more_seeds(Ratio(5.0, 5 * 0.984, 5 / 0.984, 9)), "the width is a share of the ratio"
    widest = ratio_of_pairs([(1.0, 1e300), (1e300, 1.0)])
    assert more_seeds(widest), "no overflow"


def test_noise_is_marked_and_a_meaningless_interval_is_not_printed() -> None:
    pairs = [(1.0, 1.1), (1.2, 1.1)]
    assert ratio_text(ratio_of_pairs([(100.0, 100.1)] * 3)) == "1.00 [1.00, 1.00]"
    assert ratio_text(ratio_of_pairs([*pairs, (1.0, 1.0)])) == "1.00 [0.80, 1.25] ~"
    assert ratio_text(ratio_of_pairs(pairs)) == "1.00 not resolved"
    clear = ratio_of_pairs([(10.0, 1.0), (30.0, 1.0), (8.0, 1.0)])
    assert ratio_text(clear).startswith("13.39 [2.3"), "however wide, it leaves out 1"
    assert ratio_text(None) == points_text(None) == "–"
    assert points_text(interval_of([0.1])) == "+10.0"
    assert points_text(interval_of([-0.022, -0.02])) == "-2.1 [-3.4, -0.8]"
    assert points_text(interval_of([0.01, -0.01, 0.0])) == "+0.0 [-2.5, +2.5] ~"
    assert points_text(interval_of([0.1, -0.1])) == "+0.0 not resolved"
    assert mean_text(figure("ttft_ms.mean"), interval_of([200.0, 210.0])) == "205 ±63.5"
    assert mean_text(figure("ttft_ms.mean"), interval_of([100.0, 300.0])) == "200 ±?"
    assert mean_text(figure("hit_rate_tokens"), interval_of([0.5, 0.52, 0.54])) == "52.0% ±5.0%"
    assert mean_text(figure("hit_rate_tokens"), interval_of([0.4, 0.6])) == "50.0% ±?"


def test_marks_are_explained_if_they_occur() -> None:
    assert marks(["1.00 [0.99, 0.99]", "5 ±1"], "more") == ""
    assert marks(["1.00 [0.80, 1.25] ~"], "more").startswith("~ within noise: ")
    said = marks(["1.00 not resolved", "200 ±?", "210 ±?"], "--resamples N")
    assert said.startswith("not resolved, ±?: too few seeds; ")
    assert said.endswith("narrow it: --resamples N.")


def test_the_number_of_needed_seeds_is_reported() -> None:
    narrow, wide = ratio_of_pairs([(100.0, 100.1)] * 3), ratio_of_pairs([(1.0, 1.1), (1.2, 1.1)])
    assert seeds_needed({"a TTFT": narrow, "b TTFT": None}) == ""
    said = seeds_needed({"a TTFT": narrow, "b TTFT": wide})
    assert re.search(r"to 3 %: about b TTFT [\d,]+\.$", said)


def test_ratios_of_times_are_paired_by_seed() -> None:
    rows = [row_of("a", seed, 10.0 * seed) for seed in (1, 2, 3)]
    rows += [row_of("b", seed, 20.0 * seed) for seed in (3, 1, 2)]
    first, second = aggregate(rows)
    assert first.ratios == {}
    found = second.ratios["ttft_ms.mean"]
    assert found is not None
    assert (found.mean, found.seeds) == (2.0, 3)
    assert found.high == pytest.approx(found.low), "the seeds' own level cancels"
    assert "goodput.share" not in second.ratios
