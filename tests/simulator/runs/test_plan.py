"""Tests of plans of pool sizes: the smallest pool is found, a lucky seed is recognised, and the
reasons are stated.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from simulator.replay.setup import Setup
from simulator.report.row import ReplayRow
from simulator.runs.plan import (
    FleetPlan,
    Found,
    PlanRequest,
    Targets,
    as_json,
    check_limits,
    check_request,
    ladder_of,
    plan,
    plan_lines,
    plan_table,
    search,
    verdict,
)
from simulator.runs.runs import RunOptions, RunResults
from simulator.runs.task import RunOutcome, SweepError, Task
from tests.simulator import synthetic

POLICIES = ("round_robin", "hybrid", "least_requests")


def found(will_do: Callable[[int], bool], start: int, low: int, high: int) -> tuple[Found, int]:
    """Run a search whose tries are answered by `will_do`; return its result and the number of
    tries.
    """
    asking = search(start, low, high)
    asked = 0
    try:
        number = next(asking)
        while True:
            asked += 1
            assert low <= number <= high
            number = asking.send(will_do(number))
    except StopIteration as stop:
        result: Found = stop.value
        return result, asked


@given(
    low=st.integers(-200, 10),
    width=st.integers(0, 400),
    start=st.integers(-300, 300),
    border=st.integers(-250, 300),
)
def test_a_sharp_border_is_found_in_few_trials(
    low: int, width: int, start: int, border: int
) -> None:
    high = low + width
    result, asked = found(lambda number: number >= border, start, low, high)
    assert result.at == (max(border, low) if border <= high else None)
    assert asked == len(result.outcomes)
    distance = abs(min(max(start, low), high) - (result.at if result.at is not None else high))
    assert asked <= 2 * (distance + 1).bit_length() + 4
    assert result.lucky == []


@given(start=st.integers(1, 64), chances=st.integers(), border=st.integers(5, 40))
def test_a_noisy_border_gives_a_number_that_its_neighbours_confirm(
    start: int, chances: int, border: int
) -> None:
    random = Random(chances)
    luck = {n: random.random() < 0.5 for n in range(border - 3, border + 4)}
    will_do = lambda n: luck.get(n, n >= border)  # noqa: E731 - a name for the oracle
    result, _ = found(will_do, start, 1, 64)
    assert result.at is not None
    assert will_do(result.at)
    assert will_do(result.at + 1)
    assert not will_do(result.at - 1)
    for good, bad in result.lucky:
        assert will_do(good)
        assert not will_do(bad)
        assert good < bad


def test_a_lucky_success_below_the_border_is_skipped_and_reported() -> None:
    result, _ = found(lambda n: n == 5 or n >= 9, 5, 1, 64)
    assert result.at == 9
    assert (5, 6) in result.lucky
    result, _ = found(lambda n: n == 7 or n >= 9, 12, 1, 64)
    assert result.at == 9
    assert result.lucky == [(7, 8)]


def request(targets: Targets | None = None, **fields: object) -> PlanRequest:
    given = {
        "base": synthetic.setup(workers=2, rate=40.0),
        "policies": POLICIES,
        "targets": targets or Targets(ttft_p90_ms=500.0),
        **fields,
    }
    return PlanRequest(**given)  # type: ignore[arg-type]


@contextmanager
def running(
    evaluate: Callable[[Setup], ReplayRow], results: Path | None = None
) -> Iterator[RunResults]:
    with RunResults(RunOptions(results, 1), Console(file=io.StringIO()), evaluate) as runs:
        yield runs


def planned(asked: PlanRequest, results: Path | None = None) -> FleetPlan:
    with running(synthetic.evaluate, results) as runs:
        return plan(asked, runs)


def smallest(policy: str, asked: PlanRequest) -> int:
    """Return the smallest number of workers that is enough, by trying one number after
    the other.
    """
    for workers in range(1, 65):
        setups = [
            synthetic.setup(policy, seed, workers, asked.base.workload.rate_per_s or 0.0)
            for seed in asked.seeds
        ]
        pairs = [(setup, synthetic.evaluate(setup)) for setup in setups]
        if all(limit.met for limit in check_limits(asked.targets, pairs, asked.rule)):
            return workers
    raise AssertionError


@pytest.mark.parametrize(
    "targets",
    [
        Targets(ttft_p90_ms=500.0),
        Targets(ttft_p99_ms=3000.0),
        Targets(tpot_mean_ms=30.0),
        Targets(goodput_share=0.99, tpot_p90_ms=60.0),
    ],
)
def test_the_smallest_fleet_equals_that_of_an_exhaustive_search(targets: Targets) -> None:
    asked = request(targets)
    answer = planned(asked)
    assert [row.answer for row in answer.rows] == [smallest(p, asked) for p in POLICIES]
    assert answer.best == "hybrid"
    best = answer.rows[1]
    assert best.answer is not None
    assert best.gpus == 2 * best.answer


def test_the_reasons_have_number_limit_and_seed() -> None:
    answer = planned(request())
    row = answer.rows[0]
    assert row.answer is not None
    fewer = f"{row.answer - 1:g} workers miss TTFT p90: "
    assert row.notes[0].startswith(fewer)
    assert row.notes[0].endswith("> 500 ms (seed 1)") or "(seed" in row.notes[0]
    assert verdict(answer).startswith("Take hybrid on ")
    assert "round_robin" in verdict(answer)
    console = Console(file=io.StringIO(), width=100)
    console.print(plan_table(answer), *plan_lines(answer))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Targets: TTFT p90 ≤ 500 ms, lost ≤ 0.0%" in text
    assert fewer in " ".join(text.split())


def test_the_highest_rate_is_found_within_five_percent() -> None:
    asked = request(find="rate", base=synthetic.setup(workers=8, rate=1.0))
    answer = planned(asked)
    for row, policy in zip(answer.rows, POLICIES, strict=True):
        assert row.answer is not None
        good = [t.value for t in row.trials if t.met]
        bad = [t.value for t in row.trials if not t.met]
        assert row.answer == max(good)
        assert min(bad) / row.answer < 1.06
        # 100 / (1 - busy) * 1.5 <= 500, up to five percent of noise and five of the ladder.
        limit = 8 * synthetic.RATE_PER_WORKER * synthetic.FACTORS[policy] * 0.7
        assert 0.85 * limit < row.answer < 1.02 * limit
    assert answer.best == "hybrid"
    assert verdict(answer).startswith("hybrid takes ")


def test_tied_policies_are_all_named() -> None:
    twin = "hybrid?load_factor=2"
    asked = request(policies=("round_robin", "hybrid", twin))
    answer = planned(asked)
    assert [tie.policy for tie in answer.ties] == [twin]
    workers = f"{answer.rows[1].answer:g} workers"
    assert answer.ties[0].told.startswith(f"with {workers}, TTFT p90: ")
    assert answer.ties[0].told.endswith(", +0.0 ± 0.0 points of the limit")
    told = verdict(answer)
    assert told.startswith(f"Take hybrid or {twin}, which are equal within noise, on {workers} (")
    assert told.count(twin) == 1, "not among the others, too"
    assert f"[bold]{twin}[/] beside hybrid with {workers}" in "\n".join(plan_lines(answer))
    rate = planned(request(policies=("hybrid", twin), find="rate"))
    assert verdict(rate).startswith(f"hybrid and {twin}, which are equal within noise, take ")


def test_an_equal_answer_with_less_headroom_is_marked() -> None:
    base = synthetic.setup(workers=2, rate=2.0)
    answer = planned(request(base=base, policies=("round_robin", "hybrid")))
    assert [row.answer for row in answer.rows] == [1, 1]
    assert (answer.best, answer.ties) == ("hybrid", ())
    used = [f"{row.used:.1%}" for row in answer.rows]
    assert verdict(answer) == (
        "Take hybrid on 1 worker (2 GPUs); the others need: round_robin 1 worker with less room "
        f"({used[0]} of a limit used, not {used[1]})."
    )


TIMES = st.lists(st.floats(300.0, 700.0), min_size=3, max_size=3)


class FixedTimes:
    """Gives runs with known TTFTs, for two policies and by seed."""

    def __init__(self, mine: list[float], theirs: list[float]) -> None:
        self._ms = {"hybrid": mine, "least_requests": theirs}

    def outcomes(self, setups: Sequence[Setup]) -> list[RunOutcome]:
        return [RunOutcome(Task("", setup), self._row(setup)) for setup in setups]

    def _row(self, setup: Setup) -> ReplayRow:
        row = synthetic.evaluate(setup)
        times = msgspec.structs.replace(row.ttft_ms, mean=self._ms[setup.policy][setup.seed - 1])
        return msgspec.structs.replace(row, ttft_ms=times)


def tied(mine: list[float], theirs: list[float]) -> bool:
    targets = Targets(ttft_mean_ms=1000.0)
    asked = request(targets, policies=("hybrid", "least_requests"), most_workers=1)
    return bool(plan(asked, FixedTimes(mine, theirs)).ties)  # type: ignore[arg-type]


@given(mine=TIMES, theirs=TIMES)
def test_ties_are_symmetric_and_follow_the_spread_of_the_seeds(
    mine: list[float], theirs: list[float]
) -> None:
    found = tied(mine, theirs)
    assert found == tied(theirs, mine)
    assert tied(mine, mine)
    parts = [(b - a) / 1000 for a, b in zip(mine, theirs, strict=True)]
    mean = sum(parts) / 3
    half = 4.302653 * (sum((one - mean) ** 2 for one in parts) / 2 / 3) ** 0.5
    if abs(mean) < 0.0499 or half * 0.999 > abs(mean) < 0.2499:
        assert found
    if abs(mean) > 0.2501 or (abs(mean) > 0.0501 and half * 1.001 < abs(mean)):
        assert not found


def test_the_interval_is_a_stricter_rule_than_the_mean() -> None:
    pairs = [
        (synthetic.setup(seed=seed), synthetic.evaluate(synthetic.setup(seed=seed)))
        for seed in range(4)
    ]
    means = [row.ttft_ms.p90 or 0.0 for _, row in pairs]
    (by_all, _), (by_interval, _) = (
        check_limits(Targets(ttft_p90_ms=1.0), pairs, rule) for rule in ("all", "interval")
    )
    assert by_all.value == max(means)
    assert by_interval.value is not None
    assert by_interval.value > sum(means) / 4
    assert not by_interval.met
    (goodput, _) = check_limits(Targets(goodput_share=0.5), pairs, "interval")
    assert goodput.met
    assert goodput.reason == f"goodput: {goodput.value:.1%} ≥ 50.0%"


def test_a_narrow_miss_is_shown_with_enough_digits() -> None:
    setup = synthetic.setup()
    row = synthetic.evaluate(setup)
    times = msgspec.structs.replace(row.ttft_ms, p90=2000.4)
    row = msgspec.structs.replace(row, ttft_ms=times, rejected=1, requests=3000)
    late, lost = check_limits(Targets(ttft_p90_ms=2000.0), [(setup, row)], "all")
    assert late.reason == "TTFT p90: 2000.4 ms > 2000 ms"
    assert lost.reason == "lost: 0.00033333333 > 0"


def test_targets_that_no_fleet_keeps_are_reported() -> None:
    answer = planned(request(Targets(ttft_mean_ms=1.0), most_workers=8))
    assert [row.answer for row in answer.rows] == [None] * 3
    assert answer.best is None
    assert answer.rows[0].notes[0].startswith("even 8 workers miss TTFT mean: ")
    assert verdict(answer) == "No policy keeps the targets with anything that was tried."
    console = Console(file=io.StringIO(), width=100)
    console.print(plan_table(answer), *plan_lines(answer))


def test_the_number_of_runs_is_bounded_and_errors_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = planned(request(most_runs=20))
    assert answer.runs <= 20
    assert "stopped after 18 runs, the limit" in answer.rows[0].notes[0]
    monkeypatch.setenv("SWEEP_MARKS", str(tmp_path))
    with running(synthetic.raises) as runs:
        answer = plan(request(), runs)
    assert answer.rows[0].answer is None
    assert "2 workers: ValueError: a prompt of 9,000 tokens" in answer.rows[0].notes[0]


def test_a_plan_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("SWEEP_MARKS", str(marks))
    results = tmp_path / "results.jsonl"
    first = planned(request(), results)
    with running(synthetic.counted, results) as runs:
        assert plan(request(), runs) == first
    assert list(marks.iterdir()) == []
    assert msgspec.json.decode(as_json(first))["best"] == "hybrid"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": Targets()}, "no target: nothing but lost requests is limited; give one of"),
        ({"targets": Targets(ttft_p90_ms=0.0)}, "ttft_p90_ms: 0; expected milliseconds above 0"),
        ({"targets": Targets(goodput_share=95.0)}, "goodput_share: 95; expected a share from 0"),
        ({"policies": ()}, "policies: give one or more"),
        ({"policies": ("hybird",)}, "no policy 'hybird' (did you mean hybrid?)"),
        ({"seeds": ()}, "seeds: give one or more"),
        ({"seeds": (1,), "rule": "interval"}, "an interval takes two or more"),
        ({"most_workers": 0}, "most_workers: 0; expected 1 or more"),
        ({"base": synthetic.setup(rate=-1.0)}, "rate_per_s -1: expected a number above 0"),
    ],
)
def test_invalid_plan_requests_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SweepError) as caught:
        check_request(request(**fields))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_fleet_of_groups_has_a_rate_but_no_size() -> None:
    base = synthetic.setup(workers=2)
    base = msgspec.structs.replace(base, groups=base.groups * 2)
    with pytest.raises(SweepError, match="a fleet of one group"):
        check_request(request(base=base))
    check_request(request(base=base, find="rate"))
    assert ladder_of(request(base=base, find="rate")).named(0) == "1 requests/s"
