"""Tests of the load generator with a real server: open and closed loop, verdicts, disconnects."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import uvloop

from simulator.live.client import Target
from simulator.live.load import Workload, WorkloadError, run_load
from simulator.live.outcome import LiveVerdict, Outcome
from simulator.traces.job import Job
from simulator.traces.timing import NS
from tests.simulator.endpoint import Endpoint, serve, until
from tests.simulator.made_up import shared_prompt

DEADLINE_S = 20.0


def workload(requests: int, rate_per_s: float = 1000.0, output_tokens: int = 3) -> Workload:
    return shared_prompt(requests, 64, 32, output_tokens, rate_per_s, "inf")


async def loaded(
    endpoint: Endpoint, work: Workload, concurrency: int | None = None, **target: object
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    plain = Target(endpoint.url, "demo", work.block_tokens)
    to = replace(plain, **target)  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE_S):
        await run_load(work, to, outcomes.append, concurrency=concurrency)
    return sorted(outcomes, key=lambda o: o.serial)


async def test_open_loop_sends_every_row_once_at_its_time() -> None:
    async with serve(Endpoint()) as endpoint:
        outcomes = await loaded(endpoint, workload(20, rate_per_s=100.0))
    assert [o.serial for o in outcomes] == list(range(20))
    assert all(o.verdict is LiveVerdict.COMPLETED for o in outcomes)
    assert [o.scheduled_s for o in outcomes] == pytest.approx([i / 100 for i in range(20)])
    assert all(o.sent_s >= o.scheduled_s for o in outcomes)
    assert {o.output_tokens for o in outcomes} == {3}
    assert {o.cached_tokens for o in outcomes} == {7}
    assert {o.worker for o in outcomes} == {"w0", "w1"}
    assert all(o.ttft_ms is not None and 0 < o.ttft_ms <= o.e2e_ms for o in outcomes)


def test_times_are_finer_than_the_event_loops_clock() -> None:
    async def measure() -> list[Outcome]:
        async with serve(Endpoint()) as endpoint:
            return await loaded(endpoint, workload(20), concurrency=1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(measure())
    assert len({round(o.e2e_ms % 1, 3) for o in outcomes}) > 3


async def test_bodies_are_streamed_completions_of_token_ids() -> None:
    work = Workload("one", (Job(0, 100, 4, np.array([1, 2], np.uint64), session="s7"),), 64, "test")
    async with serve(Endpoint()) as endpoint:
        await loaded(endpoint, work)
    body = endpoint.bodies[0]
    assert len(body["prompt"]) == 100
    assert body["max_tokens"] == 4
    assert body["stream"]
    assert body["ignore_eos"]
    assert endpoint.sessions == ["s7"]


async def test_open_loop_does_not_wait_for_answers() -> None:
    async with serve(Endpoint(gap_s=0.2)) as endpoint:
        outcomes = await loaded(endpoint, workload(10))
    assert endpoint.running_max == 10
    # A first token after the server's pause: measured from when the request was due.
    assert all(o.ttft_ms is not None and o.ttft_ms >= 190 for o in outcomes)


async def test_a_full_load_generator_reports_its_lateness() -> None:
    async with serve(Endpoint(gap_s=0.05)) as endpoint:
        outcomes = await loaded(endpoint, workload(4, output_tokens=1), max_in_flight=1)
    assert endpoint.running_max == 1
    assert outcomes[-1].late_ms >= 100
    assert outcomes[-1].ttft_ms is not None
    assert outcomes[-1].ttft_ms >= outcomes[-1].late_ms


async def test_closed_loop_keeps_its_concurrency() -> None:
    async with serve(Endpoint(gap_s=0.01)) as endpoint:
        outcomes = await loaded(endpoint, workload(30, rate_per_s=0.001), concurrency=4)
    assert len(outcomes) == 30
    assert endpoint.running_max == 4
    assert {o.late_ms for o in outcomes} == {0.0} or max(o.late_ms for o in outcomes) < 50


def talks(ends_s: float, pause_s: float = 0.05) -> Workload:
    """Return three sessions of four turns and one request without a session; two of the sessions
    begin at once.
    """

    def job(session: str | None, at_s: float, think_s: float | None) -> Job:
        think_ns = None if think_s is None else round(think_s * NS)
        ids = np.array([1, 2], np.uint64)
        return Job(round(at_s * NS), 100, 2, ids, session=session, think_ns=think_ns)

    jobs = [
        job(name, start_s + turn * 60.0, pause_s)
        for name, start_s in (("a", 0.0), ("b", 0.0), ("c", 0.3))
        for turn in range(4)
    ]
    jobs += [job(None, 0.1, None)]
    return Workload("talks", tuple(sorted(jobs, key=lambda j: j.at_ns)), 64, "test", ends_s)


async def test_a_turn_of_a_session_follows_the_previous_answer() -> None:
    async with serve(Endpoint(gap_s=0.02)) as endpoint:
        outcomes = await loaded(endpoint, talks(ends_s=30.0))
    assert Counter(endpoint.sessions) == {"a": 4, "b": 4, "c": 4, None: 1}
    assert endpoint.running_max <= 4
    assert [o.serial for o in outcomes] == list(range(13))
    jobs = talks(30.0).jobs
    for name in "abc":
        mine = sorted(
            (o for o in outcomes if jobs[o.serial].session == name), key=lambda o: o.scheduled_s
        )
        assert [o.turn for o in mine] == [0, 1, 2, 3]
        assert mine[0].scheduled_s == pytest.approx(0.3 if name == "c" else 0.0)
        for before, after in itertools.pairwise(mine):
            answered_s = before.scheduled_s + before.e2e_ms / 1000
            assert after.scheduled_s >= answered_s + 0.05
            assert after.sent_s >= after.scheduled_s


async def test_a_refused_turn_does_not_end_its_session() -> None:
    async with serve(Endpoint(lambda _: "down")) as endpoint:
        outcomes = await loaded(endpoint, talks(ends_s=30.0))
    assert [o.verdict for o in outcomes] == [LiveVerdict.REJECTED] * 13


async def test_no_turn_begins_after_the_end_of_a_closed_loop() -> None:
    async with serve(Endpoint()) as endpoint:
        outcomes = await loaded(endpoint, talks(ends_s=0.2, pause_s=0.3))
    assert sorted(endpoint.sessions, key=str) == [None, "a", "b"]
    assert {o.verdict for o in outcomes} == {LiveVerdict.COMPLETED}
    with pytest.raises(WorkloadError, match="ends_s 0: must be above 0"):
        talks(ends_s=0.0)


async def test_verdicts_of_a_mixed_endpoint() -> None:
    kinds = ["ok", "busy", "down", "bad", "cut", "short", "error"]
    async with serve(Endpoint(lambda number: kinds[number % 7])) as endpoint:
        outcomes = await loaded(endpoint, workload(70), concurrency=1)
    assert Counter(o.verdict for o in outcomes) == {
        LiveVerdict.COMPLETED: 10,
        LiveVerdict.REJECTED: 20,
        LiveVerdict.FAILED: 40,
    }
    for kind, outcome in zip(kinds, outcomes, strict=False):
        assert (outcome.error is None) == (kind == "ok"), outcome
    assert outcomes[1].status == 429
    assert "busy" in (outcomes[1].error or "")
    assert "broken" in (outcomes[6].error or "")


async def test_a_silent_endpoint_times_out() -> None:
    async with serve(Endpoint(lambda _: "silent")) as endpoint:
        outcomes = await loaded(endpoint, workload(2), timeout_s=0.2)
        await until(lambda: endpoint.gone == 2)
    assert {o.verdict for o in outcomes} == {LiveVerdict.FAILED}
    assert "Timeout" in (outcomes[0].error or "")


async def test_an_unreachable_endpoint_is_a_failure_not_an_exception() -> None:
    outcomes: list[Outcome] = []
    async with serve(Endpoint()) as endpoint:
        url = endpoint.url
    async with asyncio.timeout(DEADLINE_S):
        await run_load(workload(3), Target(url, "demo", 32), outcomes.append)
    assert {o.verdict for o in outcomes} == {LiveVerdict.FAILED}
    assert {o.status for o in outcomes} == {0}


async def test_cancelling_closes_every_connection() -> None:
    async with serve(Endpoint(lambda _: "silent")) as endpoint:
        work = workload(5)
        running = asyncio.ensure_future(loaded(endpoint, work))
        await until(lambda: endpoint.running == 5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: endpoint.gone == 5 and endpoint.running == 0)


async def test_wrong_speeds_are_refused() -> None:
    target = Target("http://127.0.0.1:1", "demo", 32)
    with pytest.raises(ValueError, match="speed"):
        await run_load(workload(1), target, lambda _: None, speed=0)
    with pytest.raises(ValueError, match="concurrency"):
        await run_load(workload(1), target, lambda _: None, concurrency=0)
