"""How much is asked of a fleet: a number by which scenes of one workload stand in order."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from simulator.replay.setup import Setup, WorkloadSpec
from simulator.traces.errors import TraceError
from simulator.traces.generators.table import PREFIX, find_generator
from simulator.traces.options import name_of, parse_options
from simulator.traces.session_file import SessionOptions

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
    value, unit = work.speed, "times as fast as recorded"
    rate = _own_rate(work)
    if rate is not None:
        value, unit = rate * work.speed, "begun per second"
    if work.rate_per_s is not None:
        value, unit = work.rate_per_s, "requests per second"
    bare = msgspec.structs.replace(
        work,
        source=_without_rate(work.source) if work.source.startswith(PREFIX) else work.source,
        format=_without_rate(work.format),
        rate_per_s=None,
        speed=1.0,
    )
    return Load(msgspec.structs.replace(setup, workload=bare, policy="", seed=0), value, unit)


def _own_rate(work: WorkloadSpec) -> float | None:
    """Of sessions or requests, as the generator or the format is told; None: as recorded."""
    told: object = None
    try:
        if work.source.startswith(PREFIX):
            told = getattr(find_generator(work.source)[1], "rate", None)
        elif name_of(work.format) == "sessions":
            told = parse_options(work.format, SessionOptions).rate
    except TraceError:  # of another version: its name is all that is known
        return None
    return told if isinstance(told, float) else None


def _without_rate(text: str) -> str:
    return RATE.sub("", text).rstrip("?&")
