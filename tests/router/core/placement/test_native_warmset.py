"""Tests of the default policy's native costs: they equal those in Python bit for bit, for
any pool.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields
from typing import get_args

import numpy as np
import pytest

from kvkernels import WarmsetCosts, chain_hashes
from policies.contract import FleetView, Floats, RequestView, Standing
from policies.facts import Arrival, WorkerChange, WorkerFacts
from policies.load import load
from policies.warmset import Warmset
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore
from router.core.placement.native_warmset import NativeWarmset, native_costs
from tests.effort import EFFORT
from tests.router.core.random_world import RandomWorld

PARAMETERS = "warmset?gate=0.5&stay=3&running=0.3"


class ComparedWarmset(NativeWarmset):
    """Returns the native costs, after comparing them with those of the Python policy. Lifetime:
    test.
    """

    def __init__(self, policy: Warmset, core: RouterCore, rng: random.Random) -> None:
        super().__init__(policy)
        self.core, self.rng = core, rng
        self.seen: Counter[str] = Counter()

    def costs(self, request: RequestView, fleet: FleetView) -> Floats | None:
        for one_request in (request, *(self.another(request, fleet) for _ in range(4))):
            native = super().costs(one_request, fleet)
            assert native is not None
            with np.errstate(all="ignore"):
                wanted = self._policy.costs(one_request, fleet, None)
            assert np.array_equal(native, wanted, equal_nan=True), (one_request, native, wanted)
            self.seen[one_request.standing] += 1
            self.seen["shut"] += int(np.isinf(native).sum())
            self.seen["open"] += int(np.isfinite(native).sum())
        return super().costs(request, fleet)

    def another(self, request: RequestView, fleet: FleetView) -> RequestView:
        """Return the request as if it belonged to another session or had waited longer."""
        rng = self.rng
        changes = {
            "standing": rng.choice(get_args(Standing)),
            "held_s": rng.choice((0.0, 4.9, 5.1, rng.uniform(5.0, 20.0), 21.0, 200.0)),
            "may_wait_s": rng.choice((0.0, 1.0, 1.0, 1.0)),
            "return_chance": rng.choice((0.0, rng.random(), 1.0)),
            "home_id": rng.choice((-1, *fleet.worker_id.tolist())),
            "trunk_tokens": rng.choice((0, request.trunk_tokens, request.prompt_tokens)),
        }
        own = {field.name: getattr(request, field.name) for field in fields(RequestView)}
        return RequestView(**own | changes)


def disturb(core: RouterCore, rng: random.Random, log_speed: float = 9.0) -> None:
    """Set random speeds, capacities and loads at some workers, within what is possible for a
    worker.
    """
    columns, sets = core.columns, core.session_tracking.sessions
    assert sets is not None
    slot = rng.randrange(core.settings.max_workers)
    nan = float("nan")
    columns.prefill_tokens_per_s[slot] = rng.lognormvariate(log_speed, 1.5)
    columns.step_s[slot] = rng.lognormvariate(-4, 1)
    columns.kv_capacity_tokens[slot] = rng.choice((nan, rng.lognormvariate(7, 2)))
    columns.cached_tokens[slot] = rng.choice((nan, rng.lognormvariate(7, 2)))
    columns.kv_reported_tokens[slot] = rng.choice((nan, rng.lognormvariate(8, 2)))
    columns.token_work[slot] = 1.0 + rng.random()
    sets.sets.private_tokens[slot] = rng.choice((0.0, rng.lognormvariate(8, 2)))
    sets.sets.cold_work[slot] = rng.lognormvariate(11, 2)
    sets.unowned.wanted_tokens[slot] = rng.choice((0.0, rng.lognormvariate(5, 2)))
    columns.attention.pair_tokens = rng.choice((0.0, 1e-4))
    if rng.random() < 0.3:
        sets.cycle.returned(rng.lognormvariate(-1, 2))
        sets.cycle.answered(rng.randrange(1, 500))


def compare_in_each_decision(core: RouterCore, rng: random.Random) -> ComparedWarmset:
    """Make the core compare both implementations in each decision from now on; return the
    comparison.
    """
    policy = core.guard.policy.policy
    assert type(policy) is Warmset
    both = ComparedWarmset(policy, core, rng)
    core.guard._native = both
    return both


@pytest.mark.parametrize("seed", range(12 * EFFORT))
@pytest.mark.parametrize("policy", ["warmset", PARAMETERS])
def test_native_and_python_costs_are_equal_in_a_random_world(policy: str, seed: int) -> None:
    world = RandomWorld(policy, seed)
    both = compare_in_each_decision(world.core, world.rng)
    for _ in range(250):
        disturb(world.core, world.rng, 9.0 if seed % 2 else 5.0)
        world.step()
    counted = ("new", "cold", "warm", "shut", "open")
    assert all(both.seen[kind] > 20 for kind in counted), both.seen


@pytest.mark.parametrize("workers", [1, 7, 8, 9, 127, 128, 129, 300])
def test_native_and_python_sums_over_many_workers_round_equally(workers: int) -> None:
    rng = random.Random(workers)
    core = RouterCore(load("warmset"), CoreSettings(max_workers=workers))
    both = compare_in_each_decision(core, rng)
    for worker_id in range(workers):
        facts = WorkerFacts(f"w{worker_id}", ("m",), 16, kv_capacity_tokens=20_000.0)
        core.on_worker(WorkerChange(0.0, worker_id, "ready", facts))
    for number in range(30):
        for _ in range(1 + workers // 4):
            disturb(core, rng)
        tokens = np.arange(number % 5, 500 + number, dtype=np.int32)
        chains = {16: chain_hashes(tokens, 16)}
        core.on_arrival(
            Arrival(1.0 + number, number, "m", len(tokens), chains, session=f"{number}")
        )
    assert both.seen["open"] > 20


def test_the_router_uses_native_costs_for_plain_warmset_only() -> None:
    for policy, is_native in (
        ("warmset", True),
        (PARAMETERS, True),
        ("warmset|bounded_load", False),
        ("hybrid", False),
    ):
        assert (native_costs(load(policy)) is not None) == is_native, policy


def test_native_costs_use_the_new_sessions_after_a_policy_change() -> None:
    world = RandomWorld("warmset", 5)
    both = compare_in_each_decision(world.core, world.rng)
    for _ in range(80):
        world.step()
    world.core.set_policy(load("hybrid"))
    world.core.set_policy(load("warmset"))
    again = compare_in_each_decision(world.core, world.rng)
    again._costs, again._of = both._costs, both._of  # made over the sessions before
    for _ in range(80):
        world.step()
    assert again.seen["open"] > 20


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slots": np.array([3])}, "slots must lie within"),
        ({"slots": np.array([-1])}, "slots must lie within"),
        ({"slots": np.array([], dtype=np.int64)}, "1 or more"),
        ({"hit_tokens": np.array([1, 2])}, "same length"),
        ({"holds_trunk": np.zeros(2, dtype=np.bool_)}, "as long as the columns"),
        ({"holds_trunk": np.zeros(3)}, "must be a buffer of bool"),
        ({"standing": 3}, "standing is 0, 1 or 2"),
    ],
)
def test_the_error_names_the_wrong_argument(wrong: dict[str, object], message: str) -> None:
    core = RouterCore(load("warmset"), CoreSettings(max_workers=3))
    sessions = core.session_tracking.sessions
    assert sessions is not None
    own = {
        "private_tokens": sessions.sets.private_tokens,
        "trunk_tokens": sessions.sets.trunk_tokens,
        "cold_work": sessions.sets.cold_work,
        "unowned_tokens": sessions.unowned.wanted_tokens,
    }
    costs = WarmsetCosts(dict(core.columns.named()) | own, 1.0, 4.0, 0.1)
    right = {
        "slots": np.array([0]),
        "hit_tokens": np.array([0]),
        **dict.fromkeys(("prompt_tokens", "trunk_tokens", "standing", "home_id"), 0),
        **dict.fromkeys(("return_chance", "held_s", "own_tokens", "own_work"), 0.0),
        **dict.fromkeys(("own_slot", "hot_trunk_tokens", "wanted_copies"), 0),
        **dict.fromkeys(("turnover_per_s", "cycle_s", "pair_tokens", "now_s"), 0.0),
        "foreign_load_max_age_s": 0.0,
        "holds_trunk": np.zeros(3, dtype=np.bool_),
        "own_trunk_alone": False,
    }
    assert costs.costs(**right).shape == (1,)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match=message):
        costs.costs(**right | wrong)  # type: ignore[arg-type]


def test_columns_of_different_lengths_are_rejected() -> None:
    core = RouterCore(load("warmset"), CoreSettings(max_workers=3))
    columns = dict(core.columns.named())
    with pytest.raises(KeyError):
        WarmsetCosts(columns, 1.0, 4.0, 0.1)
    columns["step_s"] = np.zeros(2)
    with pytest.raises(ValueError, match="step_s must be as long as the others"):
        WarmsetCosts(columns, 1.0, 4.0, 0.1)
