"""Tests of the calibration of shared decode by a timer: it finds known costs, and avoids plans that
were measured slower.
"""

from __future__ import annotations

import random

import pytest
import torch

from kvkernels.ops.calibration import (
    ALWAYS,
    GRID,
    MOST_SLOWER,
    NEVER,
    PAGE,
    SAMPLES,
    Mix,
    calibrate,
)
from kvkernels.ops.shared_costs import AttentionShape, Costs
from kvkernels.ops.shared_decode import Step, plan_shared

SHAPE = AttentionShape(32, 8, 128)
TRUE = Costs(250.0, 120.0, 3000.0, 90.0, 11.0)


class Timer:
    """A timer that gives the times of `costs`, with noise and a share of `outliers`; shared plans
    take `slow` times as long.
    """

    def __init__(
        self, costs: Costs = TRUE, noise: float = 0.0, outliers: float = 0.0, slow: float = 1.0
    ) -> None:
        self.costs, self.noise, self.outliers, self.slow = costs, noise, outliers, slow
        self.draw, self.calls = random.Random(7), 0

    def __call__(self, step: Step, table: torch.Tensor, pages: int) -> float:
        self.calls += 1
        assert int(table.max()) < pages
        made_ns = self.costs.of(step.work) * self.draw.uniform(1 - self.noise, 1 + self.noise)
        made_ns *= self.slow if step.saving.shared_prefix_groups else 1.0
        return made_ns * (50 if self.draw.random() < self.outliers else 1)


def chosen(costs: Costs, mix: Mix) -> Step:
    return plan_shared(*mix.tables(), PAGE, SHAPE, costs)


def test_calibration_recovers_known_costs() -> None:
    told: list[tuple[int, int]] = []
    timer = Timer()
    made = calibrate(SHAPE, timer, on_progress=lambda done, all_: told.append((done, all_)))
    assert made.costs == pytest.approx(TRUE, rel=1e-6)
    assert not made.is_wary
    assert timer.calls == 2 * SAMPLES * len(GRID)
    assert told == [(done, len(GRID)) for done in range(len(GRID) + 1)]


def test_noise_and_outliers_change_chosen_plans_little() -> None:
    """Noise and outliers change the chosen plans little: under the true costs they take at most 10
    % longer than the better of both.
    """
    made = calibrate(SHAPE, Timer(noise=0.03, outliers=0.1))
    for mix in GRID:
        best = min(TRUE.of(chosen(costs, mix).work) for costs in (TRUE, NEVER))
        assert TRUE.of(chosen(made.costs, mix).work) <= 1.1 * best


def test_plans_that_were_measured_slower_are_not_chosen() -> None:
    """Plans that were measured slower are not chosen, on a device where sharing has a cost that no
    coefficient explains.
    """
    for slow in (1.3, 3.0, 50.0):
        made = calibrate(SHAPE, Timer(slow=slow))
        slower = [one for one in made.measured if one.shared_ns > MOST_SLOWER * one.plain_ns]
        assert slower
        for one in slower:
            assert chosen(made.costs, one.mix).saving.shared_prefix_groups == 0
    assert made.is_wary


def test_the_grid_of_mixes_determines_each_cost() -> None:
    """The grid of measured mixes determines each cost: a cost that is higher by half changes some
    mix's time by a tenth, since a fit would otherwise guess it. Partial results are a few percent
    of any time, because decode cuts requests into pieces.
    """
    for name in Costs._fields[:-1]:  # all but `sharing`, which is no time
        dearer = TRUE._replace(**{name: 1.5 * getattr(TRUE, name)})
        steps = [chosen(costs, mix).work for mix in GRID for costs in (NEVER, ALWAYS)]
        change = max(dearer.of(work) / TRUE.of(work) for work in steps)
        assert change > (1.02 if name == "partial_mb" else 1.1)


def test_times_of_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        calibrate(SHAPE, lambda step, table, pages: 0.0)
