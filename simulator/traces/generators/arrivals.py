"""When generated requests arrive: a rate with more or less burstiness, or stages of rates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from random import Random

from simulator.traces.errors import TraceError
from simulator.traces.stream import Stage
from simulator.traces.timing import NS

MAX_STAGES = 1_000
STAGE = re.compile(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)")


def at_rate(rate_per_s: float, count: int, random: Random, shape: float = 1.0) -> Iterator[int]:
    """`count` times in ns from 0, ascending; all 0 at an infinite rate.

    Gaps follow a gamma distribution of this `shape` and mean `1 / rate_per_s`: 1 is a Poisson
    process, less is burstier, an infinite one is even (as vLLM's bench_serving does, 2024).
    """
    at_s = 0.0
    for _ in range(count):
        yield round(at_s * NS)
        if rate_per_s == math.inf:
            continue
        if shape == math.inf:
            at_s += 1 / rate_per_s
        elif shape == 1.0:
            at_s += random.expovariate(rate_per_s)
        else:
            at_s += random.gammavariate(shape, 1 / (rate_per_s * shape))


def parse_stages(text: str, pause_s: float = 0.0, warm_ups: int = 0) -> tuple[Stage, ...]:
    """Stages of `rate:seconds,rate:seconds`, one after the other with `pause_s` between them.

    The first `warm_ups` of them are not to be reported. Raises `TraceError` for anything else,
    and for a stage without a request.
    """
    stages: list[Stage] = []
    start_ns = 0
    for part in text.split(","):
        match = STAGE.fullmatch(part.strip())
        if match is None:
            raise TraceError(f"stages: {part!r}: expected rate:seconds, as in 3:20,10:20")
        rate, seconds = float(match[1]), float(match[2])
        count = round(rate * seconds)
        if not count or seconds > 1e9 or count > 1e9 or len(stages) == MAX_STAGES:
            raise TraceError(f"stages: {part!r}: no request, or more than can be")
        end_ns = start_ns + round(seconds * NS)
        stages.append(Stage(start_ns, end_ns, rate, count, len(stages) < warm_ups))
        start_ns = end_ns + round(pause_s * NS)
    return tuple(stages)


def in_stages(stages: tuple[Stage, ...], random: Random, even: bool = False) -> Iterator[int]:
    """Times in ns, ascending: in each stage its number of requests, evenly or as Poisson's are.

    A Poisson process of which the count is known is so many uniform draws; they are drawn in
    order, each as the least of those that remain.
    """
    for stage in stages:
        span_ns = stage.end_ns - stage.start_ns
        share = 0.0
        for left in range(stage.requests, 0, -1):
            if not even:
                share += (1 - share) * (1 - (1 - random.random()) ** (1 / left))
            yield stage.start_ns + min(span_ns - 1, int(span_ns * share))
            if even:
                share += 1 / stage.requests
