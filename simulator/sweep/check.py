"""What cannot run is refused before anything does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence

import msgspec

from engine.profiles import profile
from simulator.replay.checks import check_setup
from simulator.replay.setup import Setup, WorkerGroup
from simulator.sweep.errors import SweepError
from simulator.traces.timing import check_timing

MAX_TOLD = 20
# Of a group of workers: counts and thresholds that only a number above 0 makes sense for.
ABOVE_0 = (
    "max_num_tokens", "max_batch_size", "max_model_tokens",
    "max_requests", "max_queued_tokens", "max_kv_fraction",
)  # fmt: skip


def check_setups(setups: Sequence[Setup]) -> None:
    """Raises `SweepError` with everything that no replay could do, each thing once.

    Policies are checked elsewhere (`policy_axis`); a workload is read when it is run.
    """
    # What seeds and policies have in common is checked once.
    different = {msgspec.structs.replace(setup, policy="", seed=0): None for setup in setups}
    problems = dict.fromkeys(line for setup in different for line in _problems(setup))
    if problems:
        told = list(problems)[:MAX_TOLD]
        more = len(problems) - len(told)
        raise SweepError([*told, f"and {more} more"] if more else told)


def _problems(setup: Setup) -> Iterator[str]:
    for line in _refusal(lambda: check_timing(setup.workload)):
        yield f"workload: {line}"
    for line in _refusal(lambda: check_setup(setup)):
        yield re.sub(r"^groups(\[\d+\])?", "fleet", line)
    for name in ("ttft_ms", "tpot_ms"):
        yield from _above_0(f"goodput.{name}", getattr(setup.goodput, name))
    for group in setup.groups:
        yield from _group_problems(group, setup.block_size or 1)


def _group_problems(group: WorkerGroup, block_size: int) -> Iterator[str]:
    for line in _refusal(lambda: profile(group.profile)):
        yield f"fleet.profile: {line}"
    if group.kv_tokens is not None and group.kv_tokens < block_size:
        yield (
            f"fleet.kv_tokens: {group.kv_tokens} holds no block of {block_size} tokens; "
            "give more, or smaller blocks (block_size)"
        )
    for name in ABOVE_0:
        yield from _above_0(f"fleet.{name}", getattr(group, name))


def _refusal(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except ValueError as error:  # TraceError and ReplayError are
        yield str(error)


def _above_0(name: str, value: float | None) -> Iterator[str]:
    if value is not None and not 0 < value < math.inf:
        yield f"{name}: {value:g}; expected a finite number above 0"
