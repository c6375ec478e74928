"""Fits the kernels' part of a step time to the rows of a table.

The largest relative error of any row is what counts, so the fit lowers a high power of the errors'
logarithms: rows of a table carry no noise that would have to be forgiven. A third of the rows,
drawn by a seed, is held out: the fit never sees it, and its errors show how far the form carries.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.step_time import LEAST_P, StepTime
from simulator.capacity.rates import step_s
from simulator.step_times.tables import TableRow

HELD_SHARE = 1 / 3
DIGITS = 4  # of a constant: further ones are the processor's
MOST_P = 30.0  # a soft maximum is as good as a maximum then
_POWERS = (1, 2, 3)  # of the errors that are squared: each fit starts where the one before ended
_STARTS = (0.0, 1.0, -1.0)  # of all constants, in logarithms around `_GUESS`
_GUESS = {"linear_s": 2e-5, "pair_s": 1e-9, "weights_s": 3e-3, "context_s": 5e-8}
_SCALE = 10.0  # of errors before they are raised: 10 % counts 1


@dataclass(frozen=True, slots=True)
class KernelFit:
    """A fitted step time, and its relative errors model / table - 1 in the order of `rows`."""

    step_time: StepTime
    rows: tuple[TableRow, ...]
    held: frozenset[int]  # the places of the rows that the fit did not see

    @property
    def errors(self) -> npt.NDArray[np.float64]:
        """The errors of all rows."""
        return errors(self.step_time, self.rows)


def fit_kernels(
    rows: Sequence[TableRow], expert_share: float = 0.0, seed: int = 0, cpu: StepTime | None = None
) -> KernelFit:
    """Return the step time whose kernels are nearest to two thirds of `rows`; `cpu` gives the CPU
    time.

    `expert_share` is the share of routed experts that one token visits; 0 for a dense model. Mixed
    steps are compared but not fitted, because they are sums of other steps.
    """
    order = [place for place, row in enumerate(rows) if row.kind != "mixed"]
    random.Random(seed).shuffle(order)
    held = frozenset(order[: round(len(order) * HELD_SHARE)])
    seen = [rows[place] for place in sorted(set(order) - held)]
    found = min(
        (_descend(seen, expert_share, start) for start in _STARTS),
        key=lambda one: float(np.abs(errors(one, seen)).max()),
    )
    cpu = cpu or StepTime(0.0, 0.0, 0.0, 0.0)
    digits = {name: float(f"{getattr(found, name):.{DIGITS}g}") for name in _names(expert_share)}
    step_time = StepTime(
        **digits,
        expert_share=expert_share,
        overhead_s=cpu.overhead_s,
        seq_s=cpu.seq_s,
    )
    return KernelFit(step_time, tuple(rows), held)


def errors(step_time: StepTime, rows: Sequence[TableRow]) -> npt.NDArray[np.float64]:
    """Return float64[rows]: the kernels' seconds by `step_time` over the seconds of the table,
    minus 1.
    """
    columns = np.array(
        [(r.prefill_tokens + r.decodes, r.pairs, r.decodes * r.context_tokens) for r in rows]
    ).T
    seconds = np.array([row.seconds for row in rows])
    tokens, pairs, read = columns
    ratio: npt.NDArray[np.float64] = step_s(step_time.kernels, tokens, 0, pairs, read) / seconds
    return ratio - 1.0


def _names(expert_share: float) -> tuple[str, ...]:
    return (*_GUESS, *(("experts_s",) if expert_share else ()), "softmax_p")


def _descend(rows: Sequence[TableRow], expert_share: float, start: float) -> StepTime:
    """Return the step time at the nearest minimum of the error, found by descent from a first guess
    with the sharpness `start`.
    """
    from scipy.optimize import least_squares  # of the extra `sim`

    names = _names(expert_share)
    guess = [*_GUESS.values(), *((3e-3,) if expert_share else ()), 1.0]

    def step_time(point: npt.NDArray[np.float64]) -> StepTime:
        values = dict(zip(names, np.exp(np.clip(point, -60.0, 20.0)).tolist(), strict=True))
        values["softmax_p"] = LEAST_P + min(values["softmax_p"], MOST_P)
        return StepTime(**values, expert_share=expert_share, overhead_s=0.0, seq_s=0.0)

    def raised(point: npt.NDArray[np.float64], power: int) -> npt.NDArray[np.float64]:
        off = np.log1p(errors(step_time(point), rows)) * _SCALE
        return np.asarray(np.sign(off) * np.abs(off) ** power)

    point = np.log(guess) + start
    for power in _POWERS:
        point = least_squares(raised, point, args=(power,), max_nfev=2000).x
    return step_time(point)
