"""The interface of policies: the request and fleet they read, and the costs they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from policies.arrays import Bools, Floats, Hashes, Ints, median
from policies.pricing import DISK_SPEED, HOST_SPEED, missing_tokens, saved_share
from policies.record import record

__all__ = [
    "Bools", "FleetView", "Floats", "Hashes", "Ints", "Policy", "RequestView", "Standing",
    "TableFleet", "Wrapper",
]  # fmt: skip


@runtime_checkable
class Policy(Protocol):
    """The whole of what the decision core needs from a policy.

    A policy with a memory also has `initial_state() -> state` and `observe(fact, state) -> state`,
    for the same facts as the core (`policies.facts`): its state is passed in and returned.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """float64[rows]: the cost of each worker in `fleet` for `request`; lower wins.

        +inf: not this worker. +inf everywhere: hold the request. The policy's own docstring says
        in which unit it counts.
        """


@runtime_checkable
class Wrapper(Protocol):
    """Changes the costs of any policy: `lmetric|bounded_load?epsilon=0.25` (`policies.wrappers`).

    It is as pure as a policy, and may have a memory of its own (`initial_state`, `observe`).
    """

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """New costs from those of the policy inside, which are finite or +inf and read-only."""


Standing = Literal["new", "cold", "warm"]


@record
class RequestView:
    """One request as a policy sees it. Lifetime: request."""

    chain: Hashes  # chain hashes of its full blocks, first block first (one block size)
    block_size: int  # tokens a block of `chain`
    prompt_tokens: int  # whole prompt, the partial last block included
    now_s: float  # the core's clock, seconds
    draw: float  # uniform in [0, 1), fixed by (seed, serial): the only source of chance
    serial: int  # arrivals counted from 0
    approximate: bool = False  # the chain is made of text blocks, not of the engine's tokens
    session: str | None = None  # unique within its tenant only
    tenant: str | None = None
    priority: int = 0  # lower is served first, as in vLLM
    # State of its session's cache: "new" if this is the session's first request, "cold" if no
    # worker holds half of the session's private tokens any more, else "warm". A session is known
    # by its id, or by the prompt that this one continues (`router.core.sessions`).
    standing: Standing = "new"
    home_id: int = -1  # worker that its session was last sent to; -1: none, or gone
    trunk_tokens: int = 0  # leading prompt tokens that other sessions use, too
    # Chance, 0..1, that its session sends another request soon enough after this answer for its
    # cache to be worth the memory; learned from how long sessions paused lately.
    return_chance: float = 0.0
    held_s: float = 0.0  # seconds it has waited at the router
    may_wait_s: float = (
        inf  # seconds it may still wait; 0: if no worker takes it now, it is refused
    )

    @property
    def private_tokens(self) -> int:
        """Prompt tokens that no other session uses: what the session occupies in a cache."""
        return self.prompt_tokens - self.trunk_tokens

    @property
    def prompt_blocks(self) -> int:
        """Full blocks of the prompt."""
        return len(self.chain)


class FleetView(ABC):
    """The eligible workers as columns, one row a worker, in the order of the workers' ids.

    Columns are read-only and valid during one decision. *Own* numbers count what this router
    dispatched and are exact and immediate. *Reported* numbers come from the worker's load reports
    and are as old as `load_age_s`. Numbers *by KV events* are as old as `event_age_s`. A float
    that is not known is NaN; a policy says in its docstring what it does then.

    `TableFleet` implements it with given arrays, for tests and tools; the router and the
    simulator with the columns of the decision core (`router.core.placement.live_fleet`).
    """

    __slots__ = ()

    def __new__(cls, *arguments: Any, **columns: Any) -> FleetView:
        """Refuse to build the interface itself, which has no columns."""
        if cls is FleetView:
            raise TypeError("FleetView is an interface; build a fleet of arrays by TableFleet(...)")
        return super().__new__(cls)

    @property
    @abstractmethod
    def worker_id(self) -> Ints:
        """Stable number of the worker, never reused during the life of the process."""

    @property
    @abstractmethod
    def hit_tokens(self) -> Ints:
        """Prompt tokens whose KV is on the worker's GPU, by KV events and own dispatches.

        Blocks that an own dispatch will soon store are counted. At most the prompt less one
        token: the last one is computed even if all are resident, its logits give the next token.
        """

    @property
    @abstractmethod
    def hit_tokens_host(self) -> Ints:
        """Prompt tokens beyond `hit_tokens` whose KV is in host memory, by KV events."""

    @property
    @abstractmethod
    def hit_tokens_disk(self) -> Ints:
        """Prompt tokens beyond those on the GPU and in host memory whose KV is on disk."""

    @property
    @abstractmethod
    def hits_unknown(self) -> Bools:
        """True where KV events were lost: `hit_tokens` is a lower bound until it is repaired."""

    @property
    @abstractmethod
    def queued_prefill_tokens(self) -> Floats:
        """Own prompt tokens dispatched and not yet computed.

        Computed tokens are estimated between reports: the queue drains at the worker's calibrated
        rate, and first tokens correct it.
        """

    @property
    @abstractmethod
    def token_work(self) -> Floats:
        """Work of a mean queued token, in tokens without attention: 1 and its attention."""

    @property
    @abstractmethod
    def running(self) -> Ints:
        """Requests past their first token: own, plus those of other clients as reported."""

    @property
    @abstractmethod
    def waiting(self) -> Ints:
        """Requests before their first token: own, plus those of other clients as reported."""

    @property
    @abstractmethod
    def context_tokens(self) -> Floats:
        """KV tokens that one decode step reads, of own requests past their first token."""

    @property
    @abstractmethod
    def kv_used_tokens(self) -> Floats:
        """KV tokens that requests occupy: reported, plus own dispatches since the report.

        NaN if the worker never reported them.
        """

    @property
    @abstractmethod
    def kv_capacity_tokens(self) -> Floats:
        """KV tokens that fit on the worker's GPU: reported, or learned from its evictions.

        NaN while neither is known.
        """

    @property
    @abstractmethod
    def cached_tokens(self) -> Floats:
        """KV tokens on the GPU, in use or not, by KV events; NaN for a worker without events."""

    @property
    @abstractmethod
    def host_cached_tokens(self) -> Floats:
        """KV tokens in host memory, by KV events; 0 for a worker without events."""

    @property
    @abstractmethod
    def disk_cached_tokens(self) -> Floats:
        """KV tokens on disk, by KV events; 0 for a worker without events."""

    @property
    @abstractmethod
    def host_tokens_per_s(self) -> Floats:
        """Speed of loading KV from host memory, tokens a second, calibrated on first tokens.

        NaN before the first sample.
        """

    @property
    @abstractmethod
    def disk_tokens_per_s(self) -> Floats:
        """Speed of loading KV from disk, tokens a second, calibrated on first tokens.

        NaN before the first sample.
        """

    @property
    @abstractmethod
    def prefill_tokens_per_s(self) -> Floats:
        """Speed of prefill without attention, tokens a second, calibrated on first tokens."""

    @property
    @abstractmethod
    def step_s(self) -> Floats:
        """Seconds of one decode step, calibrated on the gaps between tokens."""

    @property
    @abstractmethod
    def working_set_tokens(self) -> Floats:
        """KV tokens that the live sessions at home on the worker will want again.

        Private tokens of each session, times the chance that it returns in time to be worth its
        memory, and each trunk of theirs once. This request's own session is left out. By own
        dispatches, refreshed at each tick (`router.core.sessions`).
        """

    @property
    @abstractmethod
    def working_set_s(self) -> Floats:
        """Seconds of the worker's prefill to compute the private part of its working set again."""

    @property
    @abstractmethod
    def holds_trunk(self) -> Bools:
        """True where another session with this request's trunk has its cache, by own dispatches."""

    @property
    @abstractmethod
    def max_requests(self) -> Floats:
        """Threshold of unfinished requests in the worker's own options; NaN: it sets none."""

    @property
    @abstractmethod
    def max_queued_tokens(self) -> Floats:
        """Threshold of queued prefill tokens in the worker's own options; NaN: it sets none."""

    @property
    @abstractmethod
    def max_kv_fraction(self) -> Floats:
        """Threshold of `kv_fraction`, 0..1, in the worker's own options; NaN: it sets none."""

    @property
    @abstractmethod
    def load_age_s(self) -> Floats:
        """Seconds since the worker's last load report; +inf before the first."""

    @property
    @abstractmethod
    def event_age_s(self) -> Floats:
        """Seconds since the worker's last KV event; +inf before the first."""

    @property
    @abstractmethod
    def arrival_rate_per_s(self) -> float:
        """Requests a second that arrive at this router, smoothed over 10 seconds."""

    @property
    @abstractmethod
    def turnover_per_s(self) -> float:
        """Arrivals a second for each unfinished request of this router.

        By Little's law a worker's requests are replaced this often, so `requests` times this is
        the rate at which requests come to a worker.
        """

    @property
    @abstractmethod
    def mean_load_s(self) -> float:
        """Mean of `queued_prefill_s` over the rows, seconds."""

    @property
    @abstractmethod
    def live_sessions(self) -> int:
        """Sessions that sent a request to this router within the last 15 minutes."""

    @property
    @abstractmethod
    def pair_tokens(self) -> float:
        """Attention of one token to one earlier token, in tokens of work without attention.

        Calibrated on first tokens of all workers together; 0 before the first sample.
        """

    @property
    @abstractmethod
    def cycle_s(self) -> float:
        """Seconds of a session's turn while its cache is warm: its pause and its decode.

        Learned from recent turns; 0 before any session has returned.
        """

    @property
    @abstractmethod
    def hot_trunk_tokens(self) -> int:
        """Tokens of the head of this prompt that many prompts share (`kvkernels.Trunks`).

        0: it begins with no such head.
        """

    @property
    @abstractmethod
    def copies_missing(self) -> int:
        """Workers that should hold the hot trunk but do not yet; 0 or less if enough hold it."""

    def __len__(self) -> int:
        return len(self.worker_id)

    def with_columns(self, **columns: Any) -> TableFleet:
        """Return a fleet with some columns replaced, as input for another policy."""
        own = {column.name: getattr(self, column.name) for column in fields(TableFleet)}
        return TableFleet(**own | columns)

    @property
    def requests(self) -> Ints:
        """Unfinished requests of each worker."""
        total: Ints = self.running + self.waiting
        return total

    @property
    def queued_prefill_s(self) -> Floats:
        """Seconds each worker needs, at its own speed, for the prefill already sent to it."""
        seconds: Floats = self.queued_prefill_tokens * self.token_work / self.prefill_tokens_per_s
        return seconds

    def prefill_s(self, tokens: Floats | Ints | float, cached: Floats | Ints | float) -> Floats:
        """float64[rows]: seconds for `tokens` after `cached` ones, at each worker's own speed.

        Attention makes a token dearer by each one before it: n after h cost n + pair_tokens * n *
        (h + n / 2) tokens of linear work.
        """
        work = tokens * (1.0 + self.pair_tokens * (cached + tokens * 0.5))
        seconds: Floats = work / self.prefill_tokens_per_s
        return seconds

    @property
    def spared_tokens(self) -> Ints:
        """int64[rows]: prompt tokens whose prefill the hits of all tiers spare.

        A token that must be loaded counts by the share of its prefill that loading saves, so what
        remains of the prompt costs as much as load and prefill together. A tier that is slower
        than computing counts nothing. Equal to `hit_tokens` without hits in lower tiers.
        """
        gpu, host, disk = self.hit_tokens, self.hit_tokens_host, self.hit_tokens_disk
        if not (np.count_nonzero(host) or np.count_nonzero(disk)):
            return gpu
        host_s, disk_s = self.prefill_s(host, gpu), self.prefill_s(disk, gpu + host)
        spared = host * saved_share(host, self.host_tokens_per_s, host_s, HOST_SPEED)
        spared += disk * saved_share(disk, self.disk_tokens_per_s, disk_s, DISK_SPEED)
        counted: Ints = gpu + spared.astype(np.int64)
        return counted

    def kept_tokens(self, prompt_tokens: int) -> Floats:
        """float64[rows]: KV tokens that the worker's caches keep from being computed again.

        The GPU's assumed capacity, and what host memory and disk hold now, each token of these by
        the share of its prefill that loading saves in a prompt of `prompt_tokens`.
        """
        prompt_s = self.prefill_s(prompt_tokens, 0)
        host = saved_share(prompt_tokens, self.host_tokens_per_s, prompt_s, HOST_SPEED)
        disk = saved_share(prompt_tokens, self.disk_tokens_per_s, prompt_s, DISK_SPEED)
        kept: Floats = self.assumed_capacity_tokens + self.host_cached_tokens * host
        kept += self.disk_cached_tokens * disk
        return kept

    @property
    def hit_confidence(self) -> Floats:
        """Share of the hits by a worker's KV events that `hit_tokens` counts, 0..1.

        Less than 1 only where answers kept finding fewer cached tokens than the events promised.
        """
        return np.ones(len(self))

    def lacking_trunk(self) -> Bools:
        """bool[rows]: True where the request's whole hot trunk is not on the GPU.

        False everywhere if the prompt begins with no hot trunk.
        """
        lacking: Bools = self.hit_tokens < self.hot_trunk_tokens
        return lacking

    @property
    def step_tokens(self) -> float:
        """Prefill tokens that fit into one decode step, the median of the pool; 0 of no workers.

        The pool's median and not a worker's own step: that one grows with every prefill beside
        it. Queued tokens count such a prefill already, and load that is counted twice makes
        requests swing between workers.
        """
        return median(self.step_s * self.prefill_tokens_per_s)

    def load_tokens(self, step_tokens: float) -> Floats:
        """float64[rows]: queued prefill tokens, and `step_tokens` for each unfinished request."""
        load: Floats = self.queued_prefill_tokens + self.requests * step_tokens
        return load

    def missing_tokens(self, prompt_tokens: int) -> Floats:
        """float64[rows]: prompt tokens the worker lacks, as `policies.pricing` prices them."""
        return missing_tokens(self.spared_tokens, prompt_tokens)

    @property
    def has_thresholds(self) -> bool:
        """Return True if any worker's own options set a threshold."""
        own = (self.max_requests, self.max_queued_tokens, self.max_kv_fraction)
        return any(bool(np.count_nonzero(column == column)) for column in own)

    @property
    def has_kv_thresholds(self) -> bool:
        """Return True if any worker's own options limit the KV memory in use."""
        return bool(np.count_nonzero(self.max_kv_fraction == self.max_kv_fraction))

    @property
    def assumed_capacity_tokens(self) -> Floats:
        """float64[rows]: KV capacity in tokens, with an assumption for workers that report none.

        These get the median of the other workers, so that a worker without a report does not look
        as if everything fitted in. 1e18 if no worker's capacity is known.
        """
        capacity, unknown = self.kv_capacity_tokens, np.isnan(self.kv_capacity_tokens)
        if not np.count_nonzero(unknown):
            return capacity
        assumed = 1e18 if unknown.all() else median(capacity[~unknown])
        return np.where(unknown, assumed, capacity)

    @property
    def kv_fraction(self) -> Floats:
        """KV in use as a share of capacity, 0..1; NaN where either is unknown."""
        fraction: Floats = self.kv_used_tokens / self.kv_capacity_tokens
        return fraction


@dataclass(frozen=True, slots=True)
class TableFleet(FleetView):
    """A fleet of given arrays: for tests, tools, and policies that ask another policy.

    `FleetView` says what each column means. `field()`: without it a dataclass would take the
    property of `FleetView` for the column's default.
    """

    worker_id: Ints = field()
    hit_tokens: Ints = field()
    hit_tokens_host: Ints = field()
    hit_tokens_disk: Ints = field()
    hits_unknown: Bools = field()
    queued_prefill_tokens: Floats = field()
    token_work: Floats = field()
    running: Ints = field()
    waiting: Ints = field()
    context_tokens: Floats = field()
    kv_used_tokens: Floats = field()
    kv_capacity_tokens: Floats = field()
    cached_tokens: Floats = field()
    host_cached_tokens: Floats = field()
    disk_cached_tokens: Floats = field()
    host_tokens_per_s: Floats = field()
    disk_tokens_per_s: Floats = field()
    prefill_tokens_per_s: Floats = field()
    step_s: Floats = field()
    working_set_tokens: Floats = field()
    working_set_s: Floats = field()
    holds_trunk: Bools = field()
    max_requests: Floats = field()
    max_queued_tokens: Floats = field()
    max_kv_fraction: Floats = field()
    load_age_s: Floats = field()
    event_age_s: Floats = field()
    arrival_rate_per_s: float = 0.0
    turnover_per_s: float = 0.0
    mean_load_s: float = 0.0
    live_sessions: int = 0
    pair_tokens: float = 0.0
    cycle_s: float = 0.0
    hot_trunk_tokens: int = 0
    copies_missing: int = 0
