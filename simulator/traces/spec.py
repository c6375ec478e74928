"""The workload of a run: which requests it has, and when they arrive."""

from __future__ import annotations

import msgspec


class WorkloadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which requests a run has, and when they arrive.

    `source` is a file, or `gen:NAME?key=value&key=value` for a generator.
    """

    source: str
    format: str = "auto"
    block_tokens: int | None = None  # prompt tokens an id stands for; None: as the format says
    speed: float = 1.0  # recorded times are divided by it
    rate_per_s: float | None = None  # instead: scale the times to this mean rate
    requests: int | None = None  # at most so many
    skip_s: float = 0.0  # leave out so much of a file's start, recorded time
    seconds: float | None = None  # from there on only, recorded time
    spread_s: float = 0.0  # spread requests of one timestamp over so long
    strict: bool = False  # stop at the first wrong line instead of counting it
    # Draw as many sessions with replacement, starts moved: a seed is a draw. Not said where unset:
    # set-ups that were kept stay the same.
    resample: bool | msgspec.UnsetType = msgspec.UNSET
