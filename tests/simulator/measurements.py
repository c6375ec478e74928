"""Measurements of steps made by a formula, from which a fit recovers the constants."""

from __future__ import annotations

import random

from engine.step_time import StepTime
from simulator.calibrate.fit import (
    ComputedLoad,
    Observation,
)

# Dense, with experts split and spread, with the sharpest and the softest corners there are.
REPRESENTATIVE = (
    "llama-3.1-8b-h100", "qwen3-32b-h100-tp4", "gpt-oss-120b-b200", "deepseek-r1-h200-tp8",
    "deepseek-r1-gb200-ep8",
)  # fmt: skip


def random_load(draw: random.Random) -> ComputedLoad:
    chunks = [(draw.randrange(16, 4096), draw.randrange(60_000)) for _ in range(draw.randrange(3))]
    decodes = draw.randrange(100) if chunks else draw.randrange(1, 100)
    return ComputedLoad(
        sum(tokens for tokens, _ in chunks),
        len(chunks),
        decodes,
        sum(draw.randrange(100, 20_000) for _ in range(decodes)),
        sum(tokens * (start + tokens / 2) for tokens, start in chunks),
    )


def observed(step_time: StepTime, noise: float, steps: int = 1500) -> list[Observation]:
    draw = random.Random(1)
    loads = [random_load(draw) for _ in range(steps)]
    return [Observation((x,), step_time.seconds(x) * draw.gauss(1.0, noise)) for x in loads]


def stalled(step_time: StepTime) -> list[Observation]:
    """Return measurements with noise, in which one step in fifty takes 20 times as long."""
    draw = random.Random(2)
    return [
        row._replace(seconds=row.seconds * (20 if draw.random() < 0.02 else 1))
        for row in observed(step_time, noise=0.03)
    ]
