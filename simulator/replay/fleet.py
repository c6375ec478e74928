"""Builds the simulated workers from groups, and checks a setup before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple
from itertools import chain, islice
from random import Random

import msgspec

from engine.cache_groups import GroupBlocks, parse_groups
from engine.profiles import Profile, gpus_of, profile
from engine.scheduler.types import SchedulerSettings
from kvkernels import VirtualWorker
from policies.facts import WorkerFacts
from simulator.replay.relay import MODEL
from simulator.replay.setup import (
    HOST_LOAD_GBPS,
    ReplayError,
    RouterSettings,
    Setup,
    WorkerGroup,
    World,
)
from simulator.replay.station import KEPT_BATCHES, Station
from simulator.traces.job import Job

MAX_WORKERS = 4096  # slots of the router's index
_LOOKED_AT = 1_000  # first jobs of a workload
_TIMES = (
    "network_ms",
    "event_lag_ms",
    "resync_ms",
    "report_every_ms",
    "report_lag_ms",
    "progress_ms",
    "replica_lag_ms",
    "link_setup_ms",
    "kv_lease_ms",
)
_PERIODS = ("tick_ms", "health_ms")
_MAX_MS = 86_400_000.0
_MAX_ROUTER_S = 86_400.0
_MAX_REPLICAS = 64
_MAX_REQUESTS = 10_000_000
_MAX_GBPS = 1e6


def check_setup(setup: Setup) -> None:
    """Raise ReplayError if a number in the setup is out of range; the message has the field, its
    value, and the allowed values.
    """
    if not setup.groups:
        raise ReplayError("groups: no workers; give at least one group")
    for number, group in enumerate(setup.groups):
        if group.count < 0:
            raise ReplayError(f"groups[{number}].count: {group.count}; expected 0 or more")
        if not (math.isfinite(group.speed) and group.speed > 0):
            raise ReplayError(f"groups[{number}].speed: {group.speed}; expected above 0")
        if group.kv_tokens is not None and group.kv_tokens < 1:
            raise ReplayError(f"groups[{number}].kv_tokens: {group.kv_tokens}; expected 1 or more")
        _check_host(number, group)
        _check_groups(number, group)
    workers = sum(group.count for group in setup.groups)
    if not 1 <= workers <= MAX_WORKERS:
        raise ReplayError(f"groups: {workers} workers in all; expected 1..{MAX_WORKERS}")
    if setup.block_size is not None and setup.block_size < 1:
        raise ReplayError(f"block_size: {setup.block_size}; expected 1 token or more")
    _check_roles(setup)
    _check_world(setup.world)
    _check_router(setup.router)


def _check_host(number: int, group: WorkerGroup) -> None:
    """Raise ReplayError if a group with host memory for KV has a size of 0 there, a link without a
    rate, or KV of unknown size.
    """
    tokens, gbps = group.host_kv_tokens or 0, group.host_load_gbps
    where = f"groups[{number}]"
    if tokens < 0:
        raise ReplayError(f"{where}.host_kv_tokens: {tokens}; expected 0 or more")
    if gbps is not msgspec.UNSET and not 0 < gbps <= _MAX_GBPS:
        raise ReplayError(f"{where}.host_load_gbps: {gbps}; expected above 0, to {_MAX_GBPS:g}")
    if tokens and not profile(group.profile).kv_bytes_per_token:
        raise ReplayError(
            f"{where}.profile: {group.profile} does not say how many bytes the KV of a token has "
            "(kv_bytes_per_token), so no load from host memory can be timed"
        )


def _check_groups(number: int, group: WorkerGroup) -> None:
    try:
        groups = parse_groups(group.cache_groups or "")
    except ValueError as error:
        raise ReplayError(f"groups[{number}].cache_groups: {error}") from error
    if groups and group.host_kv_tokens:
        where = f"groups[{number}].host_kv_tokens"
        raise ReplayError(f"{where}: must be 0 with cache_groups, which stay on the GPU")


def _check_roles(setup: Setup) -> None:
    """Raise ReplayError unless some worker can decode each request, and the links between roles
    have a rate.
    """
    roles = {group.role for group in setup.groups if group.count}
    if roles == {"prefill"}:
        raise ReplayError(
            "groups: all workers prefill and nobody decodes; give some of them role decode or both"
        )
    if not 0 < setup.world.link_gbps <= _MAX_GBPS:
        gbps = setup.world.link_gbps
        raise ReplayError(f"world.link_gbps: {gbps}; expected above 0, to {_MAX_GBPS:g}")
    for number, group in enumerate(setup.groups):
        if roles - {"both"} and not profile(group.profile).kv_bytes_per_token:
            raise ReplayError(
                f"groups[{number}].profile: {group.profile} does not say how many bytes the KV of "
                "a token has (kv_bytes_per_token), so no transfer can be timed"
            )


def _check_router(router: RouterSettings) -> None:
    hold_s, speculative_s = router.hold_s, router.speculative_s
    if hold_s is not None and not 0 <= hold_s <= _MAX_ROUTER_S:
        raise ReplayError(f"router.hold_s: {hold_s}; expected 0 or more, to {_MAX_ROUTER_S:g}")
    if speculative_s is not None and not 0 < speculative_s <= _MAX_ROUTER_S:
        raise ReplayError(
            f"router.speculative_s: {speculative_s}; expected above 0, to {_MAX_ROUTER_S:g}"
        )
    for name in ("hold_requests", "inflight_requests", "worker_requests", "worker_queued_tokens"):
        value = getattr(router, name)
        if value not in (None, msgspec.UNSET) and not 1 <= value <= _MAX_REQUESTS:
            raise ReplayError(f"router.{name}: {value}; expected 1..{_MAX_REQUESTS}")


def _check_world(world: World) -> None:
    for name in (*_TIMES, *_PERIODS):
        value = getattr(world, name)
        low = 1.0 if name in _PERIODS else 0.0
        if not low <= value <= _MAX_MS:
            raise ReplayError(f"world.{name}: {value}; expected {low:g}..{_MAX_MS:g}")
    if not 1 <= world.replicas <= _MAX_REPLICAS:
        raise ReplayError(f"world.replicas: {world.replicas}; expected 1..{_MAX_REPLICAS}")
    if not 0.0 <= world.no_session_share <= 1.0:
        share = world.no_session_share
        raise ReplayError(f"world.no_session_share: {share}; expected a share from 0 to 1")
    if (world.untold_capacities or 0) < 0:
        raise ReplayError(f"world.untold_capacities: {world.untold_capacities}; expected 0 or more")
    if not 0.0 <= world.event_loss < 1.0:
        raise ReplayError(f"world.event_loss: {world.event_loss}; expected 0 or more, below 1")


def some_fit(jobs: Iterator[Job], stations: list[Station]) -> Iterator[Job]:
    """Yield the same jobs. Raises ReplayError if no worker can run any of the first thousand."""
    first = list(islice(jobs, _LOOKED_AT))
    sequence_tokens = max(station.sequence_tokens for station in stations)
    if first and all(job.prompt_tokens >= sequence_tokens for job in first):
        shortest = min(job.prompt_tokens for job in first)
        raise ReplayError(
            f"no request can run: the shortest of the first {len(first)} prompts has {shortest} "
            f"tokens, a worker takes {sequence_tokens} with the first output token's; give the "
            "workers more kv_tokens or max_model_tokens"
        )
    return chain(first, jobs)


# Of a group: what its scheduler is told.
LIMITS = ("max_num_tokens", "max_batch_size", "max_model_tokens", "prefix_wait_tokens")


class FleetBuilder:
    """Builds the simulated workers and numbers them from 0. Lifetime: replay. `lossy` says that
    batches of KV events may get lost.
    """

    def __init__(self, setup: Setup, block_size: int, lossy: bool) -> None:
        self._setup = setup
        self._block_size = block_size
        self._kept_batches = KEPT_BATCHES if lossy else 0
        self._has_roles = any(group.role != "both" for group in setup.groups)

    def build(self, group_number: int, worker_id: int) -> Station:
        """Return a new worker of a group. Raises ReplayError if its settings are invalid."""
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
        host_tokens = group.host_kv_tokens or 0
        if host_tokens and host_tokens < self._block_size:
            raise ValueError(
                f"host_kv_tokens {host_tokens} is less than one block of {self._block_size} "
                "tokens; give it more, none (0), or a smaller block_size"
            )
        limits = _limits(group)
        groups = GroupBlocks(parse_groups(group.cache_groups or ""), self._block_size)
        has_events = self._setup.world.events
        engine = VirtualWorker(
            blocks=blocks,
            block_size=self._block_size,
            step_time=astuple(hardware.step_time),
            max_num_tokens=limits.max_num_tokens,
            max_batch_size=limits.max_batch_size,
            max_model_tokens=limits.max_model_tokens,
            prefix_wait_tokens=limits.prefix_wait_tokens,
            record_events=has_events,
            speed=group.speed,
            host_blocks=host_tokens // self._block_size,
            load_block_s=self._block_size * _load_token_s(group, hardware),
            cache_groups=[(one.window, one.cost) for one in groups.groups],
        )
        untold = worker_id < (self._setup.world.untold_capacities or 0)
        facts = WorkerFacts(
            name=f"w{worker_id}",
            models=(MODEL,),
            block_size=self._block_size,
            kv_capacity_tokens=math.nan if untold else float(blocks * self._block_size),
            max_model_tokens=limits.max_model_tokens,
            max_requests=_or_nan(group.max_requests),
            max_queued_tokens=_or_nan(group.max_queued_tokens),
            max_kv_fraction=_or_nan(group.max_kv_fraction),
            has_events=has_events,
            role=group.role,
            group=MODEL if self._has_roles else None,
        )
        return Station(
            worker_id,
            facts,
            engine,
            speed=group.speed,
            step_time=hardware.step_time,
            sequence_tokens=min(limits.max_model_tokens, self._room(blocks, groups)),
            kept_batches=self._kept_batches,
            random=Random(f"{self._setup.seed}/lost events/{worker_id}"),
            kv_bytes_per_token=hardware.kv_bytes_per_token,
            link_bytes_per_ns=self._setup.world.link_gbps * gpus_of(group.profile) / 8,
            reports_host=self._setup.world.host_events is not False,
            windows=[one.window for one in groups.groups],
        )

    def _room(self, blocks: int, groups: GroupBlocks) -> int:
        """Return the number of tokens in the longest sequence that fits into the cache together
        with its windows and states.
        """
        return (blocks - groups.working_blocks) * self._block_size


def _load_token_s(group: WorkerGroup, hardware: Profile) -> float:
    """Return the seconds to load the KV of one token from host memory, with all GPUs of a worker in
    parallel.
    """
    gbps = group.host_load_gbps or HOST_LOAD_GBPS
    return hardware.kv_bytes_per_token * 8 / (gbps * 1e9 * gpus_of(group.profile))


def _limits(group: WorkerGroup) -> SchedulerSettings:
    """Return the scheduler's limits for a group of workers. A limit that is not given has the
    scheduler's default, adapted to the other limits.
    """
    given = {name: getattr(group, name) for name in LIMITS if getattr(group, name) is not None}
    batch = given.get("max_batch_size", 0)
    given.setdefault("max_num_tokens", max(SchedulerSettings().max_num_tokens, batch))
    return SchedulerSettings(**given)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
