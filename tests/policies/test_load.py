"""Tests of policies by specification: names, parameters, users' own policies, and the refusals with
their text.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies import POLICIES
from policies import load as naming
from policies.contract import FleetView, Floats, RequestView
from policies.load import PolicyError, load, names
from tests.policies.fleet import fleet_of, request_of

HERE = __name__


def newest(request: RequestView, fleet: FleetView, state: Any) -> Floats:
    return -fleet.worker_id.astype(np.float64)


def scaled(
    request: RequestView,
    fleet: FleetView,
    state: Any,
    *,
    factor: float = 2.0,
    times: int = 1,
    upside_down: bool = False,
    label: str = "none",
    limit: int | None = 4,
) -> Floats:
    return np.full(len(fleet), factor * times * (-1 if upside_down else 1))


@dataclass(frozen=True)
class Undefaulted:
    size: int

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return np.zeros(len(fleet))


def returns_list(request, fleet, state):
    return [0.0] * len(fleet)


def returns_ints(request, fleet, state):
    return np.zeros(len(fleet), dtype=np.int64)


def returns_too_many(request, fleet, state):
    return np.zeros(len(fleet) + 1)


@dataclass(frozen=True)
class Unmakeable:
    """A policy that needs a device which this machine lacks."""

    def __post_init__(self) -> None:
        raise OSError("no such device")

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        return np.zeros(len(fleet))


def two_arguments(request, fleet):
    return np.zeros(len(fleet))


def test_parameters_are_coerced_by_their_type():
    policy = load("hybrid?load_factor=2&max_requests=8&max_kv_fraction=None&temperature=0.25")
    assert policy.temperature == 0.25
    assert policy.params == {
        "load_factor": 2.0,
        "max_requests": 8.0,
        "max_queued_tokens": None,
        "max_kv_fraction": None,
    }
    assert load(f"{HERE}:scaled?factor=3&times=2&upside_down=TRUE&limit=none").params == {
        "factor": 3.0,
        "times": 2,
        "upside_down": True,
        "label": "none",
        "limit": None,
    }


def test_the_specification_loads_the_same_policy_again():
    for spec in ("random", "hybrid?max_requests=3", f"{HERE}:scaled?label=a%26b%3Dc%20%25"):
        policy = load(spec)
        again = load(policy.spec)
        assert (again.name, again.params, again.spec) == (policy.name, policy.params, policy.spec)
    assert load(f"{HERE}:scaled?label=a%26b%3Dc%20%25").params["label"] == "a&b=c %"


def test_a_plain_function_is_a_policy():
    assert load(f"{HERE}:newest").costs(
        request_of(), fleet_of(worker_id=[1, 4]), None
    ).tolist() == [-1.0, -4.0]
    assert load(f"{HERE}:scaled?factor=1.5&times=2").costs(
        request_of(), fleet_of(), None
    ).tolist() == [3.0]


def test_a_policy_with_memory_gets_its_facts():
    policy = load("tests.policies.counting:Counting?step=2")
    state = policy.initial_state()
    for fact in ("a", "b"):
        state = policy.observe(fact, state)
    assert policy.costs(request_of(), fleet_of(), state).tolist() == [4.0]


def test_a_policy_without_memory_has_no_state():
    policy = load("random")
    assert policy.initial_state() is None
    assert policy.observe("fact", None) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hybird", r"did you mean hybrid\?.*round_robin, random"),
        ("", "no policy ''"),
        (
            "hybrid?loadfactor=1",
            r"'loadfactor' \(did you mean load_factor\?\); valid: load_factor \(float, def",
        ),
        ("random?x=1", r"valid: temperature \(float, default 0.0\)"),
        ("hybrid?load_factor=much", "load_factor: could not convert.*valid"),
        ("hybrid?load_factor=none", "load_factor"),
        ("hybrid?load_factor=-1", "load_factor is -1.0"),
        ("hybrid?max_kv_fraction=7", "max_kv_fraction is 7.0"),
        ("hybrid?load_factor=1&load_factor=2", "given twice"),
        ("hybrid?load_factor", "key=value"),
        ("hybrid?temperature=-1", "temperature is -1.0"),
        ("hybrid?temperature=nan", "temperature is nan"),
        ("hybrid?temperature=inf", "temperature is inf"),
        (f"{HERE}:scaled?upside_down=perhaps", "neither true nor false"),
        (f"{HERE}:scaled?times=1.5", "times"),
        (f"{HERE}:nothing_here", "cannot import"),
        ("no_such_module_anywhere:x", "cannot import"),
        ("no_such_package.module:x", "No module named 'no_such_package'; .* PYTHONPATH"),
        ("my_pkg.my_module", "`:attr` is missing; .* my_pkg.my_module:MyPolicy"),
        ("my_pkg.my_module?temperature=1", "`:attr` is missing"),
        (":x", "cannot import"),
        (f"{HERE}:HERE", "is a str"),
        (f"{HERE}:two_arguments", "must be a class"),
        ("os.path:join", "must be a class"),
        (f"{HERE}:Undefaulted", "size needs a default"),
        (f"{HERE}:Unmakeable", "cannot be made, it raised OSError: no such device"),
        ("thresholds", r"it is a wrapper, which stands behind a policy and a \|"),
    ],
)
def test_errors_suggest_a_valid_specification(spec, message):
    with pytest.raises(PolicyError, match=message):
        load(spec)


@pytest.mark.parametrize("source", ["raise OSError('no device')", "raise SystemExit(4)"])
def test_a_module_that_cannot_be_imported_raises_a_policy_error(source, tmp_path, monkeypatch):
    (tmp_path / "ends_at_once.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PolicyError, match=r"cannot import ends_at_once:x: it raised (OSE|SystemE)"):
        load("ends_at_once:x")


@pytest.mark.parametrize(
    ("attr", "message"),
    [
        ("returns_list", "list; return a float64"),
        ("returns_ints", "int64; return a float64"),
        ("returns_too_many", r"shape \(3,\) for 2 workers"),
    ],
)
def test_the_error_for_wrong_costs_names_the_policy(attr, message):
    with pytest.raises(PolicyError, match=f"{attr} (returned )?{message}"):
        load(f"{HERE}:{attr}").costs(request_of(), fleet_of(worker_id=[0, 1]), None)


def test_installed_entry_points_are_policy_names(monkeypatch):
    entry = EntryPoint("newest_first", f"{HERE}:newest", "warmroute.policies")
    shadow = EntryPoint("random", f"{HERE}:newest", "warmroute.policies")
    monkeypatch.setattr(naming, "entry_points", lambda group: [entry, shadow])
    assert names() == [*POLICIES, "newest_first"]
    assert load("newest_first").spec == "newest_first?temperature=0.0"
    assert load("random").costs(request_of(), fleet_of(worker_id=[7]), None).tolist() == [0.0]
    with pytest.raises(PolicyError, match="newest_first"):
        load("newest")


def test_a_module_of_the_current_folder_is_found_after_installed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy_of_a_folder.py").write_text(
        "def own(request, fleet, state):\n    return fleet.requests + 0.0\n"
    )
    assert load("policy_of_a_folder:own").name == "policy_of_a_folder:own"
    assert sys.path[-1] == str(tmp_path)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "mine.py").write_text("raise SystemExit\n")
    with pytest.raises(PolicyError, match=r"policies was not asked, for policies is an installed"):
        load("policies.mine:Mine")
    (tmp_path / "numpy.py").write_text("raise SystemExit\n")
    with pytest.raises(PolicyError, match=r"numpy\.py was not asked, for numpy is an installed"):
        load("numpy:Mine")
