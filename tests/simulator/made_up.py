"""Invented outcomes and runs, for tests of the figures and pictures that are made from them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from simulator.live.load import Workload, opened
from simulator.live.outcome import LiveVerdict, Outcome, summarize
from simulator.live.scrape import Sample, WorkerCounters, pool_samples
from simulator.live.stack import RunResult
from simulator.traces.spec import WorkloadSpec

SHARED = "gen:sglang?groups=1&prompts={}&system={}&question={}&output={}&rate={}&burstiness={}"
WORKERS = tuple(f"worker {number}" for number in range(8))


def shared_prompt(
    requests: int, system: int, question: int, output: int, rate: float, shape: str = "1"
) -> Workload:
    """Return a workload of requests for one popular prompt; `shape` "inf" spaces them evenly."""
    source = SHARED.format(requests, system, question, output, rate, shape)
    return opened(WorkloadSpec(source), "shared_prompt", source, seed=1)


def outcome(serial: int = 0, **values: Any) -> Outcome:
    """Return a completed outcome with the given fields."""
    fields: dict[str, Any] = {
        "serial": serial,
        "scheduled_s": serial / 60,
        "sent_s": serial / 60,
        "verdict": LiveVerdict.COMPLETED,
        "status": 200,
        "worker": WORKERS[0],
        "e2e_ms": 500.0,
        "prompt_tokens": 6_700,
        "output_tokens": 24,
        "ttft_ms": 100.0,
        "itl_ms": 15.0,
        "itl_max_ms": 20.0,
        "cached_tokens": 6_000,
    }
    return Outcome(**{**fields, **values})


def counters(**values: float) -> WorkerCounters:
    """Return a worker's counters, all zero except `values`."""
    fields = dict.fromkeys(WorkerCounters.__dataclass_fields__, 0.0)
    return WorkerCounters(**{**fields, **values})


def run(
    policy: str,
    workload: str = "shared_prompt",
    place: Callable[[int, Random], int] = lambda serial, _: serial % 8,
    wait_ms: Callable[[int, Random], float] = lambda _, random: random.expovariate(1 / 120),
    requests: int = 400,
    hit_rate: float = 0.85,
    seed: int = 1,
    turns: int | None = None,
) -> RunResult:
    """Return a run of `policy`: `place` chooses the worker of each request, and `wait_ms` its wait.
    With `turns`, every `turns` requests in a row are the turns of one session.
    """
    random = Random(seed)
    outcomes = []
    for serial in range(requests):
        wait = wait_ms(serial, random)
        outcomes.append(
            outcome(
                serial,
                worker=WORKERS[place(serial, random)],
                ttft_ms=60 + wait,
                e2e_ms=400 + wait,
                turn=None if turns is None else serial % turns,
            )
        )
    busy = [sum(o.worker == name for o in outcomes) * 0.05 for name in WORKERS]
    end_s = max(o.scheduled_s + o.e2e_ms / 1000 for o in outcomes)
    steps = 30
    samples = tuple(
        Sample(
            end_s * step / steps,
            tuple(
                counters(
                    busy_s=min(1.0, total / end_s) * end_s * step / steps,
                    query_tokens=1000 * step,
                    hit_tokens=1000 * step * hit_rate,
                )
                for total in busy
            ),
        )
        for step in range(steps + 1)
    )
    before = [counters() for _ in WORKERS]
    after = [
        counters(query_tokens=1000, hit_tokens=1000 * hit_rate, steps=100, busy_s=total)
        for total in busy
    ]
    row = summarize(policy, workload, outcomes, WORKERS, before, after)
    return RunResult(row, tuple(outcomes), pool_samples(samples, 1.0), WORKERS, ())


def demo_runs() -> list[RunResult]:
    """Return invented runs that look like the demo's."""
    return [
        run("round_robin"),
        run("kv_prefix", place=lambda *_: 3, wait_ms=lambda serial, _: serial * 60.0),
        run("kv_load"),
        run("hybrid", place=lambda _, random: random.randrange(8)),
        run("round_robin", "conversation", hit_rate=0.05),
        run("hybrid", "conversation", hit_rate=0.15, wait_ms=lambda _, r: r.expovariate(1 / 90)),
        run("hybrid", "agents", wait_ms=lambda *_: 3_000.0, turns=8, hit_rate=0.5),
        run("warmset", "agents", wait_ms=_first_waits, turns=8, hit_rate=0.84, requests=480),
        run("kv_prefix", "live", place=lambda *_: 3, wait_ms=_grows),
        run("hybrid", "live"),
    ]


def _grows(serial: int, _: Random) -> float:
    return serial * 60.0


def _first_waits(serial: int, _: Random) -> float:
    return 500.0 if serial % 8 else 6_000.0
