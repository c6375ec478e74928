"""Fits the shares in simulator/step_times/gpus.py to table_rows.csv, and prints them.

    python -m tests.simulator.step_times.fit_shares [GPU...]

It also prints errors: those of the fitted shares, and those of each model under shares that were
fitted to the other models alone. The latter tell what to expect of a model that no table covers.
The fit minimises least squares of the logarithms of times with a soft loss, so that no single odd
row counts for much. A share that no row of a GPU depends on stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log

import numpy as np
from scipy.optimize import least_squares

from simulator.step_times.gpus import GPUS, Gpu, Shares
from tests.simulator.step_times.table_rows import (
    Case,
    Errors,
    errors_by_kind,
    read_cases,
    seconds_of,
    summary,
)

PLAIN = (
    "weights", "kv", "kv_fp8", "kv_latent", "attention", "narrow_attention", "latent_attention",
    "layer_s", "p", "experts_p",
)  # fmt: skip
MOST = {"layer_s": 2e-4, "p": 10.0, "experts_p": 10.0}
LEAST = {"layer_s": 1e-6, "p": 0.5, "experts_p": 0.4}
LITTLE = 1e-9  # a share counts if a tenth more of it changes a time by more


def numbers_of(shares: Shares) -> dict[str, float]:
    """Return all fitted numbers by name."""
    found = {name: getattr(shares, name) for name in PLAIN}
    found |= {f"gemm {kind}": value for kind, value in shares.gemm.items()}
    return found | {f"experts {kind}": value for kind, value in shares.experts.items()}


def shares_of(numbers: dict[str, float], start: Shares) -> Shares:
    """Return shares with these numbers, as the reverse of `numbers_of`; everything else comes from
    `start`.
    """
    return replace(
        start,
        **{name: numbers[name] for name in PLAIN},
        gemm={kind: numbers[f"gemm {kind}"] for kind in start.gemm},
        experts={kind: numbers[f"experts {kind}"] for kind in start.experts},
    )


def fitted(gpu: Gpu, cases: Sequence[Case]) -> Gpu:
    """Return `gpu` with the shares that fit `cases` best."""
    first = numbers_of(gpu.shares)

    def residuals(numbers: dict[str, float]) -> np.ndarray:
        tried = replace(gpu, shares=shares_of(numbers, gpu.shares))
        return np.array(
            [
                log(seconds_of(step_time, load) / load.seconds)
                for case in cases
                for step_time in (case.step_time(tried),)
                for load in case.loads
            ]
        )

    base = residuals(first)
    moved = {name: residuals({**first, name: value * 1.1}) for name, value in first.items()}
    names = [name for name in first if np.abs(moved[name] - base).max() > LITTLE]

    def numbers_at(point: np.ndarray) -> dict[str, float]:
        return {**first, **{name: exp(value) for name, value in zip(names, point, strict=True)}}

    found = least_squares(
        lambda point: residuals(numbers_at(point)),
        [log(first[name]) for name in names],
        bounds=(
            [log(LEAST.get(name, 0.02)) for name in names],
            [log(MOST.get(name, 0.97)) for name in names],
        ),
        loss="soft_l1",
        f_scale=0.1,
        max_nfev=40,
    )
    return replace(gpu, shares=shares_of(numbers_at(found.x), gpu.shares))


def unseen(gpu: Gpu, cases: Sequence[Case]) -> Errors:
    """Return the errors of each model under shares that are fitted to the other models."""
    found: Errors = {}
    for model in sorted({case.model for case in cases}):
        others = fitted(gpu, [case for case in cases if case.model != model])
        held = [case for case in cases if case.model == model]
        for kind, errors in errors_by_kind(held, others).items():
            found.setdefault(kind, []).extend(errors)
    return found


def main(names: Sequence[str]) -> None:
    """Print the shares and the errors of each GPU."""
    every = read_cases()
    for name in names or tuple(GPUS):
        cases = [case for case in every if case.gpu == name]
        gpu = fitted(GPUS[name], cases)
        print(name, {key: float(f"{value:.3g}") for key, value in numbers_of(gpu.shares).items()})
        for title, errors in (
            ("fitted", errors_by_kind(cases, gpu)),
            ("unseen", unseen(gpu, cases)),
        ):
            for kind, values in errors.items():
                middle, most, worst = summary(values)
                print(f"  {title} {kind}: median {middle:.1f}, p90 {most:.1f}, worst {worst:.0f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
