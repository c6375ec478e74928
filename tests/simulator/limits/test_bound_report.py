"""Tests of the report on policies and bounds: replayed decisions, sessions fixed to workers,
losses, tables.
"""

from __future__ import annotations

import io
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from policies.load import PolicyError, load
from simulator.limits.hits import hits
from simulator.limits.losses import NAMES, WorkerTask, new_worker, serve, warm
from simulator.limits.partition import groups, partition, placed_spec
from simulator.limits.report import BoundError, BoundReport, bound, gap_percent, regret_percent
from simulator.limits.show import bound_tables, hits_table
from simulator.limits.work import Known, know, machine
from simulator.replay.setup import Setup, WorkerGroup, World
from simulator.traces.chain import Chainer
from simulator.traces.job import Job
from tests.effort import examples
from tests.oracles.virtual_worker import plain_workers
from tests.simulator.replays import BLOCK, job, pool, run, setup_of, stream_of

ASIDE = World(report_lag_ms=200.0, event_lag_ms=20.0)


def burst(count: int, seed: int = 0, every_ms: float = 5.0) -> list[Job]:
    """Return prompts with three shared prefixes that arrive faster than two workers can
    serve them.
    """
    random = Random(seed)
    jobs = []
    for n in range(count):
        prompt, output = random.randrange(200, 3000), random.randrange(1, 60)
        jobs.append(job(every_ms * n, prompt, output, random.randrange(3), n))
    return jobs


def known_of(jobs: list[Job]) -> Known:
    return know(jobs, Chainer(BLOCK, BLOCK).chain, BLOCK, 100_000)


def report_of(jobs: list[Job], setup: Setup, policies: list[str], **more: Any) -> BoundReport:
    return bound(setup, policies, open_stream=lambda: stream_of(jobs), **more)


# --- Decisions replayed -------------------------------------------------------------------------


@settings(max_examples=examples(15), deadline=None)
@given(
    seed=st.integers(0, 1000),
    policy=st.sampled_from(["round_robin", "kv_load", "hybrid"]),
    kv_tokens=st.sampled_from([4000, None]),
)
def test_serving_the_replays_placements_without_a_router_gives_its_times(
    seed: int, policy: str, kv_tokens: int | None
) -> None:
    jobs = burst(40, seed)
    setup = setup_of(policy, pool(2, kv_tokens=kv_tokens), world=ASIDE)
    table = run(jobs, setup).table
    network_ns = round(ASIDE.network_ms * 1e6)
    chainer = Chainer(BLOCK, BLOCK)
    for worker in range(2):
        rows = [n for n in range(len(jobs)) if table.worker[n] == worker]
        rows.sort(key=lambda n: (int(table.dispatched_ns[n]), n))
        tasks = [
            WorkerTask(
                int(table.dispatched_ns[n]) + network_ns,
                chainer.chain(jobs[n], n),
                jobs[n].prompt_tokens,
                jobs[n].output_tokens,
            )
            for n in rows
        ]
        for workers in (nullcontext(), plain_workers()):
            with workers:
                served = serve(new_worker(machine(setup.groups[0], BLOCK)), tasks)
            assert [one.first_ns + network_ns for one in served] == table.first_token_ns[
                rows
            ].tolist()
            assert [one.finish_ns + network_ns for one in served] == table.finish_ns[rows].tolist()
            assert [one.hit_tokens for one in served] == table.hit_tokens[rows].tolist()


def test_the_placed_policy_repeats_another_run_bit_for_bit() -> None:
    jobs = burst(40)
    first = run(jobs, setup_of("hybrid", world=ASIDE)).table
    again = run(jobs, setup_of(placed_spec(first.worker.tolist()), world=ASIDE)).table
    for name in ("worker", "dispatched_ns", "first_token_ns", "finish_ns", "hit_tokens"):
        assert np.array_equal(getattr(first, name), getattr(again, name)), name


def test_the_placed_policy_leaves_other_requests_to_another_policy() -> None:
    jobs = burst(12)
    table = run(jobs, setup_of(placed_spec([1, 1, -1, 9], "round_robin"))).table
    # There is no worker 9; from the third request on, it is round robin by arrival number.
    assert table.worker.tolist() == [1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("query", "message"),
    [("workers=1.x", "numbers joined by dots"), ("then=gone", "no policy 'gone'")],
)
def test_a_bad_assignment_is_refused(query: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load(f"simulator.limits.partition:Placed?{query}")


def test_a_warmed_cache_is_hit() -> None:
    kind = replace(machine(pool(), BLOCK), blocks=2000)
    engine = new_worker(kind)
    chain = np.arange(1, 101, dtype=np.uint64)
    now_ns = warm(engine, [(chain[:60], 60 * BLOCK)])
    (one,) = serve(engine, [WorkerTask(now_ns, chain, 100 * BLOCK, 1)])
    assert one.hit_tokens == 60 * BLOCK


# --- Fixed homes --------------------------------------------------------------------------------


def test_requests_that_share_more_than_a_trunk_stay_together() -> None:
    own = [np.array([1, 2, 10 + n % 5, 100 + n], dtype=np.uint64) for n in range(60)]
    jobs = [Job(n, 64, 1, ids) for n, ids in enumerate(own)]
    known = known_of(jobs)
    assert groups(known, 1) == [n % 5 for n in range(60)]
    named = [msgspec.structs.replace(one, session=f"s{n % 7}") for n, one in enumerate(jobs)]
    assert groups(known_of(named), 2) == [n % 7 for n in range(60)]


def test_a_partition_keeps_groups_together_and_balances_the_work() -> None:
    jobs = [Job(n, 1600, 10, np.zeros(0, dtype=np.uint64), session=f"s{n % 8}") for n in range(80)]
    kind = machine(pool(4), BLOCK)
    homes = partition(known_of(jobs), [kind])
    assert all(homes[n] == homes[n % 8] for n in range(80))
    assert sorted(homes.count(worker) for worker in range(4)) == [20, 20, 20, 20]


# --- The report ---------------------------------------------------------------------------------


def test_the_losses_of_a_report_add_up_to_its_distance_from_the_bound() -> None:
    jobs = burst(60)
    setup = setup_of("hybrid", pool(2, kv_tokens=6000), world=ASIDE)
    told: list[str] = []
    report = report_of(
        jobs, setup, ["kv_prefix", "hybrid"], on_progress=lambda what, *_: told.append(what)
    )
    assert [one.policy for one in report.distances] == ["round_robin", "kv_prefix", "hybrid"]
    assert report.distances[0].gap_ttft_percent == 100.0
    bound_ms = report.bounds.ttft_ms["mean"].value
    for one in report.distances:
        assert one.ttft_ms is not None
        assert one.ttft_ms >= bound_ms
        assert one.regret_ttft_percent is not None
        assert one.regret_ttft_percent >= 0
        assert [loss.name for loss in one.losses] == list(NAMES)
        lost_ms = sum(loss.ttft_ms for loss in one.losses)
        assert lost_ms == pytest.approx(one.ttft_ms - bound_ms, abs=0.01)
        assert 1 >= one.hits.ceiling >= one.hits.union >= one.hits.placed
    assert {"replays", "losses"} <= set(told)
    best = [one.ttft_ms for one in report.achieved]
    assert best == sorted(best)
    assert msgspec.json.decode(msgspec.json.encode(report), type=BoundReport) == report
    assert report == report_of(jobs, setup, ["kv_prefix", "hybrid"])


def test_each_effect_is_measured_in_a_workload_with_that_effect_only() -> None:
    def lost(jobs: list[Job], setup: Setup, policy: str) -> dict[str, float]:
        (*_, one) = report_of(jobs, setup, [policy]).distances
        return {loss.name: loss.ttft_ms for loss in one.losses}

    # All requests share one prefix, whose holder attracts them, so one of two workers idles.
    alike = [job(2.0 * n, 1600, 1, trunk=1, own=n) for n in range(40)]
    skewed = lost(alike, setup_of(), "kv_prefix")
    assert skewed["imbalance"] > 10 * abs(skewed["recompute"])
    # Two trunks in turn on three workers: round robin computes each on every worker.
    turns = [job(1000.0 * n, 16_000, 1, trunk=n % 2, own=n) for n in range(12)]
    repeated = lost(turns, setup_of("round_robin", pool(3)), "least_requests")
    assert repeated["recompute"] > 10
    assert abs(repeated["memory, eviction"]) < 1
    # One worker with room for one trunk of the two.
    turns = [job(1000.0 * n, 8000, 1, trunk=n % 2, own=n) for n in range(12)]
    evicted = lost(turns, setup_of("round_robin", pool(1, kv_tokens=8800)), "round_robin")
    assert evicted["memory, eviction"] > 10
    assert abs(evicted["recompute"]) < 1
    # Long answers beside short prompts.
    talking = [job(30.0 * n, 160, 400, trunk=n, own=n) for n in range(40)]
    delayed = lost(talking, setup_of("round_robin", pool(1)), "round_robin")
    assert delayed["interference"] > 1
    assert abs(delayed["recompute"]) < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"closed_loop": True}, "closed_loop: .* use the recorded times"),
        ({"faults": "faults.yaml"}, "faults: .* leave the faults out"),
        ({"groups": (WorkerGroup(1, "llama-3.1-8b-h100", kv_tokens=64),)}, "no request .* more KV"),
    ],
)
def test_a_setup_without_a_bound_is_refused(change: dict[str, object], message: str) -> None:
    setup = msgspec.structs.replace(setup_of(), **change)
    with pytest.raises(BoundError, match=message):
        report_of(burst(5), setup, ["hybrid"])


def test_a_policy_that_rejects_requests_is_not_compared() -> None:
    jobs = [*burst(4), job(50.0, 3000, 10, 0, 99), job(60.0, 20_000, 10, 0, 100)]
    setup = setup_of("round_robin", pool(1, kv_tokens=4000), pool(1, kv_tokens=2000))
    report = report_of(jobs, setup, ["kv_load"])
    assert report.bounds.hopeless == 1
    assert "1 requests fit no worker" in report.notes[0]
    for one in report.distances:
        complete = one.completed == 5
        assert (one.ttft_ms is not None) == complete
        assert bool(one.losses) == complete


def test_gap_and_regret_agree_with_a_computation_by_hand() -> None:
    assert gap_percent(30.0, 50.0, 10.0) == 50.0
    assert gap_percent(None, 50.0, 10.0) is None
    assert gap_percent(10.0, 10.0, 10.0) is None
    assert regret_percent(15.0, 10.0) == 50.0
    assert regret_percent(15.0, None) is None


def test_tables_show_the_figures() -> None:
    jobs = burst(30)
    report = report_of(jobs, setup_of(world=ASIDE), ["hybrid"])
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(bound_tables(report))
    console.print(hits_table(hits(jobs, block_tokens=BLOCK, workers=2, kv_tokens=None)))
    text = console.export_text()
    for expected in ("round_robin", "hybrid", "partition by session", "imbalance", "no limit"):
        assert expected in text
    assert f"{report.bounds.ttft_ms['mean'].value:,.1f}" in text
