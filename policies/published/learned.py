"""Learned choice: a utility linear in 23 features, its coefficients found by search in replays."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.resources import files
from math import isfinite
from typing import Any

import numpy as np

from policies.contract import FleetView, Floats, RequestView
from policies.published.choice_features import FEATURES, HOME, RELATIVE, Asked, features

WEIGHTS = "learned_weights.json"  # beside this file


def trained() -> tuple[float, ...]:
    """The coefficients that come with warmroute; the file says where they come from."""
    told = json.loads(files(__package__).joinpath(WEIGHTS).read_text())["theta"]
    return tuple(float(told[name]) for name in FEATURES)


@dataclass(frozen=True, slots=True)
class Learned:
    """cost = -utility, utility = sum over the 23 features of theta x feature; the best one wins.

    `theta`: 23 numbers with commas between, in the order of `choice_features.FEATURES`; empty: the
    ones in `WEIGHTS`. With -1 for log_ptok and log_batch and 0 for the rest it is LMetric's
    product, (queued + missing) x (requests + 1).

    Source: NVIDIA Dynamo's `learned-choice` v2 (2026), a multinomial logit (McFadden, 1974) trained
    by CMA-ES. Without its context terms; its temperature is `temperature`, which scales by range.

    Spill depth: of its coefficients; with LMetric's (P / missing) - 1 requests for P prompt tokens.
    Unknown hits are taken as they are; see `features` for what else may be unknown.
    """

    theta: str = ""
    _minus_theta: Floats = field(init=False, repr=False, compare=False)  # [23, 1]
    _asked: Asked = field(init=False, repr=False, compare=False)  # by `features`

    def __post_init__(self) -> None:
        told = _parsed(self.theta) if self.theta else _TRAINED
        object.__setattr__(self, "_minus_theta", -np.array(told)[:, np.newaxis])
        object.__setattr__(self, "_asked", (any(told[HOME]), any(told[RELATIVE])))

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        # Row by row, not by a matrix product: that adds up in an order of each machine's own.
        table = features(request, fleet, self._asked)
        costs: Floats = np.add.reduce(table * self._minus_theta, axis=0)
        return costs

    def terms(self, request: RequestView, fleet: FleetView, state: Any) -> dict[str, Floats]:
        """What each feature adds to the costs, without those that add nothing."""
        table = features(request, fleet, self._asked) * self._minus_theta
        return {name: table[row] for row, name in enumerate(FEATURES) if table[row].any()}


def _parsed(theta: str) -> tuple[float, ...]:
    try:
        told = tuple(float(text) for text in theta.split(","))
    except ValueError as error:
        raise ValueError(f"theta: {error}; give numbers with commas between") from None
    if len(told) != len(FEATURES) or not all(map(isfinite, told)):
        raise ValueError(f"theta has {len(told)} numbers; give {len(FEATURES)} finite ones")
    return told


_TRAINED = trained()
