"""What cannot run is refused before anything does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from engine.profiles import profile
from simulator.replay.setup import Setup, WorkerGroup
from simulator.sweep.errors import SweepError

MAX_WORKERS = 4096
MAX_TOLD = 20


def check_setups(setups: Sequence[Setup]) -> None:
    """Raises `SweepError` with everything that no replay could do, each thing once."""
    # What seeds and policies have in common is checked once.
    different = {msgspec.structs.replace(setup, policy="", seed=0): None for setup in setups}
    problems = dict.fromkeys(line for setup in different for line in _problems(setup))
    if problems:
        told = list(problems)[:MAX_TOLD]
        more = len(problems) - len(told)
        raise SweepError([*told, f"and {more} more"] if more else told)


def _problems(setup: Setup) -> Iterator[str]:
    workload, world, goodput = setup.workload, setup.world, setup.goodput
    yield from _out_of_range("workload.speed", workload.speed, above=0)
    yield from _out_of_range("workload.rate_per_s", workload.rate_per_s, above=0)
    yield from _out_of_range("workload.requests", workload.requests, above=0)
    yield from _out_of_range("workload.seconds", workload.seconds, above=0)
    yield from _out_of_range("workload.spread_s", workload.spread_s, least=0)
    yield from _out_of_range("workload.block_tokens", workload.block_tokens, above=0)
    if workload.rate_per_s is not None and workload.speed != 1.0:
        yield "workload: speed and rate_per_s both set the times of arrival; give one of them"
    for field in msgspec.structs.fields(world):
        value = getattr(world, field.name)
        yield from _out_of_range(f"world.{field.name}", value, least=0)
    if world.event_loss >= 1:
        yield f"world.event_loss: {world.event_loss:g} is not below 1"
    yield from _out_of_range("goodput.ttft_ms", goodput.ttft_ms, above=0)
    yield from _out_of_range("goodput.tpot_ms", goodput.tpot_ms, above=0)
    yield from _out_of_range("block_size", setup.block_size, above=0)
    workers = sum(group.count for group in setup.groups)
    if not 1 <= workers <= MAX_WORKERS:
        yield f"fleet: {workers} workers; 1 to {MAX_WORKERS} can be replayed"
    for group in setup.groups:
        yield from _group_problems(group, setup.block_size or 1)


def _group_problems(group: WorkerGroup, block_size: int) -> Iterator[str]:
    yield from _out_of_range("fleet.count", group.count, least=0)
    yield from _out_of_range("fleet.speed", group.speed, above=0)
    try:
        profile(group.profile)
    except ValueError as error:
        yield f"fleet.profile: {error}"
    if group.kv_tokens is not None and group.kv_tokens < block_size:
        yield (
            f"fleet.kv_tokens: {group.kv_tokens} holds no block of {block_size} tokens; "
            "give more, or smaller blocks (block_size)"
        )
    for name in ("max_num_tokens", "max_batch_size", "max_model_tokens"):
        yield from _out_of_range(f"fleet.{name}", getattr(group, name), above=0)
    for name in ("max_requests", "max_queued_tokens", "max_kv_fraction"):
        yield from _out_of_range(f"fleet.{name}", getattr(group, name), above=0)


def _out_of_range(
    name: str, value: float | None, *, above: float | None = None, least: float | None = None
) -> Iterator[str]:
    if value is None:
        return
    if above is not None and not above < value < math.inf:
        yield f"{name}: {value:g} is not a finite number above {above:g}"
    elif least is not None and not least <= value < math.inf:
        yield f"{name}: {value:g} is not a finite number of at least {least:g}"
