"""Tests of pools with prefill and decode workers: the time of a disaggregated request, shared
links, leases, and faults during prefill, transfer and decode.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.profiles import profile
from simulator.replay.result import ReplayResult, Verdict
from simulator.replay.setup import ReplayError, RouterSettings, Setup, WorkerGroup, World
from simulator.report.row import summarize
from tests.effort import examples
from tests.simulator.replays import PROFILE, job, pool, run, setup_of, steady

MS = 1_000_000
ALWAYS = RouterSettings(disaggregation="always")
MODEL = profile(PROFILE)
NETWORK_MS, SETUP_MS, GBPS = 0.5, 1.0, 200.0


def split_pool(p: int = 2, d: int = 2, **more: Any) -> tuple[WorkerGroup, ...]:
    return (pool(p, role="prefill", **more), pool(d, role="decode", **more))


def split_setup(p: int = 2, d: int = 2, **more: Any) -> Setup:
    more.setdefault("router", ALWAYS)
    return setup_of("least_requests", *split_pool(p, d), **more)


def note(result: ReplayResult) -> str:
    return next(line for line in result.notes if line.startswith("prefilled for another"))


def moved_ms(tokens: int, gbps: float = GBPS) -> float:
    return SETUP_MS + tokens * MODEL.kv_bytes_per_token * 8 / (gbps * 1e9) * 1e3


def test_the_time_of_a_split_request_is_both_legs_the_transfer_and_a_step() -> None:
    prompt, output = 6400, 20
    result = run([job(0, prompt, output)], split_setup())
    step_time = MODEL.step_time
    ttft_ms = (
        4 * NETWORK_MS
        + 1e3 * step_time.prefill_s(prompt)
        + moved_ms(prompt - 1)
        + 1e3 * step_time.prefill_s(1, prompt - 1)
    )
    table = result.table
    assert table.first_token_ns[0] / MS == pytest.approx(ttft_ms, rel=1e-6)
    assert table.worker[0] in (2, 3)
    assert table.attempts[0] == 2
    rest_s = sum(step_time.decode_step_s(1, prompt + n) for n in range(1, output))
    took_s = (table.finish_ns[0] - table.first_token_ns[0]) / 1e9
    assert took_s == pytest.approx(rest_s, rel=1e-6)
    assert "1 of 1 requests; KV moved: 1 times" in note(result)


def test_transfers_to_one_worker_share_its_link() -> None:
    """Two prompts move from two workers to one, and each transfer takes twice as long while both
    move.
    """
    prompt, gbps = 6400, 10.0
    world = World(link_gbps=gbps)
    one = run([job(0, prompt, 5)], split_setup(2, 1, world=world))
    two = run([job(0, prompt, 5, trunk=n) for n in (1, 2)], split_setup(2, 1, world=world))
    alone_ms = one.table.first_token_ns[0] / MS
    together_ms = two.table.first_token_ns / MS
    transfer_ms = moved_ms(prompt - 1, gbps) - SETUP_MS
    for ttft_ms in together_ms:
        assert ttft_ms - alone_ms == pytest.approx(transfer_ms, rel=0.02)
    apart = run([job(0, prompt, 5, trunk=n) for n in (1, 2)], split_setup(2, 2, world=world))
    assert (apart.table.first_token_ns / MS) == pytest.approx([alone_ms] * 2, rel=1e-3)


def test_only_kv_that_the_decode_worker_lacks_is_moved() -> None:
    jobs = [job(0, 6400, 5, trunk=1, own=1), job(3000, 6400, 5, trunk=1, own=2)]
    result = run(jobs, split_setup(1, 1))
    moved = (6399 + 3199) * MODEL.kv_bytes_per_token
    assert f"{moved / 1e9:.1f} GB" in note(result)
    assert result.table.hit_tokens[1] == 3200  # hits at the prefill worker


def test_short_prompts_are_prefilled_at_their_decode_worker() -> None:
    jobs = [job(n * 40.0, 64 if n % 2 else 8000, 10, own=n) for n in range(60)]
    setup = split_setup(router=RouterSettings(disaggregation="auto"))
    table = run(jobs, setup).table
    split, short = table.attempts == 2, table.prompt_tokens == 64
    assert 3 * np.count_nonzero(split[short]) < np.count_nonzero(split[~short])
    assert (run([job(0, 64, 10)], setup).table.attempts == 1).all()
    never = run(jobs, msgspec.structs.replace(setup, router=RouterSettings(disaggregation="never")))
    assert (never.table.attempts == 1).all()
    assert "0 of 60 requests" in note(never)


def test_workers_without_roles_split_no_request() -> None:
    jobs = steady(50, 20.0)
    plain = run(jobs, setup_of("least_requests"))
    assert not any(line.startswith("prefilled") for line in plain.notes)
    assert (plain.table.attempts == 1).all()


def test_equal_set_ups_give_equal_results() -> None:
    jobs = [job(n * 15.0, 500 + 37 * n, 20, trunk=n % 5, own=n) for n in range(80)]
    setup = split_setup(router=RouterSettings(disaggregation="auto"), world=World(replicas=2))
    first, second = (summarize(run(jobs, setup)) for _ in range(2))
    assert first.report_hash == second.report_hash


@pytest.mark.parametrize("group", ["prefill", "decode"])
def test_a_role_without_workers_is_taken_by_workers_of_the_other_role(
    group: str, tmp_path: Path
) -> None:
    gone = (0, 1) if group == "prefill" else (2, 3)
    path = tmp_path / "faults.yaml"
    path.write_text(yaml.safe_dump([{"at_s": 0.3, "worker": one, "do": "die"} for one in gone]))
    jobs = steady(100, 30.0)
    table = run(jobs, split_setup(faults=str(path))).table
    late = table.arrival_ns > 2_000 * MS  # the router has noticed by then
    assert (table.verdict[late] == Verdict.COMPLETED).all()
    assert not np.isin(table.worker[late], gone).any()


# Faults of two workers of each role; at least one of each role stays alive.
LEGS = {
    "P in its leg": (0, 5.0),  # a prefill of 6,400 tokens takes 170 ms and more
    "P in the transfer": (0, 250.0),
    "D before its first byte": (2, 250.0),
}


def killed(which: str, number: int, tmp_path: Path) -> ReplayResult:
    """Replay disaggregated requests while a worker dies during the part of a request that `which`
    names.
    """
    worker, at_ms = LEGS[which]
    path = tmp_path / "faults.yaml"
    path.write_text(
        yaml.safe_dump([{"at_s": (at_ms + number % 60) / 1e3, "worker": worker, "do": "die"}])
    )
    jobs = [job(n, 6400, 5, own=1000 * number + n) for n in range(2)]
    # The transfer of a prompt takes 300 ms, so that it is running when the worker dies.
    world = World(link_gbps=22.0)
    return run(jobs, split_setup(faults=str(path), world=world, seed=number))


@pytest.mark.parametrize("which", LEGS)
def test_a_leg_whose_worker_dies_is_repeated(which: str, tmp_path: Path) -> None:
    retried = recomputed = 0
    for number in range(examples(1000)):
        result = killed(which, number, tmp_path)
        assert (result.table.verdict == Verdict.COMPLETED).all(), (which, number)
        retried += result.retries
        recomputed += "computed again: 0" not in note(result)
    assert retried + recomputed > examples(1000) / 2, "hardly anything was hit"


def test_kv_that_no_worker_fetches_is_freed_when_its_lease_ends(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    # The reader of the first request dies, and the request is prefilled again elsewhere.
    timeline = [{"at_s": 0.29, "worker": 0, "do": "drain"}, {"at_s": 0.3, "worker": 2, "do": "die"}]
    path.write_text(yaml.safe_dump(timeline))
    jobs = [job(n, 6400, 5, trunk=n) for n in range(2)] + [job(9_000, 64, 5, own=9)]
    world = World(link_gbps=22.0, kv_lease_ms=3_000.0)
    result = run(jobs, split_setup(faults=str(path), world=world))
    assert (result.table.verdict == Verdict.COMPLETED).all()
    assert "leases that ended unread: 1" in note(result)


faults = st.lists(
    st.tuples(
        st.sampled_from(["die", "restart", "hang", "slow", "clear", "drain"]),
        st.integers(0, 4),
        st.floats(0.0, 3.0),
    ),
    max_size=6,
)


@settings(max_examples=examples(100), deadline=None)
@given(
    faults,
    st.sampled_from(["auto", "always"]),
    st.sampled_from([1.0, 20.0, 200.0]),
    st.integers(0, 1000),
    st.sampled_from([20_000, 396_000]),
)
def test_no_request_or_block_is_lost_under_random_faults(
    tmp_path_factory: pytest.TempPathFactory,
    timeline: list[tuple[str, int, float]],
    mode: str,
    gbps: float,
    seed: int,
    kv_tokens: int,
) -> None:
    """Every request ends once, and nothing stays charged or held, whatever happens to workers; the
    replay checks that itself.
    """
    path = tmp_path_factory.mktemp("faults") / "faults.yaml"
    items = []
    for do, worker, at_s in timeline:
        item: dict[str, Any] = {"at_s": at_s, "worker": worker, "do": do}
        item |= {"hang": {"for_s": 0.7}, "slow": {"factor": 3.0}}.get(do, {})
        items.append(item)
    path.write_text(yaml.safe_dump(items))
    jobs = [job(n * 25.0, 200 + 300 * (n % 17), 1 + n % 30, n % 5, n) for n in range(90)]
    groups = (*split_pool(2, 2, kv_tokens=kv_tokens), pool(1, kv_tokens=kv_tokens))
    setup = setup_of(
        "hybrid", *groups, faults=str(path), seed=seed,
        world=World(link_gbps=gbps, kv_lease_ms=800.0),
        router=RouterSettings(disaggregation=mode),  # type: ignore[arg-type]
    )  # fmt: skip
    result = run(jobs, setup)
    assert len(result.table) == 90
    if not timeline:
        assert (result.table.verdict == Verdict.COMPLETED).all()


@pytest.mark.parametrize(
    ("groups", "world", "told"),
    [
        ((pool(2, role="prefill"),), World(), "nobody decodes"),
        (split_pool(), World(link_gbps=0.0), "link_gbps"),
        (split_pool(), World(link_gbps=math.inf), "link_gbps"),
        (split_pool(), World(link_setup_ms=-1.0), "link_setup_ms"),
        (split_pool(), World(kv_lease_ms=-1.0), "kv_lease_ms"),
    ],
)
def test_impossible_setups_are_refused(
    groups: tuple[WorkerGroup, ...], world: World, told: str
) -> None:
    with pytest.raises(ReplayError, match=told):
        run([job(0, 64, 1)], setup_of("least_requests", *groups, world=world))
