"""How many GPUs a fleet takes: a profile's name says its degree of tensor parallelism."""

from __future__ import annotations

import re
from pathlib import PurePath

from simulator.replay.setup import Setup


def gpus_of(profile: str) -> int:
    """GPUs of one worker: N of a name with a part `tpN`, as in qwen3-32b-h100-tp2; else 1."""
    parts = re.split(r"[-_.]", PurePath(profile).name.lower())
    degrees = [int(part[2:]) for part in parts if re.fullmatch(r"tp[1-9]\d{0,3}", part)]
    return degrees[-1] if degrees else 1


def fleet_gpus(setup: Setup) -> int:
    """GPUs of all workers of a set-up."""
    return sum(group.count * gpus_of(group.profile) for group in setup.groups)
