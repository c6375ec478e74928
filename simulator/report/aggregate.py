"""Several seeds as one: mean and 95 % interval of each figure, and differences seed by seed.

Policies replay the same seeds, that is the same workloads, so the difference of two policies is
taken within each seed first: what the seeds have in common cancels (common random numbers, see Law
and Kelton, "Simulation Modeling and Analysis").
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from simulator.report.figures import FIGURES, Figure, labels
from simulator.report.row import ReplayRow

DIGITS = 6
# 97.5 % quantiles of Student's t for 1, 2, ... 30 degrees of freedom.
STUDENT_T = (
    12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157,
    2.228139, 2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922,
    2.093024, 2.085963, 2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831,
    2.048407, 2.045230, 2.042272,
)  # fmt: skip
NORMAL = 1.959963985  # 97.5 % quantile of the normal distribution


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mean over seeds and its 95 % interval; `low` and `high` are null for a single seed."""

    mean: float
    low: float | None
    high: float | None
    seeds: int  # that had a value

    @property
    def half(self) -> float | None:
        """Half of the interval's width: what stands after ±."""
        return None if self.high is None else self.high - self.mean

    def excludes_zero(self) -> bool:
        """Whether the seeds agree on the sign: False as long as there is one seed only."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


class Aggregate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One policy over its seeds. Keys are names of `figures.FIGURES`; null: never measured."""

    label: str  # the policy, with the parameters that tell it from others of its name
    policy: str
    params: dict[str, bool | int | float | str]
    seeds: tuple[int, ...]
    figures: dict[str, Interval | None]
    versus: str | None  # label of the first policy; null for itself
    differences: dict[str, Interval | None]  # this one minus the first, over the seeds both have


def aggregate(rows: Sequence[ReplayRow]) -> tuple[Aggregate, ...]:
    """One for each policy and its parameters, in the order of their first rows.

    `ValueError` where a policy has two rows of one seed.
    """
    groups = by_policy(rows)
    first = next(iter(groups), None)
    return tuple(
        Aggregate(
            label=label,
            policy=own[0].policy,
            params=own[0].params,
            seeds=tuple(row.seed for row in own),
            figures={f.name: interval(values(f, own)) for f in FIGURES},
            versus=None if label == first else first,
            differences=(
                {}
                if first is None or label == first
                else {f.name: paired(f, own, groups[first]) for f in FIGURES}
            ),
        )
        for label, own in groups.items()
    )


def by_policy(rows: Sequence[ReplayRow]) -> dict[str, list[ReplayRow]]:
    """Label of a policy -> its rows, in the order of their first rows.

    `ValueError` where a policy has two rows of one seed.
    """
    groups: dict[str, list[ReplayRow]] = {}
    for row, label in zip(rows, labels(rows), strict=True):
        own = groups.setdefault(label, [])
        if any(other.seed == row.seed for other in own):
            raise ValueError(f"{label} has two rows of seed {row.seed}; give each seed once")
        own.append(row)
    return groups


def values(figure: Figure, rows: Sequence[ReplayRow]) -> list[float]:
    """The figure in each row that has it."""
    return [value for value in map(figure.of, rows) if value is not None]


def paired(
    figure: Figure, rows: Sequence[ReplayRow], others: Sequence[ReplayRow]
) -> Interval | None:
    """Mean and interval of `rows` minus `others`, seed by seed; None without a common seed."""
    there = {row.seed: figure.of(row) for row in others}
    pairs = [(figure.of(row), there.get(row.seed)) for row in rows]
    return interval([a - b for a, b in pairs if a is not None and b is not None])


def interval(sample: Sequence[float]) -> Interval | None:
    """Mean and 95 % interval (Student's t) of independent values; None where there are none."""
    count = len(sample)
    if not count:
        return None
    mean = statistics.fmean(sample)
    if count == 1:
        return Interval(round(mean, DIGITS), None, None, 1)
    # statistics.stdev works with exact fractions: its last digit does not depend on the order.
    half = student_t(count - 1) * statistics.stdev(sample) / math.sqrt(count)
    return Interval(
        round(mean, DIGITS), round(mean - half, DIGITS), round(mean + half, DIGITS), count
    )


def student_t(freedom: int) -> float:
    """97.5 % quantile of Student's t with `freedom` >= 1 degrees of freedom, to five digits.

    Beyond the table by the expansion around the normal quantile of Abramowitz and Stegun,
    "Handbook of Mathematical Functions" (1964), 26.7.5.
    """
    if freedom <= len(STUDENT_T):
        return STUDENT_T[freedom - 1]
    z = NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / float(freedom) ** n for n, term in enumerate(terms, 1))
