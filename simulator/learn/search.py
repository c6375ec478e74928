"""The search: CMA-ES over all coefficients but one, which only sets the scale.

Source: Hansen and Ostermeier, 2001; the library is `cmaes`. A utility that is multiplied by a
number chooses the same workers, so `PINNED` stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cmaes import CMA

from policies.contract import Floats
from policies.published.choice_features import FEATURES

Theta = tuple[float, ...]  # one number per feature
PINNED = FEATURES.index("log_ptok")
LMETRIC: Theta = tuple(-1.0 if name in ("log_ptok", "log_batch") else 0.0 for name in FEATURES)
# Features that differ by much more than 1 between workers, and by how much: the search steps in
# coefficients divided by these, so that one step along any of them changes choices about as much.
SPREAD = {
    "default_cost": 5.0,
    "new_prefill": 5.0,
    "active_prefill": 5.0,
    "prompt_x_active_prefill": 50.0,
    "active_prefill_ratio": 3.0,
    "active_prefill_excess": 5.0,
    "new_prefill_x_requests": 5.0,
    "prefill_attn": 50.0,
}
_STEPS = np.array([1.0 / SPREAD.get(name, 1.0) for n, name in enumerate(FEATURES) if n != PINNED])
DIGITS = 6  # of a coefficient: what is replayed is what is written down


class Search:
    """Asks for coefficients and is told their scores. Lifetime: one learning run."""

    def __init__(self, sigma: float, seed: int, population: int | None) -> None:
        self._cma = CMA(_free(LMETRIC), sigma, seed=seed, population_size=population)
        self.population: int = self._cma.population_size
        self.best, self.best_score = LMETRIC, 0.0  # the start scores 0 by definition

    def ask(self) -> list[Theta]:
        """The coefficients of the next generation."""
        return [_whole(self._cma.ask()) for _ in range(self.population)]

    def tell(self, thetas: Sequence[Theta], scores: Sequence[float]) -> None:
        """The scores of a generation, lower is better."""
        self._cma.tell([(_free(theta), s) for theta, s in zip(thetas, scores, strict=True)])
        for theta, found in zip(thetas, scores, strict=True):
            if found < self.best_score:
                self.best, self.best_score = theta, found

    @property
    def mean(self) -> Theta:
        """Where the search stands: often better elsewhere than the best of one draw."""
        return _whole(self._cma.mean)


def spec_of(theta: Theta) -> str:
    """The policy with these coefficients."""
    return "learned?theta=" + ",".join(str(number) for number in theta)


def _free(theta: Theta) -> Floats:
    free: Floats = np.array(theta[:PINNED] + theta[PINNED + 1 :]) / _STEPS
    return free


def _whole(free: Floats) -> Theta:
    numbers = [round(float(number), DIGITS) for number in free * _STEPS]
    return (*numbers[:PINNED], LMETRIC[PINNED], *numbers[PINNED:])
