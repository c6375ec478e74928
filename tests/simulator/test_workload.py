"""Workloads: their shape, their order, their bounds."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.prompt import prompt_tokens
from simulator.trace import TraceRow
from simulator.workload import Workload, first_seconds, generated_shared_prefix


def test_groups_share_their_system_prompt_and_nothing_else() -> None:
    workload = generated_shared_prefix(3, 4, 60, 25, 8, 10.0, seed=1)
    assert workload.block_tokens == 5
    assert len(workload.rows) == 12
    prompts = [
        prompt_tokens(row.hash_ids, row.input_tokens, serial, workload.block_tokens)
        for serial, row in enumerate(workload.rows)
    ]
    assert {len(prompt) for prompt in prompts} == {85}
    systems = {tuple(prompt[:60]) for prompt in prompts}
    assert len(systems) == 3
    assert len({tuple(prompt[60:]) for prompt in prompts}) == 12
    for system in systems:
        assert sum(tuple(prompt[:60]) == system for prompt in prompts) == 4


def test_poisson_arrivals_have_their_rate_and_even_ones_their_gap() -> None:
    poisson = generated_shared_prefix(1, 3000, 600, 100, 8, 60.0, seed=2)
    times = np.array([row.arrival_s for row in poisson.rows])
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert 1 / gaps.mean() == pytest.approx(60, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.1)
    even = generated_shared_prefix(1, 10, 600, 100, 8, 50.0, seed=2, arrivals="even")
    assert even.rows[-1].arrival_s == pytest.approx(9 / 50)


def test_same_seed_same_workload() -> None:
    def make(seed: int) -> Workload:
        return generated_shared_prefix(2, 5, 64, 32, 8, 60.0, seed)

    assert make(1) == make(1)
    assert make(1) != make(2)


@pytest.mark.parametrize("wrong", range(6))
def test_sizes_must_be_positive(wrong: int) -> None:
    sizes = [1, 1, 1, 1, 1, 1.0]
    sizes[wrong] = 0
    with pytest.raises(ValueError, match="above 0"):
        generated_shared_prefix(*sizes, seed=1)  # type: ignore[arg-type]


def test_first_seconds_reads_no_further() -> None:
    def rows() -> object:
        yield TraceRow(0.0, 1, 1, (0,))
        yield TraceRow(4.9, 1, 1, (0,))
        yield TraceRow(5.0, 1, 1, (0,))
        raise AssertionError("read too far")

    workload = first_seconds(rows(), 5.0, "conversation", "test")  # type: ignore[arg-type]
    assert len(workload.rows) == 2
    assert workload.span_s == 4.9
    assert workload.faster(2).span_s == 2.45
    with pytest.raises(ValueError, match="above 0"):
        workload.faster(0)
    with pytest.raises(ValueError, match="no requests"):
        first_seconds([], 5.0, "conversation", "test")
