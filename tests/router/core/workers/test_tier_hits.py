"""Tests of blocks in memory below the GPU, which policies see as additional hit tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.contract import FleetView, Floats, RequestView
from policies.facts import Finish, FirstToken, ReplayEnd
from policies.pricing import HOST_SPEED
from router.core.contract.actions import Dispatch
from router.core.placement.choice import Choice
from router.core.sessions.speed import LoadEstimator
from router.core.workers.columns import WorkerColumns
from router.core.workers.ledger import Charge, Loads, PrefillPeriod
from tests.effort import examples
from tests.policies.fleet import fleet_of
from tests.router.core.core_world import BLOCK, World, chain_of, removed, stored

CHAIN = [1, 2, 3, 4, 5, 6]
SEEN: list[FleetView] = []  # what the policy was shown last


def equal_costs(request: RequestView, fleet: FleetView, state: object) -> Floats:
    """Return equal costs for all workers, and keep the data that the policy was given."""
    SEEN[:] = [fleet]
    return np.zeros(len(fleet))


POLICY = "tests.router.core.workers.test_tier_hits:equal_costs"


def shown(world: World, **fields: object) -> list[tuple[int, int, int]]:
    """Return each worker's hit tokens in (GPU, host, disk) for the whole chain."""
    world.core.explain(world.arrival(CHAIN, **fields))
    (fleet,) = SEEN
    columns = (fleet.hit_tokens, fleet.hit_tokens_host, fleet.hit_tokens_disk)
    return [tuple(map(int, row)) for row in zip(*columns, strict=True)]


def in_tier(event, tier: str):
    return replace(event, tier=tier)


def test_host_hits_follow_gpu_hits_and_disk_hits_follow_host_hits() -> None:
    world = World(workers=2, policy=POLICY)
    world.events(0, 0, stored(CHAIN[:2]), in_tier(stored(CHAIN[:4]), "host"))
    world.events(0, 1, in_tier(stored(CHAIN[:5], after=4), "disk"))
    assert shown(world, prompt_tokens=100) == [(2 * BLOCK, 2 * BLOCK, BLOCK), (0, 0, 0)]
    world.events(0, 2, replace(removed(CHAIN[:3]), tier="host"))
    assert shown(world, prompt_tokens=100) == [(2 * BLOCK, 0, 0), (0, 0, 0)]


def test_a_block_in_host_memory_fills_a_hole_in_the_gpu_chain() -> None:
    world = World(workers=1, policy=POLICY)
    world.events(0, 0, stored(CHAIN), in_tier(stored(CHAIN), "host"))
    world.events(0, 1, removed(CHAIN[:2]))
    assert shown(world, prompt_tokens=100) == [(BLOCK, 5 * BLOCK, 0)]


def test_tier_hits_leave_one_token_to_compute() -> None:
    world = World(workers=1, policy=POLICY)
    world.events(0, 0, stored(CHAIN[:2]), in_tier(stored(CHAIN), "disk"))
    assert shown(world) == [(2 * BLOCK, 0, 4 * BLOCK - 1)]


def test_blocks_of_a_running_dispatch_count_as_gpu_hits() -> None:
    world = World(workers=1, policy=POLICY)
    world.events(0, 0, in_tier(stored(CHAIN[:4]), "host"))
    (action,) = world.core.on_arrival(world.arrival(CHAIN[:3]))
    assert isinstance(action, Dispatch)
    assert shown(world, prompt_tokens=100) == [(3 * BLOCK, BLOCK, 0)]


@settings(max_examples=examples(100), deadline=None)
@given(
    held=st.lists(st.lists(st.sampled_from([0, 1, 2]), max_size=6), min_size=3, max_size=3),
    prompt_tokens=st.integers(1, 40),
)
def test_hits_are_right_for_every_distribution_of_blocks_over_tiers(
    held: list[list[int]], prompt_tokens: int
) -> None:
    """Hits are right for every distribution of a chain's blocks over tiers; `held[w][i]` is the
    only tier in which worker w holds block i.
    """
    world = World(workers=3, policy=POLICY)
    for worker_id, tiers in enumerate(held):
        events = [
            in_tier(stored(CHAIN[: i + 1], after=i), ("gpu", "host", "disk")[tier])
            for i, tier in enumerate(tiers)
        ]
        world.events(worker_id, 0, *events)
    expected = []
    for tiers in held:
        reach = []
        for most in range(3):
            blocks = next((i for i, tier in enumerate(tiers) if tier > most), len(tiers))
            reach.append(min(blocks * BLOCK, prompt_tokens - 1))
        expected.append((reach[0], reach[1] - reach[0], reach[2] - reach[1]))
    assert shown(world, prompt_tokens=prompt_tokens) == expected


@pytest.mark.parametrize("size", [BLOCK, 2 * BLOCK])
def test_tier_hits_use_the_block_size_of_each_worker(size: int) -> None:
    world = World(workers=1, policy=POLICY)
    world.join(1, block_size=size)
    world.events(0, 0, in_tier(stored(CHAIN), "host"))
    chains = {BLOCK: chain_of(CHAIN), size: chain_of(CHAIN)}
    rows = shown(world, prompt_tokens=100, chains=chains)
    assert rows == [(0, 6 * BLOCK, 0), (0, 0, 0)]


# --- what loading them costs -----------------------------------------------------------------

RATE = 20_000.0  # prefill tokens a second


def test_a_host_hit_saves_the_compute_time_minus_the_load_time() -> None:
    """A hit in host memory saves computing minus loading: 1,000 tokens take 50 ms to compute and 10
    ms to load, so they save as much as 800 tokens on the GPU.
    """
    fleet = fleet_of(
        hit_tokens=[0, 0, 200, 0],
        hit_tokens_host=[1_000, 1_000, 800, 1_000],
        host_tokens_per_s=[100_000.0, RATE / 2, 100_000.0, np.nan],
        prefill_tokens_per_s=RATE,
    )
    assert fleet.spared_tokens.tolist() == [800, 0, 200 + 640, 1_000 - 1_000 / HOST_SPEED]
    assert fleet.hit_tokens.tolist() == [0, 0, 200, 0]


def test_the_saved_prefill_includes_attention() -> None:
    """The saved prefill time includes attention: at 1e-4 of a token's work for each pair of tokens,
    the first 1,000 tokens take the time of 1,050.
    """
    fleet = fleet_of(
        hit_tokens=0,
        hit_tokens_host=1_000,
        host_tokens_per_s=100_000.0,
        prefill_tokens_per_s=RATE,
        pair_tokens=1e-4,
    )
    assert fleet.spared_tokens.tolist() == [int(1_000 * (1 - 10 / 52.5))]


def test_disk_hits_save_compute_time_minus_their_own_load_time() -> None:
    fleet = fleet_of(
        hit_tokens=100,
        hit_tokens_host=400,
        hit_tokens_disk=500,
        host_tokens_per_s=80_000.0,
        disk_tokens_per_s=40_000.0,
        prefill_tokens_per_s=RATE,
    )
    assert fleet.spared_tokens.tolist() == [100 + 300 + 250]


@settings(max_examples=examples(100))
@given(
    gpu=st.integers(0, 2_000),
    host=st.integers(0, 2_000),
    disk=st.integers(0, 2_000),
    rates=st.tuples(*[st.floats(1.0, 1e9) | st.just(np.nan)] * 2),
)
def test_saved_tokens_never_exceed_the_hit_tokens(gpu, host, disk, rates) -> None:
    fleet = fleet_of(
        hit_tokens=gpu,
        hit_tokens_host=host,
        hit_tokens_disk=disk,
        host_tokens_per_s=rates[0],
        disk_tokens_per_s=rates[1],
    )
    (spared,) = fleet.spared_tokens.tolist()
    assert gpu <= spared <= gpu + host + disk


def test_host_memory_adds_to_the_kept_tokens_of_its_worker() -> None:
    fleet = fleet_of(
        kv_capacity_tokens=[90_000.0, 90_000.0, np.nan],
        host_cached_tokens=[300_000.0, 0.0, 300_000.0],
        host_tokens_per_s=100_000.0,
        prefill_tokens_per_s=RATE,
    )
    kept = fleet.kept_tokens(1_000).tolist()
    full = 90_000.0 + 0.8 * 300_000.0
    assert kept == [full, 90_000.0, full]  # an unknown one is taken to be as the others are


def test_a_charge_counts_only_tokens_that_must_be_computed() -> None:
    """A request's charge counts only what must be computed: the queue of a worker that loads most
    of a prompt is short, and the decision says why.
    """
    world = World(workers=1, policy=POLICY)
    world.events(0, 0, stored(CHAIN[:1]), in_tier(stored(CHAIN[:4]), "host"))
    (action,) = world.core.on_arrival(world.arrival(CHAIN, prompt_tokens=6 * BLOCK))
    assert isinstance(action, Dispatch)
    assert (action.decision.hit_tokens, action.decision.loaded_tokens) == (BLOCK, 3 * BLOCK)
    charge = world.core.ledger.get(action.request_id)
    assert charge is not None
    assert (charge.uncached_tokens, charge.loads) == (2 * BLOCK, Loads(3 * BLOCK, 0))


def test_a_session_cached_in_host_memory_is_warm() -> None:
    world = World(workers=2, policy="warmset")
    for worker_id in range(2):  # they have published nothing yet
        world.core.on_replay_end(ReplayEnd(0.0, worker_id, True))
    world.core.on_arrival(world.arrival(CHAIN[:4], request_id=1, session="s"))
    first = world.core.ledger.get(1)
    assert first is not None
    home = first.worker_id
    world.events(home, 0, stored(CHAIN[:4]))
    world.core.on_first_token(FirstToken(1.0, 1))
    world.core.on_finish(Finish(2.0, 1, 4 * BLOCK, 0, 1))
    gone = [removed(CHAIN[:depth]) for depth in (4, 3, 2, 1)]
    world.events(home, 1, in_tier(stored(CHAIN[:4]), "host"), *gone)
    choice = world.core.explain(world.arrival(CHAIN, session="s"))
    assert isinstance(choice, Choice)
    assert choice.worker.worker_id == home
    assert choice.decision.details is not None
    assert choice.decision.details.request["standing"] == "warm"
    world.events(home, 2, *[in_tier(one, "host") for one in gone])
    choice = world.core.explain(world.arrival(CHAIN, session="s"))
    assert isinstance(choice, Choice)
    assert choice.decision.details is not None
    assert choice.decision.details.request["standing"] == "cold"


# --- how fast it is --------------------------------------------------------------------------


def loaded(columns: WorkerColumns, host: int, disk: int, uncached: int) -> Charge:
    prompt = host + disk + uncached
    period = PrefillPeriod(0.0, 1, 1, uncached, float(uncached))
    work = float(uncached)
    charge = Charge(1, 0, 0, prompt, uncached, work, work, 0.0, True, period)
    charge.loads = Loads(host, disk)
    return charge


def learner(rate: float = RATE) -> tuple[WorkerColumns, LoadEstimator]:
    columns = WorkerColumns(1)
    columns.prefill_tokens_per_s[0] = rate
    columns.requests[0] = 2
    return columns, LoadEstimator(columns)


@pytest.mark.parametrize("true_rate", [RATE / 2, 100_000.0, 3_000_000.0])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_load_rates_are_learned_from_first_tokens(true_rate: float, tier: str) -> None:
    columns, estimator = learner()
    rng = np.random.default_rng(3)
    for tokens in rng.integers(2_000, 30_000, 40).tolist():
        host, disk = (tokens, 0) if tier == "host" else (0, tokens)
        took_s = 500 / RATE + columns.step_s[0] + tokens / true_rate
        estimator.first_token(loaded(columns, host, disk, 500), took_s)
    learned = getattr(columns, f"{tier}_tokens_per_s")[0]
    assert learned == pytest.approx(true_rate, rel=0.1)
    other = "disk" if tier == "host" else "host"
    assert np.isnan(getattr(columns, f"{other}_tokens_per_s")[0])


def test_requests_with_little_load_time_do_not_change_load_rates() -> None:
    """Requests that say little about loading times are not used: short loads, prompts that are
    mostly computed, loads from both tiers at once, and prefills next to others.
    """
    columns, estimator = learner()
    beside = loaded(columns, 5_000, 0, 500)
    beside.period.dispatched = 2
    for charge in (
        loaded(columns, 500, 0, 100),
        loaded(columns, 4_000, 0, 5_000),
        loaded(columns, 3_000, 3_000, 100),
        beside,
    ):
        estimator.first_token(charge, 1.0)
    assert np.isnan(columns.host_tokens_per_s[0])
    assert np.isnan(columns.disk_tokens_per_s[0])


@settings(max_examples=examples(50))
@given(times_s=st.lists(st.floats(0.0, 1e6), max_size=3))
def test_a_few_absurd_times_hardly_change_the_load_rate(times_s: list[float]) -> None:
    columns, estimator = learner()
    for took_s in [0.08] * 8 + times_s:
        estimator.first_token(loaded(columns, 5_000, 0, 500), took_s)
    usual = 5_000 / (0.08 - 500 / RATE - columns.step_s[0])
    assert usual / 2 <= columns.host_tokens_per_s[0] <= usual * 2
