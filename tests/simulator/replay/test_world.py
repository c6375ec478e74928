"""Tests of the simulated world: closed loop, stale and lost events, workers that refuse, observers,
limits of the set-up.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from policies.contract import FleetView, Floats, Hashes, RequestView
from router.core.contract.actions import Decision
from simulator.replay.observer import ROWS_MAX
from simulator.replay.result import NEVER, Book, Verdict
from simulator.replay.run import ReplayProgress, replay
from simulator.replay.setup import ReplayError, RouterSettings, Setup, World
from simulator.replay.station import Station
from simulator.report.files import predicted_ttft_ms
from simulator.traces.job import Job
from simulator.traces.spec import WorkloadSpec
from tests.simulator.replays import BLOCK, job, pool, run, setup_of, steady

MS = 1_000_000


def test_a_turn_waits_for_the_answer_and_the_think_time() -> None:
    turns = [
        job(0, 320, 20, session="a"),
        job(10, 640, 20, session="a", think_ns=30 * MS),
        job(110, 960, 20, session="a"),  # no pause recorded: 100 ms after the turn before
    ]
    table = run([*turns, job(5, 320, 4)], setup_of(closed_loop=True)).table
    order = [0, 2, 3]  # rows of the session: the lone request is the second to arrive
    assert table.prompt_tokens.tolist() == [320, 320, 640, 960]
    arrival, finish = table.arrival_ns[order], table.finish_ns[order]
    assert arrival[1] == finish[0] + 30 * MS
    assert arrival[2] == finish[1] + 100 * MS
    assert (np.diff(table.arrival_ns) >= 0).all()


def test_a_session_continues_after_a_refused_turn() -> None:
    turns = [
        job(0, 320, 4, session="a"),
        job(10, 900, 4, session="a", think_ns=5 * MS),
        job(20, 320, 4, session="a", think_ns=7 * MS),
    ]
    setup = setup_of("round_robin", pool(1, kv_tokens=800), closed_loop=True)
    result = run(turns, setup)
    assert result.table.verdict.tolist() == [0, Verdict.REJECTED, 0]
    # There and back, 0.5 ms each, then the pause.
    assert result.table.arrival_ns[2] == result.table.arrival_ns[1] + 8 * MS


def test_an_open_loop_does_not_wait_for_answers() -> None:
    turns = [job(n * 10, 320, 200, session="a", think_ns=0) for n in range(3)]
    assert run(turns).table.arrival_ns.tolist() == [0, 10 * MS, 20 * MS]


def bursty(count: int) -> list[Job]:
    """Return requests in bursts, with more distinct prompts than the caches hold."""
    return [
        job((n // 4) * 1000.0 + n % 4, 960, 10, trunk=n * n % 37, own=n + 40) for n in range(count)
    ]


def hit_error(world: World) -> float:
    """Return the mean difference, in tokens, between the hits that the router expected and those
    that the worker found.
    """
    setup = setup_of("kv_prefix", pool(2, kv_tokens=6000), world=world)
    table = run(bursty(400), setup).table
    assert (table.verdict == Verdict.COMPLETED).all()
    error = np.abs(table.expected_hit_tokens - table.hit_tokens)
    return float(error.mean())


def test_late_or_lost_events_make_expected_hits_less_exact() -> None:
    fresh = hit_error(World(event_lag_ms=0.0))
    stale = hit_error(World(event_lag_ms=10_000.0))
    lost = hit_error(World(event_loss=0.5, resync_ms=5000.0))
    assert fresh < stale
    assert fresh < lost


def test_load_reports_may_be_missing_or_late() -> None:
    for world in (World(report_every_ms=0.0), World(report_lag_ms=5000.0)):
        result = run(steady(100, 10.0), setup_of("hybrid", world=world))
        assert (result.table.verdict == Verdict.COMPLETED).all()


def test_without_events_expected_hits_come_from_the_routers_own_dispatches() -> None:
    result = run(steady(100, 10.0), setup_of("kv_prefix", world=World(events=False)))
    late = result.table.arrival_ns > 500 * MS
    assert (result.table.expected_hit_tokens[late] == 320).all()


def test_held_requests_wait_at_the_router_and_run_later() -> None:
    holding = "tests.simulator.replays:at_most_two"
    result = run(steady(40, 1.0, output=40), setup_of(holding, pool(2)))
    assert result.holds > 0
    table = result.table
    assert (table.verdict == Verdict.COMPLETED).all()
    assert (table.dispatched_ns > table.arrival_ns).sum() == result.holds
    assert table.held_ns.tolist() == (table.dispatched_ns - table.arrival_ns).tolist()


def test_the_routers_hold_time_and_request_limit_apply() -> None:
    holding = setup_of("tests.simulator.replays:at_most_two", pool(2))
    jobs = steady(40, 1.0, output=40)
    soon = msgspec.structs.replace(holding, router=RouterSettings(hold_s=0.2))
    result = run(jobs, soon)
    assert result.rejections == {"hold_timeout": (result.table.verdict == 1).sum()}
    away = result.table.verdict == Verdict.REJECTED
    assert away.any()
    assert (result.table.held_ns[away] >= 200 * MS).all()
    assert (result.table.held_ns[away] < 400 * MS).all()  # the router looks every 100 ms
    room = msgspec.structs.replace(holding, router=RouterSettings(inflight_requests=10))
    assert run(jobs, room).rejections["router_full"] > 0


def seen_sessions(request: RequestView, fleet: FleetView, state: object) -> Floats:
    """Send requests without a session to worker 0 and all others to worker 1: a policy
    for tests.
    """
    costs: Floats = (fleet.worker_id == (request.session is None)).astype(np.float64)
    return costs


def test_a_share_of_clients_sends_no_session() -> None:
    jobs = [job(n, 320, 2, own=n, session=f"s{n % 100}") for n in range(300)]
    policy = f"{__name__}:seen_sessions"

    def unknown(share: float, seed: int = 0) -> list[bool]:
        setup = setup_of(policy, pool(2), seed=seed, world=World(no_session_share=share))
        table = run(jobs, setup).table
        assert table.session.tolist() == [n % 100 for n in range(300)]  # the report still knows
        by_turn = (table.worker == 0).reshape(3, 100)
        assert (by_turn == by_turn[0]).all()  # a client sends it always or never
        return [bool(x) for x in by_turn[0]]

    assert sum(unknown(0.0)) == 0
    assert sum(unknown(1.0)) == 100
    assert 12 <= sum(unknown(0.25)) <= 38
    assert unknown(0.25) == unknown(0.25) != unknown(0.25, seed=1)


def test_a_full_queue_moves_the_request_without_counting_a_failure() -> None:
    jobs = [job(0, 320, 2, own=n) for n in range(9000)]
    result = run(jobs, setup_of("round_robin", pool(2)))
    # Both queues hold 4,096 requests besides the running ones; each further one was tried at both.
    assert result.rejections["worker_error"] > 0
    assert result.retries > 0
    assert not any("ejected after" in note for note in result.notes)
    assert (result.table.verdict == Verdict.COMPLETED).sum() >= 2 * 4096


class Watcher:
    """An observer that checks every call it receives from the replay."""

    def __init__(self) -> None:
        self.book = Book()
        self.dispatched: dict[int, int] = {}
        self.best: list[int] = []
        self.ended: list[int] = []
        self.samples: list[int] = []

    def on_start(self, book: Book) -> None:
        self.book = book

    def on_dispatch(
        self, row: int, job: Job, chain: Hashes, decision: Decision, workers: Sequence[Station]
    ) -> None:
        assert self.book.worker[row] == decision.candidates[0].worker_id
        assert len(chain) == job.prompt_tokens // 16
        self.dispatched[row] = self.dispatched.get(row, 0) + 1
        predicted = predicted_ttft_ms(
            workers, chain, job.prompt_tokens, self.book.dispatched_ns[row]
        )
        assert len(predicted) == len(workers)
        assert all(value > 0 for value in predicted)
        self.best.append(int(np.argmin(predicted)))

    def on_sample(self, now_ns: int, workers: Sequence[Station]) -> None:
        self.samples.append(now_ns)

    def on_end(self, row: int) -> None:
        assert self.book.verdict[row] != NEVER
        assert (self.book.code_of(row) != "") == (self.book.verdict[row] == Verdict.REJECTED)
        self.ended.append(row)


def test_observers_see_every_dispatch_and_end_and_change_nothing() -> None:
    jobs = [*steady(120, 20.0), job(2400, 900, 4)]
    setup = setup_of("round_robin", pool(2, kv_tokens=800))
    watcher = Watcher()
    result, plain = run(jobs, setup, observers=(watcher,)), run(jobs, setup)
    assert sorted(watcher.ended) == list(range(121))
    assert list(watcher.dispatched.values()) == result.table.attempts.tolist()
    assert watcher.samples == result.samples.time_ns.tolist()
    assert np.array_equal(result.table.finish_ns, plain.table.finish_ns)
    assert set(watcher.best) == {0, 1}


def test_progress_is_reported_every_256_requests() -> None:
    told: list[ReplayProgress] = []
    run(steady(600, 1.0), on_progress=told.append)
    assert [(p.ended, p.total, p.fraction) for p in told] == [(256, 600, 1.0), (512, 600, 1.0)]
    assert told[0].now_ns < told[1].now_ns


def test_a_closed_loop_reports_its_progress() -> None:
    told: list[ReplayProgress] = []
    agents = WorkloadSpec("gen:agentic?sessions=80&turns=4..12&context=100&question=10&output=4")
    setup = Setup(agents, "round_robin", (pool(),), block_size=BLOCK, closed_loop=True)
    requests = len(replay(setup, on_progress=told.append).table)
    assert [(p.ended, p.total) for p in told] == [
        (ended, requests) for ended in range(256, requests + 1, 256)
    ]
    assert len(told) > 1
    told.clear()
    replay(msgspec.structs.replace(setup, closed_loop=False), on_progress=told.append)
    assert {(p.total, p.fraction) for p in told} == {(None, 0.0)}, "nobody knows its end"


def test_samples_are_bounded_and_cover_the_whole_time() -> None:
    jobs = [job(n * 10_000.0, 640, 30, trunk=n % 4, own=n + 10) for n in range(200)]
    result = run(jobs)
    time_ns = result.samples.time_ns
    assert len(time_ns) <= ROWS_MAX
    assert len(set(np.diff(time_ns[:-1]).tolist())) == 1
    assert time_ns[-1] == result.table.finish_ns.max()
    spans_ns = np.diff(time_ns, prepend=0)
    busy_ns = (result.samples.busy_share * spans_ns[:, None]).sum(axis=0)
    assert busy_ns == pytest.approx([total.busy_ns for total in result.workers])
    assert result.samples.query_tokens[-1].sum() == result.table.prompt_tokens.sum()


def test_a_replay_without_requests_has_an_empty_result() -> None:
    result = run([])
    assert len(result.table) == 0
    assert result.simulated_ns == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"groups": ()}, "no workers"),
        ({"groups": (pool(0),)}, "0 workers in all"),
        ({"groups": (pool(5000),)}, r"expected 1\.\.4096"),
        ({"groups": (pool(2, speed=0.0),)}, r"groups\[0\]\.speed"),
        ({"groups": (pool(2, kv_tokens=0),)}, r"groups\[0\]\.kv_tokens"),
        ({"groups": (pool(2, max_batch_size=0),)}, "max_batch_size must be at least 1"),
        ({"groups": (msgspec.structs.replace(pool(), profile="h1000"),)}, "valid ones: deepseek"),
        ({"policy": "best"}, "valid: round_robin"),
        ({"policy": "hybrid?speed=3"}, "speed"),
        ({"block_size": 0}, "block_size: 0"),
        ({"world": World(tick_ms=0.0)}, r"world\.tick_ms"),
        ({"world": World(event_loss=1.0)}, r"world\.event_loss"),
        ({"world": World(network_ms=float("nan"))}, r"world\.network_ms"),
        ({"world": World(event_lag_ms=-1.0)}, r"world\.event_lag_ms"),
        ({"world": World(no_session_share=1.5)}, r"world\.no_session_share: 1\.5"),
        ({"router": RouterSettings(hold_s=-1.0)}, r"router\.hold_s: -1\.0"),
        ({"router": RouterSettings(hold_requests=0)}, r"router\.hold_requests: 0"),
        ({"faults": "nowhere.yaml"}, r"nowhere\.yaml"),
    ],
)
def test_the_error_for_a_wrong_setup_names_the_problem(
    change: dict[str, object], said: str
) -> None:
    setup: Setup = msgspec.structs.replace(setup_of(), **change)
    with pytest.raises(ReplayError, match=said):
        run(steady(3, 1.0), setup)
