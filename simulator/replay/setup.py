"""The setup of one replay as plain data, which can be hashed, stored and sent away."""

from __future__ import annotations

from typing import Literal

import msgspec

from policies.facts import Role
from router.core.contract.settings import DisaggregationMode
from simulator.traces.spec import WorkloadSpec


class ReplayError(ValueError):
    """Raised for a setup that cannot be replayed; the message says what is wrong, where, and what
    to do.
    """


HOST_LOAD_GBPS = 200.0  # what PCIe 4.0 x16 carries, less its overhead: 25 GB/s


class WorkerGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of equal workers. None means the value of the profile, or the scheduler's default."""

    count: int
    profile: str
    kv_tokens: int | None = None
    speed: float = 1.0  # 0.5: every step takes twice as long
    max_num_tokens: int | None = None
    max_batch_size: int | None = None
    max_model_tokens: int | None = None
    # Least prefix for which a request waits while another one computes it; 0: never, as vLLM and
    # SGLang. Ours waits (docs/engine.md).
    prefix_wait_tokens: int | None = None
    max_requests: float | None = None  # the worker's own thresholds, as in the router
    max_queued_tokens: float | None = None
    max_kv_fraction: float | None = None
    role: Role = "both"  # where some have one, all of a pool move KV between them
    # Evicted KV tokens that a worker keeps in host memory, and gigabits per second of each GPU at
    # which they are loaded again. Unset: no host tier, HOST_LOAD_GBPS; not said then, as above.
    host_kv_tokens: int | msgspec.UnsetType = msgspec.UNSET
    host_load_gbps: float | msgspec.UnsetType = msgspec.UNSET
    # Windows and states that its model caches beside full attention; see `engine.cache_groups`.
    cache_groups: str | msgspec.UnsetType = msgspec.UNSET


ClientIds = Literal["agents", "group", "key", "none"]


class World(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The delays of signals in milliseconds, the share of them that is lost, and the router
    replicas.
    """

    network_ms: float = 0.5  # one way, router to worker and back
    events: bool = True  # workers publish KV events
    event_lag_ms: float = 1.0
    event_loss: float = 0.0  # share of event batches that never arrive, [0, 1)
    resync_ms: float = 50.0  # from a noticed gap to the end of its replay
    report_every_ms: float = 1000.0  # load reports; 0: none
    report_lag_ms: float = 0.0
    progress_ms: float = 250.0  # least time between two progress facts of one answer
    tick_ms: float = 100.0
    health_ms: float = 1000.0  # between two health probes of a worker
    replicas: int = 1  # routers; each request comes through any of them
    replica_lag_ms: float = 15.0  # until the others know what one router does
    replicas_share: bool = True  # False: they know nothing of each other
    no_session_share: float = 0.0  # share of sessions whose id the client does not send, [0, 1]
    # The ids that simulated clients send, as of `simulator.replay.arrivals.NamedSessions`. If it is
    # unset, stored set-ups do not contain it, and clients send all ids.
    client_ids: ClientIds | msgspec.UnsetType = msgspec.UNSET
    # KV between workers of different roles: gigabits per second of each GPU, each way, ...
    link_gbps: float = 200.0
    link_setup_ms: float = 1.0  # ... before a transfer begins, ...
    kv_lease_ms: float = 30_000.0  # ... and how long a prefilled prompt is kept unread
    # KV events tell of host memory, too; False: routers know of the GPUs' blocks alone.
    host_events: bool | msgspec.UnsetType = msgspec.UNSET
    # So many workers, the first ones, do not tell how much KV they hold; not said where none.
    untold_capacities: int | msgspec.UnsetType = msgspec.UNSET


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the decision core (`router.core.contract.settings`). None means the core's
    default.
    """

    hold_s: float | None = None  # longest wait at the router; then the request is rejected
    hold_requests: int | None = None  # held at a time
    inflight_requests: int | None = None  # dispatched and held together
    speculative_s: float | None = None  # that an expected block counts as cached
    disaggregation: DisaggregationMode | None = None  # auto, always, never; of workers with roles
    tpot_s: float | None = None  # time per token that clients of such workers accept
    # The router's limits.worker_requests and limits.worker_queued_tokens: beyond them it waits.
    # Not said where unset: set-ups that were kept stay the same.
    worker_requests: int | msgspec.UnsetType = msgspec.UNSET
    worker_queued_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Goodput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a good answer; a request is good if it keeps both."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 50.0


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that determines one replay: policy, seed, pool, workload and world."""

    workload: WorkloadSpec
    policy: str
    groups: tuple[WorkerGroup, ...]
    block_size: int | None = None  # of the workers, tokens; None: the source's
    seed: int = 0
    closed_loop: bool = False  # a turn is released by the answer before it
    world: World = World()
    faults: str | None = None  # a timeline file
    goodput: Goodput = Goodput()
    router: RouterSettings = RouterSettings()
