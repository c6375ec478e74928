"""Runs one replay: builds the pool, advances virtual time, and returns the result."""

from __future__ import annotations

import math
import resource
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from policies.facts import WorkerChange
from policies.load import LoadedPolicy, PolicyError, load
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore
from router.core.placement.guard import raising
from simulator.replay.agenda import Agenda
from simulator.replay.arrivals import ClosedLoop, NamedSessions, OpenLoopArrivals
from simulator.replay.faults import Failing, Fault, read_faults
from simulator.replay.fleet import FleetBuilder, check_setup, some_fit
from simulator.replay.observer import Observer, Sampler
from simulator.replay.relay import Relay
from simulator.replay.replicas import Replicas
from simulator.replay.result import WARNING, ReplayResult, WorkerTotals
from simulator.replay.setup import ReplayError, Setup
from simulator.replay.signals import Feed, Health
from simulator.replay.station import Station
from simulator.replay.transfers import Transfers, TransferTotals
from simulator.workloads.open import Chainer, JobStream, open_jobs

# As in a router, time that a busy or paused machine takes is not charged to the policy.
_THREAD_USE = (
    partial(resource.getrusage, resource.RUSAGE_THREAD) if sys.platform == "linux" else None
)


class ReplayProgress(NamedTuple):
    """How far a replay has come."""

    ended: int  # requests
    total: int | None  # known for some sources, and for a closed loop, which holds all requests
    fraction: float  # of the source read, in [0, 1]; 0 if unknown
    now_ns: int  # virtual time


def replay(
    setup: Setup,
    *,
    on_progress: Callable[[ReplayProgress], None] | None = None,
    observers: Sequence[Observer] = (),
    stream: JobStream | None = None,
    clock: Callable[[], float] = time.perf_counter,
    call_clock: Callable[[], float] = time.perf_counter,
) -> ReplayResult:
    """Replay a workload with the real decision core, policy and scheduler on virtual time.

    `stream` replaces `setup.workload` if the caller has the jobs already; it is used up.
    `on_progress` is called every few hundred requests. The result depends only on `setup` (and
    `stream`), except for `wall_s`, which `clock` measures, and for a warning if calls of the policy
    take longer, by `call_clock`, than a live router accepts. Raises ReplayError for a setup that
    cannot run, TraceError for a source that cannot be read.
    """
    began_s = clock()
    check_setup(setup)
    policy = _policy(setup.policy)
    if stream is None:
        stream = open_jobs(setup.workload, setup.seed)
    run = _Run(setup, policy, stream, observers, on_progress, call_clock)
    run.go()
    return run.result(clock() - began_s)


class _Run:
    """Connects the parts of one replay and runs it. Lifetime: replay."""

    def __init__(
        self,
        setup: Setup,
        policy: LoadedPolicy,
        stream: JobStream,
        observers: Sequence[Observer],
        on_progress: Callable[[ReplayProgress], None] | None,
        call_clock: Callable[[], float],
    ) -> None:
        self._setup, self._policy, self._stream = setup, policy, stream
        self._on_progress = on_progress
        block_size = stream.block_tokens if setup.block_size is None else setup.block_size
        chainer = Chainer(stream.block_tokens, block_size)
        self._block_size = block_size
        groups = [number for number, group in enumerate(setup.groups) for _ in range(group.count)]
        self._faults = _faults(setup, len(groups))
        fleet = FleetBuilder(setup, block_size, self._lossy())
        self._stations = [fleet.build(group, number) for number, group in enumerate(groups)]
        jobs = some_fit(stream.jobs, self._stations)

        slots = len(groups) + sum(fault.do == "join" for fault in self._faults)
        unsaid = (None, msgspec.UNSET)
        told = {k: v for k, v in msgspec.structs.asdict(setup.router).items() if v not in unsaid}
        settings = CoreSettings(max_workers=slots, **told)
        self._agenda = Agenda()
        replicas = range(setup.world.replicas)
        build = partial(RouterCore, policy, settings, setup.seed, raising, call_clock, _THREAD_USE)
        explains = any(getattr(observer, "reads_details", False) for observer in observers)
        cores = [build(explains_all=explains) for _ in replicas]
        self._calls_s, self._slow_s = array("f"), settings.policy_slow_s
        for core in cores:
            core.guard.measure(self._calls_s)
        self._core = Replicas(cores, self._agenda, _ns(setup.world.replica_lag_ms), setup.seed)
        self._arrivals = ClosedLoop(jobs) if setup.closed_loop else OpenLoopArrivals(jobs)
        self._relay = Relay(
            self._core,
            self._agenda,
            self._stations,
            self._arrivals,
            chainer,
            _ns(setup.world.network_ms),
            _ns(setup.world.progress_ms),
            observers,
            NamedSessions(
                setup.seed, setup.world.client_ids or "agents", setup.world.no_session_share
            ),
        )
        self._core.carry_out = self._relay.carry_out
        if any(group.role != "both" for group in setup.groups):
            world, serving = setup.world, self._relay.serving
            serving.transfers = Transfers(
                self._agenda, serving.look_again, _ns(world.link_setup_ms), _ns(world.kv_lease_ms)
            )
        if len(cores) > 1 and setup.world.replicas_share:
            self._core.share()
        self._relay.on_ended = None if on_progress is None else self._report_progress
        self._wire(fleet)
        self._sampler = Sampler(self._agenda, self._stations, observers)

    def _wire(self, fleet: FleetBuilder) -> None:
        world, core, agenda, relay = self._setup.world, self._core, self._agenda, self._relay
        self._feed = Feed(
            core,
            agenda,
            relay,
            _ns(world.event_lag_ms),
            world.event_loss,
            _ns(world.resync_ms),
        )
        self._health = Health(
            core,
            agenda,
            relay,
            self._feed,
            report_ns=_ns(world.report_every_ms),
            report_lag_ns=_ns(world.report_lag_ms),
            health_ns=_ns(world.health_ms),
            tick_ns=_ns(world.tick_ms),
        )
        self._failing = Failing(agenda, relay, self._health, fleet.build)

    def _lossy(self) -> bool:
        """Return True if event batches may be requested again."""
        return self._setup.world.event_loss > 0 or bool(self._faults)

    def go(self) -> None:
        """Run the replay from the first arrival to the last end."""
        for station in self._stations:
            fact = WorkerChange(0.0, station.worker_id, "ready", station.facts)
            self._relay.carry_out(0, self._core.handle_fact(fact))
            self._feed.start(station)
        self._relay.start()
        self._health.start()
        self._failing.start(self._faults)
        self._sampler.start()
        if self._relay.coming:
            self._agenda.run()
        self._check()

    def _check(self) -> None:
        """Raise AssertionError if a worker still has a request at the end, which would be a defect
        of the simulator.
        """
        self._relay.check()
        for station in self._stations:
            if station.alive and not station.hung:  # a hung one does not notice clients that leave
                stats = station.engine.stats(station.local_ns(self._agenda.now_ns))
                left = stats.running + stats.waiting
                assert left == 0, f"{station.facts.name} still has {left} requests"
                transfers = self._relay.serving.transfers
                held = transfers is not None and transfers.held_at(station)
                assert held or not stats.used_blocks, f"{station.facts.name} still holds blocks"

    def _report_progress(self, now_ns: int) -> None:
        assert self._on_progress is not None
        stream = self._stream
        total = stream.total if self._arrivals.total is None else self._arrivals.total
        self._on_progress(ReplayProgress(self._relay.ended, total, stream.fraction_read(), now_ns))

    def result(self, wall_s: float) -> ReplayResult:
        """Return the result of the replay."""
        relay, core = self._relay, self._core
        now_ns = relay.last_end_ns
        table = relay.book.table()
        samples = self._sampler.finish(now_ns)
        return ReplayResult(
            setup=self._setup,
            policy=self._policy.name,
            params={k: v for k, v in self._policy.params.items() if v is not None},
            block_size=self._block_size,
            table=table,
            samples=samples,
            workers=tuple(_totals(station, now_ns) for station in self._stations),
            rejections=relay.book.rejections(),
            retries=core.retries,
            holds=core.holds,
            trace_errors=self._stream.errors.total,
            simulated_ns=now_ns - int(table.arrival_ns[0]) if len(table) else 0,
            wall_s=wall_s,
            notes=self._notes(),
            split_requests=0 if (kv := relay.serving.transfers) is None else kv.totals.prefilled,
            stages=self._stream.stages,
        )

    def _notes(self) -> tuple[str, ...]:
        relay, feed = self._relay, self._feed
        notes = [*_slow(self._policy.name, self._calls_s, self._slow_s), self._stream.origin]
        notes += self._stream.notes()
        if relay.serving.transfers is not None:
            notes.append(_moved(relay.serving.transfers.totals, len(relay.book)))
        if not self._setup.closed_loop and relay.book.groups:
            notes.append("open loop: in task times the pauses between turns are the recorded ones")
        if relay.ejections:
            notes.append(f"workers ejected after failures in a row: {relay.ejections} times")
        if feed.lost_batches:
            notes.append(f"event batches lost: {feed.lost_batches}; asked again: {feed.resyncs}")
        left = [fault for fault in self._faults if fault.at_ns > self._agenda.now_ns]
        if left:
            notes.append(f"faults after the last request, left out: {len(left)}")
        notes += list(self._stream.errors)
        return tuple(notes)


def _slow(policy: str, calls_s: array[float], most_s: float) -> list[str]:
    """Return a warning if at least one in a hundred calls of the policy took longer than a live
    router allows.
    """
    p99_s = float(np.percentile(calls_s, 99)) if calls_s else 0.0
    if p99_s <= most_s:
        return []
    return [
        f"{WARNING}{policy} is slower than a router bears: p99 of its calls {p99_s * 1e3:.1f} ms "
        f"on this machine, more than {most_s * 1e3:g} ms each (policy_slow_ms) is a fault; "
        "a router that counts many lets the fallback decide, and these figures are not what it does"
    ]


def _moved(totals: TransferTotals, requests: int) -> str:
    """Return a sentence on the requests that one worker prefilled and another one decoded."""
    mean_ms = totals.moved_ns / max(totals.moved, 1) / 1e6
    return (
        f"prefilled for another worker: {totals.prefilled} of {requests} requests; KV moved: "
        f"{totals.moved} times, {totals.moved_bytes / 1e9:.1f} GB, {mean_ms:.1f} ms each; computed "
        f"again: {totals.recomputed}; leases that ended unread: {totals.expired}"
    )


def _policy(spec: str) -> LoadedPolicy:
    try:
        return load(spec)
    except PolicyError as error:
        raise ReplayError(f"policy: {error}") from error


def _faults(setup: Setup, workers: int) -> tuple[Fault, ...]:
    if setup.faults is None:
        return ()
    return read_faults(setup.faults, workers, len(setup.groups))


def _totals(station: Station, now_ns: int) -> WorkerTotals:
    stats = station.engine.stats(station.local_ns(now_ns))
    return WorkerTotals(
        name=station.facts.name,
        requests=station.dispatches,
        busy_ns=stats.busy_ns,
        steps=stats.steps,
        evicted_blocks=stats.evicted,
        recomputed_tokens=stats.recomputed_tokens,
        preemptions=stats.preemptions,
        query_tokens=stats.query_tokens,
        hit_tokens=stats.hit_tokens,
        host_hit_tokens=stats.host_hit_tokens,
    )


def _ns(milliseconds: float) -> int:
    return math.floor(milliseconds * 1e6 + 0.5)
