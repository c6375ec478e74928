"""Tests of a policy that is too slow for a router: the report says so, and the figures stay the
same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from policies.contract import FleetView, Floats, RequestView
from simulator.cli import main
from simulator.replay.result import WARNING
from simulator.report.row import summarize
from tests.simulator.replays import run, setup_of, steady

SAMPLE = Path(__file__).parents[3] / "simulator" / "data" / "conversation_sample.jsonl.gz"


def takes(seconds: float) -> Callable[[], float]:
    """Return a clock by which each call of a policy takes `seconds`."""
    ticks = count()
    return lambda: next(ticks) * seconds


def waits(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    """Return costs after 6 ms, like a policy that asks a distant service."""
    time.sleep(0.006)
    costs: Floats = fleet.requests.astype(float)
    return costs


def warnings(**more: Any) -> list[str]:
    result = run(steady(60, 20.0), setup=setup_of("least_requests"), **more)
    return [note for note in result.notes if note.startswith(WARNING)]


def test_the_warning_for_a_slow_policy_has_the_figure_and_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simulator.replay.run._THREAD_USE", None)
    assert warnings(call_clock=takes(0.0049)) == []
    (told,) = warnings(call_clock=takes(0.012))
    assert "least_requests is slower than a router bears: p99 of its calls 12.0 ms" in told
    assert "more than 5 ms each (policy_slow_ms) is a fault" in told


def test_the_figures_do_not_depend_on_the_policys_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.replay.run._THREAD_USE", None)
    quick, slow = (
        summarize(run(steady(60, 20.0), call_clock=takes(seconds))) for seconds in (0.0, 1.0)
    )
    assert quick.report_hash == slow.report_hash


def test_time_without_cpu_does_not_count_against_a_policy() -> None:
    assert warnings(call_clock=takes(1.0)) == [], "its thread had next to no CPU"


def test_the_command_prints_the_warning_for_a_slow_policy(capfd: Any) -> None:
    slow = f"{__name__}:waits"
    arguments = ["replay", str(SAMPLE), "--requests", "40", "--workers", "2"]
    assert main([*arguments, "--policy", slow, "--policy", "hybrid"]) == 0
    told = capfd.readouterr().out.replace("\n", " ")
    assert f"{WARNING}{slow} is slower than a router bears: p99 of its calls " in told
    assert told.count(WARNING) == 1
