"""Who is ahead by a figure, and whether by more than the seeds are apart."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.report.aggregate import Interval, paired, values
from simulator.report.figures import Figure
from simulator.report.row import ReplayRow

Groups = Mapping[str, Sequence[ReplayRow]]  # `aggregate.by_policy`


@dataclass(frozen=True, slots=True)
class Lead:
    """The best policy by one figure and the next one. Lifetime: process."""

    figure: Figure
    winner: str
    value: float  # mean over the winner's seeds
    second: str
    other: float  # mean over the second's seeds
    difference: Interval | None  # winner minus second, seed by seed; None: no common seed

    @property
    def sure(self) -> bool | None:
        """Whether it is more than the seeds' spread; None where one seed cannot tell."""
        if self.difference is None or self.difference.low is None:
            return None
        return self.difference.excludes_zero()

    @property
    def spreads(self) -> float | None:
        """The lead as a multiple of half its 95 % interval; None where that is nothing."""
        half = self.difference.half if self.difference else None
        return abs(self.difference.mean) / half if self.difference and half else None


def means(figure: Figure, groups: Groups) -> dict[str, float]:
    """Label -> mean over its seeds, the best first, of those that have the figure."""
    told = {label: values(figure, rows) for label, rows in groups.items()}
    found = {label: statistics.fmean(sample) for label, sample in told.items() if sample}
    ordered = sorted(found, key=found.__getitem__, reverse=figure.better == "higher")
    return {label: found[label] for label in ordered}


def lead(figure: Figure, groups: Groups) -> Lead | None:
    """Who leads by `figure`; None where fewer than two have it or the best two are equal."""
    ranked = list(means(figure, groups).items())
    if len(ranked) < 2 or ranked[0][1] == ranked[1][1]:
        return None
    (winner, value), (second, other) = ranked[:2]
    difference = paired(figure, groups[winner], groups[second])
    return Lead(figure, winner, value, second, other, difference)
