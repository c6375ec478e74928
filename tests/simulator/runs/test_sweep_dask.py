"""Tests of sweeps on a real Dask scheduler, whose workers are processes on loopback."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from simulator.runs.runs import RunOptions, sweep
from simulator.runs.task import SweepError
from tests.simulator import synthetic

distributed = pytest.importorskip("distributed", reason="the extra dask is not installed")


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment after a test, because a cluster leaves variables that are meant for
    its workers alone.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("marks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWEEP_MARKS", str(folder))
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
        yield folder


@pytest.fixture(scope="module")
def scheduler(marks: Path) -> Iterator[str]:
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        host="127.0.0.1",
        local_directory=str(marks.parent),
    ) as cluster:
        yield cluster.scheduler_address


def on(scheduler: str, tmp_path: Path) -> RunOptions:
    return RunOptions(tmp_path / "dask.jsonl", dask=scheduler)


def test_a_dask_cluster_gives_the_same_results_as_processes(scheduler: str, tmp_path: Path) -> None:
    asked = [synthetic.setup(policy, seed) for policy in synthetic.FACTORS for seed in range(5)]
    there = sweep(asked, on(scheduler, tmp_path), Console(file=io.StringIO()), synthetic.evaluate)
    here = sweep(
        asked,
        RunOptions(tmp_path / "here.jsonl", 1),
        Console(file=io.StringIO()),
        synthetic.evaluate,
    )
    assert there == here


def test_a_killed_worker_costs_its_run_one_more_try(
    scheduler: str, tmp_path: Path, marks: Path
) -> None:
    asked = [synthetic.setup(seed=seed) for seed in range(4)]
    outcomes = sweep(
        asked, on(scheduler, tmp_path), Console(file=io.StringIO()), synthetic.killed_once
    )
    assert (marks / "killed-1").exists()
    assert [outcome.error for outcome in outcomes] == [None] * 4


def test_a_run_that_raises_fails_alone(scheduler: str, tmp_path: Path) -> None:
    asked = [synthetic.setup(seed=seed) for seed in range(3)]
    outcomes = sweep(asked, on(scheduler, tmp_path), Console(file=io.StringIO()), synthetic.raises)
    assert [outcome.row is None for outcome in outcomes] == [False, True, False]
    assert outcomes[1].error == "ValueError: a prompt of 9,000 tokens fits no worker"


def test_a_missing_scheduler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.runs.executor.CONNECT_S", 0.2)
    with pytest.raises(SweepError, match=r"--dask tcp://127\.0\.0\.1:9: no scheduler answers"):
        sweep([], on("tcp://127.0.0.1:9", tmp_path), Console(file=io.StringIO()))
    with pytest.raises(SweepError, match="no scheduler answers"):
        sweep([], on("nonsense://x", tmp_path), Console(file=io.StringIO()))


def test_a_cluster_without_workers_is_reported(tmp_path: Path) -> None:
    with (
        distributed.LocalCluster(
            n_workers=0, dashboard_address="127.0.0.1:0", host="127.0.0.1"
        ) as empty,
        pytest.raises(SweepError, match="has no workers; start some"),
    ):
        sweep([], on(empty.scheduler_address, tmp_path), Console(file=io.StringIO()))
