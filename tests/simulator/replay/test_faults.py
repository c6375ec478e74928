"""Tests of faults in a replay: each has its visible effect, and none loses a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from simulator.replay.faults import KINDS, read_faults
from simulator.replay.result import ReplayResult, Verdict
from simulator.replay.setup import ReplayError, Setup, World
from simulator.traces.job import Job
from tests.simulator.replays import job, pool, run, setup_of, steady

S = 1_000_000_000
Faulty = Callable[..., ReplayResult]


@pytest.fixture
def faulty(tmp_path: Path) -> Faulty:
    """Return a function that replays jobs under a set-up with a timeline of faults."""

    def faulty(jobs: list[Job], faults: list[dict[str, Any]], setup: Setup) -> ReplayResult:
        path = tmp_path / "faults.yaml"
        path.write_text(yaml.safe_dump(faults))
        return run(jobs, msgspec.structs.replace(setup, faults=str(path)))

    return faulty


def sent(result: ReplayResult, worker: int, after_s: float = 0.0) -> int:
    """Return the number of requests whose last dispatch went to `worker` after `after_s`."""
    table = result.table
    late = table.dispatched_ns > after_s * S
    return int(np.count_nonzero((table.worker == worker) & late))


def test_a_death_fails_requests_with_a_first_token_and_moves_the_others(faulty: Faulty) -> None:
    jobs = steady(400, 10.0, prompt=6400, output=60)
    setup = setup_of("round_robin", pool(3))
    result = faulty(jobs, [{"at_s": 1.5, "worker": 1, "do": "die"}], setup)
    table = result.table
    failed = table.verdict == Verdict.FAILED
    assert failed.any()
    assert (table.worker[failed] == 1).all()
    assert (table.first_token_ns[failed] <= 1.501 * S).all()
    assert (table.output_tokens[failed] >= 1).all()
    moved = (table.attempts > 1) & ~failed
    assert moved.any()
    assert (table.verdict[moved] == Verdict.COMPLETED).all()
    assert result.retries >= np.count_nonzero(moved)
    assert sent(result, 1, after_s=2.6) == 0  # noticed within a second


def test_a_restarted_worker_serves_again_with_a_cold_cache(faulty: Faulty) -> None:
    jobs = steady(300, 20.0)
    faults = [{"at_s": 1, "worker": 1, "do": "die"}, {"at_s": 3, "worker": 1, "do": "restart"}]
    result = faulty(jobs, faults, setup_of("round_robin"))
    assert sent(result, 1, after_s=4.1) > 40
    table = result.table
    there = (table.worker == 1) & (table.verdict == Verdict.COMPLETED)
    first_back = np.flatnonzero(there & (table.dispatched_ns > 3 * S))[0]
    assert table.hit_tokens[there & (table.dispatched_ns < 1 * S)][-1] == 320
    assert table.hit_tokens[first_back] == table.expected_hit_tokens[first_back] == 0


def test_a_restart_between_reports_is_noticed_by_restarted_event_numbers(faulty: Faulty) -> None:
    jobs = steady(200, 20.0)
    setup = setup_of("kv_prefix", world=World(report_every_ms=0.0))
    result = faulty(jobs, [{"at_s": 2, "worker": 0, "do": "restart"}], setup)
    plain = run(jobs, setup)
    assert result.workers[0].hit_tokens < plain.workers[0].hit_tokens
    table = result.table
    late = table.dispatched_ns > 3.5 * S
    assert np.array_equal(table.hit_tokens[late], table.expected_hit_tokens[late])


def test_a_drained_worker_finishes_its_requests_and_gets_no_more(faulty: Faulty) -> None:
    jobs = steady(200, 10.0, output=40)
    faults = [{"at_s": 1, "worker": 0, "do": "drain"}, {"at_s": 1.9, "worker": 0, "do": "die"}]
    result = faulty(jobs, faults, setup_of("round_robin"))
    assert (result.table.verdict == Verdict.COMPLETED).all()
    assert sent(result, 0) > 0
    assert sent(result, 0, after_s=1) == 0


def test_a_worker_that_joins_takes_its_share(faulty: Faulty) -> None:
    jobs = steady(200, 10.0)
    result = faulty(jobs, [{"at_s": 1, "do": "join"}], setup_of("round_robin"))
    assert [total.name for total in result.workers] == ["w0", "w1", "w2"]
    assert sent(result, 2) == pytest.approx(33, abs=2)
    assert result.samples.running.shape[1] == 3


def test_a_slow_worker_takes_longer_and_recovers(faulty: Faulty) -> None:
    jobs = steady(300, 10.0, output=10)
    slow = {"at_s": 1, "worker": 0, "do": "slow", "factor": 4}
    result = faulty(jobs, [slow, {**slow, "at_s": 2, "factor": 1}], setup_of("round_robin"))
    table = result.table
    spent = table.finish_ns - table.first_token_ns
    mean = [
        spent[(table.worker == 0) & (table.arrival_ns // S == second)].mean() for second in range(3)
    ]
    assert mean[1] > 3 * mean[0]
    assert mean[2] < 2 * mean[0]


def test_the_router_knows_that_a_cleared_cache_is_cold(faulty: Faulty) -> None:
    jobs = [job(n * 1000.0, 640, 4, trunk=0, own=n + 1) for n in range(4)]
    clear = [{"at_s": 1.5, "worker": 0, "do": "clear"}]
    result = faulty(jobs, clear, setup_of("kv_prefix", pool(1)))
    assert result.table.hit_tokens.tolist() == [0, 320, 0, 320]
    # A block expected from our own dispatches is believed for some seconds longer (speculative).
    assert result.table.expected_hit_tokens.tolist()[3] == 320


def test_lost_events_are_requested_again(faulty: Faulty) -> None:
    jobs = steady(200, 20.0, prompt=1280)
    lose = [{"at_s": 1, "worker": 0, "do": "lose_events", "for_s": 0.5}]
    setup = setup_of("kv_prefix", pool(2, kv_tokens=8000))
    result = faulty(jobs, lose, setup)
    assert any("event batches lost" in note for note in result.notes)
    assert (result.table.verdict == Verdict.COMPLETED).all()


def test_a_short_hang_only_delays(faulty: Faulty) -> None:
    jobs = steady(100, 20.0, output=10)
    hang = [{"at_s": 1, "worker": 0, "do": "hang", "for_s": 2}]
    result, plain = faulty(jobs, hang, setup_of("round_robin")), run(jobs)
    table = result.table
    assert (table.verdict == Verdict.COMPLETED).all()
    assert np.array_equal(table.worker, plain.table.worker)  # the router did not notice
    late_ns = table.finish_ns - plain.table.finish_ns
    assert 1.9 * S < late_ns[(table.worker == 0)].max() <= 2.5 * S
    assert late_ns[table.worker == 1].max() == 0


def test_requests_move_from_a_worker_that_hangs_for_long(faulty: Faulty) -> None:
    jobs = steady(600, 20.0, output=10)
    hang = [{"at_s": 1, "worker": 0, "do": "hang", "for_s": 9}]
    result = faulty(jobs, hang, setup_of("round_robin"))
    table = result.table
    assert (table.verdict == Verdict.COMPLETED).all()
    assert (table.attempts > 1).any()
    between = (table.dispatched_ns > 7.5 * S) & (table.dispatched_ns < 10 * S)
    assert not (table.worker[between] == 0).any()
    assert sent(result, 0, after_s=11.1) > 0


def test_the_death_of_a_hanging_worker_ends_its_waiting_requests(faulty: Faulty) -> None:
    jobs = steady(200, 20.0, output=10)
    faults = [
        {"at_s": 1, "worker": 0, "do": "hang", "for_s": 5},
        {"at_s": 2, "worker": 0, "do": "die"},
        {"at_s": 2.5, "worker": 0, "do": "restart"},
    ]
    table = faulty(jobs, faults, setup_of("round_robin")).table
    waited = (table.attempts > 1) & (table.verdict == Verdict.COMPLETED)
    assert waited.sum() > 20
    assert (table.dispatched_ns[waited] > 2 * S).all()


def test_with_all_workers_dead_requests_are_rejected(faulty: Faulty) -> None:
    faults = [{"at_s": 0.5, "worker": worker, "do": "die"} for worker in (0, 1)]
    result = faulty(steady(200, 20.0), faults, setup_of("round_robin"))
    assert result.rejections["no_worker_available"] > 50
    assert result.rejections["worker_error"] > 0
    assert sum(result.rejections.values()) == (result.table.verdict == Verdict.REJECTED).sum()


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"at_s": 1, "worker": 0, "do": "dye"}, r"\[0\]\.do: 'dye'; expected one of: die, restart"),
        ({"at_s": 1, "worker": 0}, r"\[0\]\.do: None"),
        ({"at_s": 1, "worker": 2, "do": "die"}, r"worker 2 does not exist then; expected 0\.\.1"),
        ({"at_s": 1, "worker": -1, "do": "die"}, r"worker: -1; expected a whole number"),
        ({"at_s": -1, "worker": 0, "do": "die"}, r"at_s: -1; expected a number of 0\.\."),
        ({"at_s": float("nan"), "worker": 0, "do": "die"}, r"at_s: nan"),
        ({"worker": 0, "do": "die"}, r"at_s: missing"),
        ({"at_s": 1, "worker": 0, "do": "slow"}, r"factor: missing; expected a number"),
        ({"at_s": 1, "worker": 0, "do": "slow", "factor": 0}, r"factor: 0; expected a number"),
        ({"at_s": 1, "worker": 0, "do": "hang", "for_s": "x"}, r"for_s: 'x'; expected a number"),
        (
            {"at_s": 1, "worker": 0, "do": "hang", "for_s": 1e9},
            r"expected a number of 1e-09\.\.86400",
        ),
        (
            {"at_s": 1, "worker": 0, "do": "die", "for_s": 1},
            r"for_s: no key of die; it takes: at_s",
        ),
        ({"at_s": 1, "group": 1, "do": "join"}, r"group 1 does not exist then; expected 0\.\.0"),
        ("die", r"\[0\]: expected keys"),
    ],
)
def test_the_error_for_a_wrong_fault_names_the_problem(
    tmp_path: Path, item: Any, said: str
) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(yaml.safe_dump([item]))
    with pytest.raises(ReplayError, match=said):
        read_faults(str(path), 2, 1)


@pytest.mark.parametrize(
    "text", ["{", "a: 1", "3", "\x00", "[" * 5000, "&a [*a]", "- {at_s: 1, at_s: 2}", "x" * 2**21]
)
def test_a_faults_file_that_is_not_a_list_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    with pytest.raises(ReplayError, match=r"faults\.yaml"):
        read_faults(str(path), 2, 1)
    with pytest.raises(ReplayError, match="cannot be read"):
        read_faults(str(tmp_path / "none.yaml"), 2, 1)
    with pytest.raises(ReplayError, match="larger than"):
        read_faults("/dev/zero", 2, 1)


def test_json_and_empty_faults_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text('[{"at_s": 2, "worker": 2, "do": "die"}, {"at_s": 1.5, "do": "join"}]')
    faults = read_faults(str(path), 2, 1)
    assert [(fault.at_ns, fault.do) for fault in faults] == [(1.5 * S, "join"), (2 * S, "die")]
    path.write_text("")
    assert read_faults(str(path), 2, 1) == ()
    assert set(KINDS) == {
        "die", "restart", "drain", "join", "slow", "clear", "lose_events", "hang"
    }  # fmt: skip
