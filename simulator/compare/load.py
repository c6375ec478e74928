"""How much is asked of a fleet: a number by which scenes of one workload stand in order."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from simulator.replay.setup import Setup
from simulator.traces.errors import TraceError
from simulator.traces.generators.table import PREFIX, find_generator

RATE = re.compile(r"(?<=[?&])rate=[^&]*&?")


@dataclass(frozen=True, slots=True)
class Load:
    """Scenes of equal `of` differ by their load alone. Lifetime: report."""

    of: Setup  # with everything that says how much taken out
    value: float
    unit: str


def load_of(setup: Setup) -> Load:
    """Requests per second where that was asked, a generator's own rate, or the speed of a file."""
    work = setup.workload
    source = work.source
    value, unit = work.speed, "times as fast as recorded"
    if source.startswith(PREFIX):
        try:
            rate = getattr(find_generator(source)[1], "rate", None)
        except TraceError:  # of another version: its name is all that is known
            rate = None
        source = RATE.sub("", source).rstrip("?&")
        if isinstance(rate, float):
            value, unit = rate * work.speed, "begun per second"
    if work.rate_per_s is not None:
        value, unit = work.rate_per_s, "requests per second"
    bare = msgspec.structs.replace(work, source=source, rate_per_s=None, speed=1.0)
    return Load(msgspec.structs.replace(setup, workload=bare, policy="", seed=0), value, unit)
