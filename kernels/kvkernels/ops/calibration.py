"""Measures the costs of shared decode on the current device: it times plans for the steps of a
small grid, and fits costs to the times.

The model of time in `shared_costs` is a coarse sum, so the fit is trusted only as far as it agrees
with the measurements. If the fitted costs would choose a shared plan that was measured slower than
plain decode, the gain that a shared run must promise (`Costs.sharing`) is raised until that plan is
not chosen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvkernels.ops.shared_costs import AttentionShape, Costs, Work, fit
from kvkernels.ops.shared_decode import Step, plan_shared

PAGE = 16
MOST_SLOWER = 1.03  # than plain decode, of a shared plan that is chosen
SAMPLES = 9  # of each plan; the median counts
LEAST_GAIN_NS = 50.0  # of a run, the first that is tried; doubled until it is enough
NEVER = Costs(sharing=1e15)
ALWAYS = Costs(0.0, 1.0, 0.0, 0.0, 0.0)  # bytes are all that costs


class Mix(NamedTuple):
    """A decode step of the grid: requests in groups, where each group has a common prefix and
    shares nothing with other groups.
    """

    requests: int
    groups: int
    prefix_tokens: int
    own_tokens: int

    def tables(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the context tokens, the page table, and the number of pages of the step."""
        prefix, own = self.prefix_tokens // PAGE, -(-self.own_tokens // PAGE)
        each = self.requests // self.groups
        table = torch.empty(self.requests, prefix + own, dtype=torch.int32)
        shared = torch.arange(self.groups * prefix).view(self.groups, prefix)
        table[:, :prefix] = shared.repeat_interleave(each, dim=0)
        first = self.groups * prefix
        table[:, prefix:] = first + torch.arange(self.requests * own).view(self.requests, own)
        context = torch.full((self.requests,), prefix * PAGE + self.own_tokens)
        return context, table, first + self.requests * own


# Few and many requests, short and long contexts, one group and several: each cost is large in some
# of them.
GRID = (
    *(Mix(each, 1, prefix, 256) for each in (2, 8, 32) for prefix in (256, 2048, 8192)),
    *(Mix(32, groups, 1024, 512) for groups in (4, 16)),
    *(Mix(requests, 1, 16, 1024) for requests in (1, 16, 64)),
    Mix(128, 4, 2048, 128),
)
# Returns the nanoseconds of one layer's attention by a plan over this many pages.
Time = Callable[[Step, torch.Tensor, int], float]


class Measured(NamedTuple):
    """A step of the grid, the work of its plain plan and of its shared plan, and the times of both
    in nanoseconds.
    """

    mix: Mix
    plain: Work
    shared: Work
    plain_ns: float
    shared_ns: float


class Calibration(NamedTuple):
    """The result of a calibration: the costs and the measurements. `is_wary` is True if the gain
    that a shared run must promise was raised above the fitted one, because shared plans were
    measured slower than plain decode.
    """

    costs: Costs
    is_wary: bool
    measured: list[Measured]


def calibrate(
    shape: AttentionShape,
    time_ns: Time,
    grid: Sequence[Mix] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, all_: None,
) -> Calibration:
    """Measure the plain and the shared plan of each step of `grid` (default GRID) in turn, report
    progress to `on_progress`, and return the costs.

    `time_ns(step, page_table, pages)` returns the time of one run of one layer. Raises ValueError
    for times that are not above 0.
    """
    grid, measured = grid or GRID, []
    for number, mix in enumerate(grid):
        on_progress(number, len(grid))
        context, table, pages = mix.tables()
        plain, shared = (
            plan_shared(context, table, pages, PAGE, shape, costs) for costs in (NEVER, ALWAYS)
        )
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(SAMPLES):  # in turn: what disturbs one disturbs the other
            for step, own in zip((plain, shared), times, strict=True):
                own.append(time_ns(step, table, pages))
        medians = [statistics.median(own) for own in times]
        measured.append(Measured(mix, plain.work, shared.work, medians[0], medians[1]))
    on_progress(len(grid), len(grid))
    works = [one.plain for one in measured] + [one.shared for one in measured]
    found = fit(works, [one.plain_ns for one in measured] + [one.shared_ns for one in measured])
    costs = with_safety_margin(shape, found, measured)
    return Calibration(costs, costs != found, measured)


def with_safety_margin(shape: AttentionShape, costs: Costs, measured: Sequence[Measured]) -> Costs:
    """Return `costs` with the required gain of sharing raised, so far that no step is shared that
    was measured slower when shared.
    """
    slower = [one.mix for one in measured if one.shared_ns > MOST_SLOWER * one.plain_ns]
    while any(_shares(shape, costs, mix) for mix in slower):
        costs = costs._replace(sharing=max(LEAST_GAIN_NS, 2 * costs.sharing))
    return costs


def _shares(shape: AttentionShape, costs: Costs, mix: Mix) -> bool:
    step = plan_shared(*mix.tables(), PAGE, shape, costs)
    return step.saving.shared_prefix_groups > 0
