"""Tests of policies with wrappers wherever the simulator names policies: sweep files,
labels, help.
"""

from __future__ import annotations

import pytest

from simulator.cli.setups import known
from simulator.report.figures import labels
from simulator.report.row import summarize
from simulator.runs.sheet import check_policies, parse_policies
from simulator.runs.task import SweepError
from tests.simulator.replays import run, setup_of, steady


def specs(*given: object) -> list[str]:
    axes = parse_policies("grid.policies", list(given), grid=True)
    return [spec for axis in axes for spec in axis.specs()]


def test_a_sweep_varies_parameters_of_the_policy_and_of_its_wrappers() -> None:
    params = {"load_factor": [0, 1], "bounded_load.epsilon": [0.1, 1]}
    found = specs("lmetric|bounded_load", {"hybrid|thresholds|bounded_load": params})
    assert found == [
        "lmetric|bounded_load",
        *(
            f"hybrid?load_factor={factor}|thresholds|bounded_load?epsilon={epsilon}"
            for factor in ("0", "1")
            for epsilon in ("0.1", "1")
        ),
    ]
    check_policies(found)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hybrid|bounded_lode": {}}, "no wrapper 'bounded_lode'.*did you mean bounded_load"),
        ({"hybrid|bounded_load": {"thresholds.spread": [1]}}, "thresholds is no wrapper of"),
        ({"hybrid": {"bounded_load.epsilon": [1]}}, "no wrapper of hybrid; wrappers: none"),
        ({"hybrid|bounded_load?epsilon=1": {}}, "is no policy"),
    ],
)
def test_a_sweep_refuses_an_invalid_wrapper(given: object, says: str) -> None:
    with pytest.raises(SweepError, match=says):
        specs(given)


def test_a_label_is_a_specification() -> None:
    wanted = [
        "hybrid",
        "hybrid?load_factor=0|bounded_load?epsilon=0.5",
        "hybrid?load_factor=1|bounded_load?epsilon=1",
        "kv_prefix|bounded_load",
    ]
    rows = [summarize(run(steady(4, 20), setup_of(policy))) for policy in wanted]
    assert labels(rows) == wanted


def test_help_lists_the_wrappers() -> None:
    assert "wrappers: thresholds, bounded_load, late_binding, progressive" in known()
