"""Tests of sweep files: which runs they describe, and the messages on wrong ones, which say where
and what is allowed.
"""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.replay.setup import Setup
from simulator.runs.sheet import axis_paths, parse_sheet, parse_values, read_sheet, setups_of
from simulator.runs.task import SweepError
from tests.effort import examples

PROFILE = "qwen3-32b-h100-tp2"


def sheet(**parts: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "workload": {"source": "gen:none"},
        "fleet": {"profile": PROFILE, "count": 8},
    }
    return {**base, **parts}


def setups(**parts: Any) -> list[Setup]:
    return setups_of(parse_sheet(sheet(**parts)))


def refused(**parts: Any) -> str:
    with pytest.raises(SweepError) as caught:
        setups(**parts)
    return str(caught.value)


def test_a_grid_is_the_product_of_its_axes(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        dedent(f"""\
        workload: {{source: tuesday.jsonl, requests: 100}}
        fleet: {{profile: {PROFILE}, count: 2, kv_tokens: 100000}}
        world: {{event_lag_ms: 5}}
        grid:
          policies: [round_robin, {{hybrid: {{load_factor: [0.5, 1, 2], max_requests: [none]}}}}]
          workers: [4, 8]
          rate_per_s: {{linear: [10, 20], steps: 3}}
          world.event_loss: [0, 0.1]
          seeds: [3, 1]
        """)
    )
    found = read_sheet(file)
    assert len(found) == len(set(found)) == 4 * 2 * 3 * 2 * 2
    assert [s.seed for s in found[:4]] == [3, 1, 3, 1]
    assert {s.policy for s in found} == {
        "round_robin",
        *(f"hybrid?load_factor={x}&max_requests=none" for x in ("0.5", "1", "2")),
    }
    assert {s.workload.rate_per_s for s in found} == {10, 15, 20}
    assert {(s.world.event_loss, s.world.event_lag_ms) for s in found} == {(0, 5), (0.1, 5)}
    assert {(s.groups[0].count, s.groups[0].kv_tokens) for s in found} == {(4, 100000), (8, 100000)}


def test_every_axis_can_be_varied() -> None:
    values = {
        "workload.source": ["a", "b"],
        "workload.format": ["azure"],
        "profile": [PROFILE],
        "faults": ["f.yaml"],
        "closed_loop": [True],
        "fleet.role": ["both", "decode"],
        "fleet.cache_groups": ["window:128", "state*2"],
        "router.disaggregation": ["auto", "never"],
        "world.client_ids": ["agents", "key"],
    }
    paths = axis_paths()
    used = set()
    for name, place in paths.items():
        key = "profile" if name.endswith("profile") else name
        if name in ("world.events", "world.host_events", "world.replicas_share"):
            given: Any = [True, False]
        else:
            given = values.get(
                key, [{"world.event_loss": 0.5, "fleet.max_kv_fraction": 0.5}.get(name, 1)]
            )
        found = setups(grid={"policies": ["round_robin"], name: given})
        assert len(found) == len(given), name
        used.add(place)
    assert len(used) == len(set(paths.values()))


def test_a_fleet_may_have_several_groups() -> None:
    groups = [{"profile": PROFILE, "count": 2}, {"profile": "llama-3.1-8b-h100", "count": 3}]
    found = setups(fleet=groups, grid={"policies": ["round_robin"]})
    assert [group.count for group in found[0].groups] == [2, 3]
    assert "varies a fleet of one group" in refused(
        fleet=groups, grid={"policies": ["round_robin"], "workers": [1, 2]}
    )


def test_a_random_search_draws_from_ranges() -> None:
    search = {
        "policies": ["round_robin", {"hybrid": {"load_factor": {"log": [0.1, 10]}}}],
        "workers": {"int": [2, 5]},
        "samples": 40,
        "seed": 7,
        "seeds": [1, 2],
    }
    found = setups(random=search)
    assert found == setups(random=search)
    assert found != setups(random={**search, "seed": 8})
    workers = {s.groups[0].count for s in found}
    assert workers == {2, 3, 4, 5}
    specs = [s.policy for s in found]
    assert specs.count("round_robin") == len(workers) * 2  # drawn again: the same run
    drawn = [float(s.partition("=")[2]) for s in specs if s.startswith("hybrid")]
    assert len(drawn) == 20 * 2
    assert all(0.1 <= x <= 10 for x in drawn)
    assert 3 < sum(x < 1 for x in drawn) / 2 < 17  # each ratio as likely as any other


def test_a_policy_without_a_range_is_drawn_once() -> None:
    search = {
        "policies": ["round_robin", {"hybrid": {"load_factor": {"linear": [0, 4]}}}],
        "samples": 10,
    }
    specs = [s.policy for s in setups(random=search)]
    assert specs.count("round_robin") == 1
    assert len(specs) == 10


@settings(max_examples=examples(50))
@given(
    kind=st.sampled_from(["linear", "log", "int"]),
    low=st.integers(1, 1000),
    width=st.integers(1, 1000),
    steps=st.integers(2, 50),
)
def test_the_steps_of_a_range_rise_from_one_end_to_the_other(
    kind: str, low: int, width: int, steps: int
) -> None:
    found = parse_values("x", {kind: [low, low + width], "steps": steps}, grid=True).listed
    numbers = [float(value) for value in found if value is not None]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == low
    assert math.isclose(numbers[-1], low + width, rel_tol=1e-5)
    assert len(numbers) <= steps
    if kind == "int":
        assert all(isinstance(value, int) for value in found)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"grids": {}}, "the file: unknown 'grids' (did you mean grid?); valid: workload, fleet"),
        ({}, "give one of grid and random"),
        ({"grid": {}, "random": {}}, "give one of grid and random"),
        ({"grid": []}, "grid: must be a mapping"),
        ({"grid": {}}, "grid.policies: give a list of policies"),
        ({"grid": {"policies": "hybrid"}}, "grid.policies: give a list of policies"),
        ({"grid": {"policies": [3]}}, "grid.policies[0]: 3 is no policy"),
        ({"grid": {"policies": ["hybird"]}}, "no policy 'hybird' (did you mean hybrid?); valid: "),
        ({"grid": {"policies": [{"hybird": None}]}}, "no policy 'hybird' (did you mean hybrid?)"),
        ({"grid": {"policies": [{"hybrid": [1]}]}}, "is no policy; a policy is a name"),
        (
            {"grid": {"policies": [{"hybrid": {"factor": [1]}}]}},
            "policy hybrid has no parameter 'factor' (did you mean load_factor?); "
            "valid: load_factor (float, default 1.0)",
        ),
        (
            {"grid": {"policies": [{"hybrid": {"load_factor": [1, -2]}}]}},
            "policy hybrid: load_factor is -2.0; it must be finite, 0 or more",
        ),
        (
            {"grid": {"policies": [{"hybrid": {"load_factor": [[1]]}}]}},
            "grid.policies[0].hybrid.load_factor: [1] is no value; give a value",
        ),
        (
            {"grid": {"policies": [{"hybrid": {"load_factor": {"log": [0, 1], "steps": 2}}}]}},
            "grid.policies[0].hybrid.load_factor.log: [0, 1] is not [low, high] of two numbers "
            "above 0",
        ),
        ({"grid": {"policies": ["hybrid"], "workers": []}}, "grid.workers: the list is empty"),
        ({"grid": {"policies": ["hybrid"], "workers": [1, 1]}}, "grid.workers: a value is given"),
        ({"grid": {"policies": ["hybrid"], "worker": [1]}}, "unknown 'worker' (did you mean wor"),
        ({"grid": {"policies": ["hybrid"], "workers": ["two"]}}, "fleet.count: Expected `int`"),
        ({"grid": {"policies": ["hybrid"], "workers": [0]}}, "fleet: 0 workers in all; expected 1"),
        ({"grid": {"policies": ["hybrid"], "profile": ["gpu"]}}, "unknown profile 'gpu'; valid"),
        (
            {"grid": {"policies": ["hybrid"], "workers": [1], "fleet.count": [2]}},
            "grid.workers: sets what another axis sets",
        ),
        ({"grid": {"policies": ["hybrid"], "workers": {"log": [1, 2]}}}, "steps is None; give"),
        ({"grid": {"policies": ["hybrid"], "workers": {"exp": [1, 2]}}}, "unknown 'exp'"),
        (
            {"grid": {"policies": ["hybrid"], "rate_per_s": {"linear": [2, 1], "steps": 2}}},
            "grid.rate_per_s.linear: [2, 1] is not [low, high] of two numbers, low < high",
        ),
        ({"grid": {"policies": ["hybrid"], "seeds": [1, 1]}}, "grid.seeds: [1, 1] is not a list"),
        ({"grid": {"policies": ["hybrid"], "seeds": [True]}}, "grid.seeds: [True] is not a list"),
        (
            {"grid": {"policies": ["hybrid"], "kv_tokens": [10], "block_size": 16}},
            "fleet.kv_tokens: 10 holds no block of 16 tokens; give more",
        ),
        ({"grid": {"policies": ["hybrid"], "world.event_loss": [1]}}, "event_loss: 1.0; expected"),
        ({"grid": {"policies": ["hybrid"], "world.loss": [1]}}, "unknown 'world.loss' (did you"),
        (
            {"grid": {"policies": ["hybrid"], "rate_per_s": [5], "speed": [2]}},
            "workload: speed and rate_per_s: give one of them",
        ),
        (
            {
                "workload": {"source": "gen:none", "resample": True},
                "grid": {"policies": ["hybrid"]},
            },
            "workload: resample: is for files; gen:none makes other requests with every seed",
        ),
        (
            {
                "workload": {"source": "a.jsonl", "resample": "yes"},
                "grid": {"policies": ["hybrid"]},
            },
            "workload.resample: Expected `bool`, got `str`",
        ),
        (
            {"grid": {"policies": ["hybrid"], "seeds": list(range(1000)),
                      "workers": list(range(1, 999))}},
            "grid: 998,000 runs, the limit is 100,000",
        ),
        ({"random": {"policies": ["hybrid"]}}, "random.samples: None is not a whole number"),
        ({"random": {"policies": ["hybrid"], "samples": 0}}, "random.samples: 0 is not a whole"),
        ({"random": {"policies": ["hybrid"], "samples": 9, "seed": "x"}}, "random.seed: 'x' is"),
        (
            {"random": {"policies": ["hybrid"], "samples": 9,
                        "workers": {"int": [1, 2], "steps": 2}}},
            "random.workers: steps is for a grid",
        ),
        ({"world": {"lag": 1}, "grid": {"policies": ["hybrid"]}}, "world: unknown 'lag'"),
        ({"world": 3, "grid": {"policies": ["hybrid"]}}, "world: 3 is not a mapping of network_ms"),
        ({"fleet": [], "grid": {"policies": ["hybrid"]}}, "fleet: the list is empty"),
        (
            {"workload": {"source": 3}, "grid": {"policies": ["hybrid"]}},
            "workload.source: Expected `str`, got `int`",
        ),
        ({"workload": {}, "grid": {"policies": ["hybrid"]}}, "missing required field `source`"),
    ],
)  # fmt: skip
def test_the_error_for_a_wrong_file_names_place_and_problem(
    parts: dict[str, Any], message: str
) -> None:
    assert message in refused(**parts)


def test_all_errors_are_reported_at_once() -> None:
    told = refused(grid={"policies": ["hybird", "round"], "worker": [1], "seeds": []})
    assert [name in told for name in ("worker", "seeds")] == [True, True]
    told = refused(grid={"policies": ["hybird", "rund_robin"]})
    assert [name in told for name in ("hybird", "rund_robin")] == [True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file must be a mapping"),
        ("workload: {a: 1\n", "not YAML"),
        ("fleet: 1\nfleet: 2\n", ":2: fleet is given twice"),
        ("? [1]\n: 2\n", ":1: a key must be text"),
        ("a: &a [1, 2]\n" + "".join(f"{n}: [*a]\n" for n in range(3)), "unknown 'a'"),
        ("x: " + "[" * 5000, "nested too deeply"),
        ("- &a [*a]", "aliases counted|nested too deeply"),
        ("x: 2001-13-01", "not YAML: month must be in 1..12"),
    ],
)
def test_files_that_are_no_sweep_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(SweepError, match=message) as caught:
        read_sheet(file)
    assert all(line.startswith(str(file)) for line in caught.value.problems)


def test_aliases_are_counted_as_often_as_they_are_used(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    levels = [f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9)}]" for n in range(1, 9)]
    file.write_text("\n".join(["b0: &b0 [1]", *levels]))
    with pytest.raises(SweepError, match="more than 100000 values, aliases counted"):
        read_sheet(file)


def test_a_missing_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="cannot be read: No such file"):
        read_sheet(tmp_path / "none")
    (tmp_path / "huge").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(SweepError, match="larger than"):
        read_sheet(tmp_path / "huge")
