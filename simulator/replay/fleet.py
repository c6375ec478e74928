"""Virtual workers made of groups: profile, memory, limits, and what a router sees of them."""

from __future__ import annotations

import math
from dataclasses import astuple
from random import Random
from typing import cast

import kvkernels
from engine.profiles import profile
from engine.scheduler_types import SchedulerSettings
from engine.virtual import VirtualWorker
from policies.facts import WorkerFacts
from simulator.replay.errors import ReplayError
from simulator.replay.relay import MODEL
from simulator.replay.setup import Setup, WorkerGroup
from simulator.replay.station import KEPT_BATCHES, Station

# Of a group: what its scheduler is told.
LIMITS = ("max_num_tokens", "max_batch_size", "max_model_tokens", "prefix_wait_tokens")


class FleetBuilder:
    """Makes stations, numbered from 0. Lifetime: replay. `lossy`: event batches may get lost."""

    def __init__(self, setup: Setup, block_size: int, lossy: bool) -> None:
        self._setup = setup
        self._block_size = block_size
        self._kept_batches = KEPT_BATCHES if lossy else 0

    def build(self, group_number: int, worker_id: int) -> Station:
        """A worker of a group. Raises ReplayError for one that cannot be."""
        group = self._setup.groups[group_number]
        try:
            return self._build(group, worker_id)
        except ValueError as error:
            raise ReplayError(f"groups[{group_number}] ({group.profile}): {error}") from error

    def _build(self, group: WorkerGroup, worker_id: int) -> Station:
        hardware = profile(group.profile)
        kv_tokens = hardware.kv_capacity_tokens if group.kv_tokens is None else group.kv_tokens
        blocks = kv_tokens // self._block_size
        if blocks < 1:
            raise ValueError(
                f"kv_tokens {kv_tokens} is less than one block of {self._block_size} tokens; "
                "give it more, or a smaller block_size"
            )
        limits = _limits(group)
        has_events = self._setup.world.events
        engine = self._engine_class()(
            blocks=blocks,
            block_size=self._block_size,
            step_time=astuple(hardware.step_time),
            max_num_tokens=limits.max_num_tokens,
            max_batch_size=limits.max_batch_size,
            max_model_tokens=limits.max_model_tokens,
            prefix_wait_tokens=limits.prefix_wait_tokens,
            record_events=has_events,
            speed=group.speed,
        )
        facts = WorkerFacts(
            name=f"w{worker_id}",
            models=(MODEL,),
            block_size=self._block_size,
            kv_capacity_tokens=float(blocks * self._block_size),
            max_model_tokens=limits.max_model_tokens,
            max_requests=_or_nan(group.max_requests),
            max_queued_tokens=_or_nan(group.max_queued_tokens),
            max_kv_fraction=_or_nan(group.max_kv_fraction),
            has_events=has_events,
        )
        return Station(
            worker_id,
            facts,
            engine,
            speed=group.speed,
            step_time=hardware.step_time,
            sequence_tokens=min(limits.max_model_tokens, blocks * self._block_size),
            kept_batches=self._kept_batches,
            random=Random(f"{self._setup.seed}/lost events/{worker_id}"),
        )

    def _engine_class(self) -> type[VirtualWorker]:
        """The native one, unless the plain one is asked for: equal twins."""
        if self._setup.native:
            return cast(type[VirtualWorker], kvkernels.VirtualWorker)
        return VirtualWorker


def _limits(group: WorkerGroup) -> SchedulerSettings:
    """The scheduler's limits; those not given are its defaults, and fit each other."""
    given = {name: getattr(group, name) for name in LIMITS if getattr(group, name) is not None}
    batch = given.get("max_batch_size", 0)
    given.setdefault("max_num_tokens", max(SchedulerSettings().max_num_tokens, batch))
    return SchedulerSettings(**given)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
