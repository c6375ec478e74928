"""Replay results written by hand, for tests of the figures and pictures that are made from them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from simulator.replay.result import (
    NEVER,
    HotPrefix,
    ReplayResult,
    RequestTable,
    Samples,
    Verdict,
    WorkerTotals,
)
from simulator.replay.setup import Goodput, Setup, WorkerGroup
from simulator.traces.spec import WorkloadSpec

MS = 1_000_000
S = 1_000_000_000
BLOCK_SIZE = 16
# The fields of a request by default; times in ms.
REQUEST = {
    "arrival": 0.0,
    "dispatched": None,  # as it arrives
    "first": 100.0,  # after the arrival; None: never
    "finish": 500.0,
    "prompt": 160,
    "output": 5,
    "expected": 80,
    "hit": 80,
    "worker": 0,
    "attempts": 1,
    "verdict": Verdict.COMPLETED,
    "held": 0.0,
    "session": NEVER,
    "group": NEVER,
}


def table(rows: Sequence[dict[str, Any]]) -> RequestTable:
    """Return a table of requests; each of `rows` has the fields in which a request differs from
    `REQUEST`.
    """
    full = [{**REQUEST, **row} for row in rows]

    def times(name: str) -> np.ndarray[Any, Any]:
        later = [None if r[name] is None else r["arrival"] + r[name] for r in full]
        return np.array([NEVER if t is None else round(t * MS) for t in later], dtype=np.int64)

    def column(name: str, kind: str = "int32") -> np.ndarray[Any, Any]:
        return np.array([row[name] for row in full], dtype=kind)

    arrivals = np.array([round(row["arrival"] * MS) for row in full], dtype=np.int64)
    sent = [NEVER if r["worker"] == NEVER else round(r["arrival"] * MS) for r in full]
    return RequestTable(
        arrival_ns=arrivals,
        dispatched_ns=np.array(sent, dtype=np.int64),
        first_token_ns=times("first"),
        finish_ns=times("finish"),
        prompt_tokens=column("prompt"),
        output_tokens=column("output"),
        prompt_blocks=column("prompt") // BLOCK_SIZE,
        expected_hit_tokens=column("expected"),
        hit_tokens=column("hit"),
        worker=column("worker"),
        attempts=column("attempts", "int16"),
        verdict=column("verdict", "int8"),
        held_ns=np.array([round(row["held"] * MS) for row in full], dtype=np.int64),
        session=column("session"),
        group=column("group"),
    )


def rejected(**fields: Any) -> dict[str, Any]:
    """Return the fields of a request that no worker took."""
    nothing = {"first": None, "finish": None, "output": 0, "expected": 0, "hit": NEVER}
    return {**nothing, "worker": NEVER, "attempts": 0, "verdict": Verdict.REJECTED, **fields}


def totals(name: str = "w0", **fields: Any) -> WorkerTotals:
    """Return a worker's totals, all zero except `fields`."""
    zero = dict.fromkeys(WorkerTotals.__dataclass_fields__, 0)
    return WorkerTotals(**{**zero, **fields, "name": name})  # type: ignore[arg-type]


def samples(workers: int = 1, count: int = 0, seed: int = 0) -> Samples:
    """Return `count` samples, one second apart, of workers that are busier the higher
    their number.
    """
    random = Random(seed)
    shape = (count, workers)
    cells = [[random.random() for _ in range(workers)] for _ in range(count)]
    load = np.array(cells, dtype=np.float64).reshape(shape) * np.linspace(0.2, 1.0, workers)
    queries = np.cumsum((load * 8_000).astype(np.int64), axis=0)
    return Samples(
        time_ns=np.arange(1, count + 1, dtype=np.int64) * S,
        busy_share=load,
        running=(load * 40).astype(np.int32),
        waiting=(load * 12 - 8).clip(0).astype(np.int32),
        used_blocks=(load * 9_000).astype(np.int32),
        query_tokens=queries,
        hit_tokens=queries * 3 // 5,
    )


def setup(policy: str = "hybrid", seed: int = 0, workers: int = 1, **fields: Any) -> Setup:
    """Return a set-up for a result that is made by hand; no test runs it."""
    return Setup(
        workload=WorkloadSpec("made_up.jsonl"),
        policy=policy,
        groups=(WorkerGroup(workers, "qwen3-32b-h100-tp2"),),
        seed=seed,
        goodput=Goodput(ttft_ms=200.0, tpot_ms=100.0),
        **fields,
    )


def result(rows: Sequence[dict[str, Any]] = ({},), **fields: Any) -> ReplayResult:
    """Return the result of a replay of `rows` on one worker, in ten seconds."""
    given: dict[str, Any] = {
        "setup": setup(),
        "policy": "hybrid",
        "params": {"load_factor": 1.0},
        "block_size": BLOCK_SIZE,
        "table": table(rows),
        "samples": samples(),
        "workers": (totals(requests=len(rows), busy_ns=2 * S),),
        "rejections": {},
        "retries": 0,
        "holds": 0,
        "trace_errors": 0,
        "simulated_ns": 10 * S,
        "wall_s": 0.5,
        **fields,
    }
    return ReplayResult(**given)


def busy_result(
    policy: str = "hybrid",
    seed: int = 0,
    workers: int = 8,
    requests: int = 400,
    wait_ms: float = 120.0,
    hits: float = 0.6,
) -> ReplayResult:
    """Return a result that looks like a real one: random times and hits, samples, hot prefixes, all
    kinds of verdicts.
    """
    random = Random(f"{policy} {seed}")
    rows: list[dict[str, Any]] = []
    for serial in range(requests):
        first = 60 + random.expovariate(1 / wait_ms)
        prompt = random.randrange(200, 8_000)
        hit = int(prompt * hits * random.random() * 2) // BLOCK_SIZE * BLOCK_SIZE
        hit = min(hit, (prompt - 1) // BLOCK_SIZE * BLOCK_SIZE)
        output = random.randrange(1, 300)
        rows.append(
            {
                "arrival": serial * 100.0 + random.random() * 50,
                "first": first,
                "finish": first + (output - 1) * random.uniform(12, 40),
                "prompt": prompt,
                "output": output,
                "hit": hit,
                "expected": hit if random.random() < 0.9 else 0,
                "worker": random.randrange(workers),
                "session": serial % (requests // 2 + 1),
                "held": 25.0 if serial == 7 else 0.0,
            }
        )
    rows[3] = {"arrival": 3.0, **rejected()}
    rows[5] = {**rows[5], "finish": None, "verdict": Verdict.FAILED}
    count = max(2, requests // 10)
    sampled = samples(workers, count, seed)
    per_worker = tuple(
        totals(
            f"w{number}",
            requests=sum(row.get("worker", 0) == number for row in rows),
            busy_ns=int(sampled.busy_share[:, number].sum() * S),
            query_tokens=int(sampled.query_tokens[-1, number]),
            hit_tokens=int(sampled.hit_tokens[-1, number]),
        )
        for number in range(workers)
    )
    copies = np.minimum(np.arange(count, dtype=np.int32) // 3, workers).astype(np.int32)
    return result(
        rows,
        setup=setup(policy, seed, workers),
        policy=policy,
        samples=sampled,
        workers=per_worker,
        rejections={"queue_full": 1},
        simulated_ns=count * S,
        hot=(HotPrefix(24, 310, copies), HotPrefix(6, 120, copies // 2)),
    )
