"""Workloads: their shape, their order, their bounds."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.live.client import prompt_tokens
from simulator.live.load import Workload, WorkloadError, generated_shared_prefix, opened
from simulator.replay.setup import WorkloadSpec


def test_groups_share_their_system_prompt_and_nothing_else() -> None:
    workload = generated_shared_prefix(3, 4, 60, 25, 8, 10.0, seed=1)
    assert workload.block_tokens == 5
    assert len(workload.jobs) == 12
    prompts = [
        prompt_tokens(job.ids, job.prompt_tokens, serial, workload.block_tokens)
        for serial, job in enumerate(workload.jobs)
    ]
    assert {len(prompt) for prompt in prompts} == {85}
    systems = {tuple(prompt[:60]) for prompt in prompts}
    assert len(systems) == 3
    assert len({tuple(prompt[60:]) for prompt in prompts}) == 12
    for system in systems:
        assert sum(tuple(prompt[:60]) == system for prompt in prompts) == 4


def test_poisson_arrivals_have_their_rate_and_even_ones_their_gap() -> None:
    poisson = generated_shared_prefix(1, 3000, 600, 100, 8, 60.0, seed=2)
    times = np.array([job.at_ns / 1e9 for job in poisson.jobs])
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert 1 / gaps.mean() == pytest.approx(60, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.1)
    even = generated_shared_prefix(1, 10, 600, 100, 8, 50.0, seed=2, arrivals="even")
    assert even.span_s == pytest.approx(9 / 50)


def test_same_seed_same_workload() -> None:
    def make(seed: int) -> list[tuple[int, bytes]]:
        workload = generated_shared_prefix(2, 5, 64, 32, 8, 60.0, seed)
        return [(job.at_ns, job.ids.tobytes()) for job in workload.jobs]

    assert make(1) == make(1)
    assert make(1) != make(2)


@pytest.mark.parametrize("wrong", range(6))
def test_sizes_must_be_positive(wrong: int) -> None:
    sizes = [1, 1, 1, 1, 1, 1.0]
    sizes[wrong] = 0
    with pytest.raises(ValueError, match="above 0"):
        generated_shared_prefix(*sizes, seed=1)  # type: ignore[arg-type]


def test_a_source_is_held_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = WorkloadSpec("gen:vllm?requests=50&rate=10")
    workload = opened(spec, "prefixes", "test")
    assert len(workload.jobs) == 50
    assert workload.span_s == workload.jobs[-1].at_ns / 1e9
    monkeypatch.setattr("simulator.live.load.MAX_REQUESTS", 49)
    with pytest.raises(WorkloadError, match="more than 49 requests"):
        opened(spec, "prefixes", "test")
    with pytest.raises(WorkloadError, match="no requests"):
        Workload("nothing", (), 16, "test")
