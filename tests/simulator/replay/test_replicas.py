"""Tests of several routers in front of one pool: the gain of sharing state, and that no request is
lost between them.
"""

from __future__ import annotations

import msgspec
import pytest

from simulator.replay.result import ReplayResult, Verdict
from simulator.replay.run import replay
from simulator.replay.setup import ReplayError, Setup, WorkerGroup, World
from simulator.traces.spec import WorkloadSpec

POOL = (WorkerGroup(8, "qwen3-32b-h100-tp2", max_num_tokens=8192, prefix_wait_tokens=0),)
SHARED = WorkloadSpec("gen:shared?rate=60", requests=1500)


def replayed(requests: int = 1500, **world: object) -> ReplayResult:
    around = World(**world)  # type: ignore[arg-type]
    load = msgspec.structs.replace(SHARED, requests=requests)
    return replay(Setup(load, "warmset", POOL, block_size=64, world=around))


def mean_ttft_s(result: ReplayResult) -> float:
    table = result.table
    assert (table.verdict == Verdict.COMPLETED).all()
    return float((table.first_token_ns - table.arrival_ns).mean()) / 1e9


def test_replicas_that_share_state_decide_nearly_like_one() -> None:
    one = mean_ttft_s(replayed())
    four = mean_ttft_s(replayed(replicas=4, replica_lag_ms=1.0))
    strangers = mean_ttft_s(replayed(replicas=4, replicas_share=False))
    assert four < 1.05 * one < 1.2 * one < strangers


def test_held_requests_continue_when_a_peers_request_ends(tmp_path) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("- {at_s: 2, worker: 1, do: die}\n- {at_s: 6, do: restart, worker: 1}\n")
    tight = (msgspec.structs.replace(POOL[0], count=3, kv_tokens=30_000),)
    world = World(replicas=3, event_loss=0.05)
    load = msgspec.structs.replace(SHARED, requests=300)
    result = replay(Setup(load, "warmset", tight, block_size=64, world=world, faults=str(faults)))
    assert result.holds > 0
    assert set(result.table.verdict) <= {Verdict.COMPLETED, Verdict.FAILED}


def test_a_replay_of_replicas_is_the_same_each_time() -> None:
    first, again = (replayed(300, replicas=3) for _ in range(2))
    assert (first.table.first_token_ns == again.table.first_token_ns).all()
    assert (first.table.worker == again.table.worker).all()


@pytest.mark.parametrize("replicas", [0, 65])
def test_a_wrong_number_of_replicas_is_refused(replicas: int) -> None:
    with pytest.raises(ReplayError, match=r"world\.replicas"):
        replayed(replicas=replicas)
