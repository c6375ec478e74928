"""Tests of a policy that fails: its replay ends with an error that names it, and no other policy
produces figures in its place.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from router.core.placement.guard import PolicyFaultError
from simulator.cli import main
from tests.simulator.replays import pool, run, setup_of, steady

SAMPLE = Path(__file__).parents[3] / "simulator" / "data" / "conversation_sample.jsonl.gz"
HERE = "tests.live.bad_policies"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("raises", "raised"), ("exits", "raised"), ("Forgetful", "raised")),
        *(("nan", "nan"), ("too_long", "shape")),
    ],
)
def test_the_error_of_a_failing_policy_names_the_policy(name: str, kind: str) -> None:
    policy = f"{HERE}:{name}"
    with pytest.raises(PolicyFaultError, match=f"policy {policy} failed") as caught:
        run(steady(10, 20.0), setup=setup_of(policy, pool(2)))
    assert (caught.value.policy, caught.value.kind) == (policy, kind)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.policy, again.kind, str(again)) == (policy, kind, str(caught.value))


def test_a_policy_that_sleeps_is_not_slow_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    result = run(steady(10, 20.0), setup=setup_of(f"{HERE}:sleeps", pool(2)))
    assert len(slept) >= 10
    assert result.policy == f"{HERE}:sleeps"


def test_the_command_prints_where_the_policy_failed(capfd: Any) -> None:
    arguments = ["replay", str(SAMPLE), "--workers", "2", "--policy", f"{HERE}:raises"]
    assert main(arguments) == 1
    told = capfd.readouterr().err
    says = f"warmroute-sim: policy {HERE}:raises failed: KeyError: 'no such column'\n"
    assert told.endswith(says)
    assert "in raises\n" in told
