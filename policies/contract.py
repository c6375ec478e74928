"""The interface of policies: the request and worker data they read, and the costs they return."""

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
    """The interface that every policy offers to the decision core.

    A policy with a memory also has `initial_state() -> state` and `observe(fact, state) -> state`.
    The core calls `observe` with each fact that it receives (`policies.facts`), and passes the
    returned state to the next call. When the router holds requests, the core asks the policy about
    them again in their order, and stops after a few that the policy still holds, because later
    requests must not pass them. A policy that holds requests in an order of its own also has
    `asks_held(state) -> bool`, which the core calls after each `Tick`: if the result is True, the
    core asks about all held requests. Then no worker is reserved for a request that waits long.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """Return the cost of `request` on each worker of `fleet`, float64[rows].

        The worker with the lowest cost gets the request. A cost of +inf excludes a worker. If all
        costs are +inf, the router holds the request. The docstring of each policy says in which
        unit its costs are.
        """


@runtime_checkable
class Wrapper(Protocol):
    """A change to the costs of any policy, such as `bounded_load` in `lmetric|bounded_load`.

    Like a policy, a wrapper is a pure function and may have a memory (`initial_state`, `observe`).
    `policies.wrappers` has the built-in wrappers.
    """

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """Return the changed costs, float64[rows].

        `costs` are the costs of the wrapped policy: each is finite or +inf, and the array is
        read-only.
        """


Standing = Literal["new", "cold", "warm"]


@record
class RequestView:
    """The data of one request that a policy may read.

    Lifetime: request. The comment before each field ends with the field's unit, source and age.
    docs/reference/fleet.md is made from these comments.
    """

    # Chain hashes of the prompt's full blocks, the first block first. Unit: one hash a block.
    # Source: the prompt, cut by the workers' block size. Age: fixed at arrival.
    chain: Hashes
    # Number of tokens in a block of `chain`. Unit: tokens. Source: the workers of the model. Age:
    # current.
    block_size: int
    # Length of the whole prompt, with the partial last block. Unit: tokens. Source: the prompt.
    # Age: fixed at arrival.
    prompt_tokens: int
    # Time of this decision. Unit: s. Source: the decision core's clock. Age: current.
    now_s: float
    # Uniform random number, 0 <= draw < 1: a policy's only source of chance. Unit: none. Source:
    # the router's seed and `serial`. Age: fixed at arrival.
    draw: float
    # Number of the request, counted from 0. Unit: none. Source: this router's arrivals. Age: fixed
    # at arrival.
    serial: int
    # True if `chain` is made of blocks of text, because the engine's tokens are unknown. Unit:
    # none. Source: the prompt. Age: fixed at arrival.
    approximate: bool = False
    # Session of the request; unique within its tenant only. None: no id is known. Unit: none.
    # Source: headers or body of the request. Age: fixed at arrival.
    session: str | None = None
    # Tenant of the request. None: the router knows none. Unit: none. Source: the API key, or a
    # trusted header. Age: fixed at arrival.
    tenant: str | None = None
    # Group of the sessions of one person: a main agent and its sub-agents. None: unknown. Unit:
    # none. Source: headers or body of the request. Age: fixed at arrival.
    group: str | None = None
    # Group or session of the agent that started this one. None: there is none. Unit: none. Source:
    # headers or body of the request. Age: fixed at arrival.
    parent: str | None = None
    # Priority of the request; a lower number is served first, as in vLLM. Unit: none. Source: body
    # of the request. Age: fixed at arrival.
    priority: int = 0
    # State of the session's cache: "new" for the first request of a session, "cold" if no worker
    # holds half of the session's private tokens any more, else "warm". Unit: none. Source: the
    # session's id, or the prompt that this one continues (`router.core.sessions`). Age: current.
    standing: Standing = "new"
    # Id of the worker that got the session's latest request, or that alone caches the prompt of a
    # session that is unknown here. -1: none, or that worker is gone. Unit: none. Source: this
    # router's dispatches, and the workers' KV events. Age: current.
    home_id: int = -1
    # Number of leading prompt tokens that other sessions use, too. Unit: tokens. Source: this
    # router's arrivals. Age: fixed at arrival.
    trunk_tokens: int = 0
    # Probability that the session sends another request soon enough after this answer for its cache
    # to be worth the memory. Unit: 0..1. Source: how long sessions have paused lately at this
    # router. Age: current.
    return_chance: float = 0.0
    # Time that the request has waited at the router. Unit: s. Source: the decision core's clock.
    # Age: current.
    held_s: float = 0.0
    # Time that the request may still wait. 0: if no worker takes it now, it is refused. Unit: s.
    # Source: `limits.hold_s`, or the request's own lower limit. Age: current.
    may_wait_s: float = inf

    @property
    def private_tokens(self) -> int:
        """Number of prompt tokens that no other session uses.

        These are all prompt tokens after the shared prefix, which has `trunk_tokens` tokens.
        """
        return self.prompt_tokens - self.trunk_tokens

    @property
    def prompt_blocks(self) -> int:
        """Number of full blocks in the prompt."""
        return len(self.chain)


class FleetView(ABC):
    """The workers that may take one request, as numpy columns with one row for each worker.

    Rows are in the order of the worker ids. Columns are read-only and valid during one decision. A
    float that is unknown is NaN, and each policy's docstring says how the policy treats NaN.

    The docstring of each column ends with the unit, the source and the age of its numbers. Numbers
    from this router's own dispatches are current. Numbers from load reports are as old as
    `load_age_s`, numbers from KV events as old as `event_age_s`. docs/reference/fleet.md is made
    from these docstrings.

    `TableFleet` implements this interface with given arrays, for tests and tools.
    `router.core.placement.live_fleet` implements it with the columns of the decision core, for the
    router and the simulator.
    """

    __slots__ = ()

    def __new__(cls, *arguments: Any, **columns: Any) -> FleetView:
        """Refuse to create a plain `FleetView`, which has no data. Subclasses can be created."""
        if cls is FleetView:
            raise TypeError("FleetView is an interface; build a fleet of arrays by TableFleet(...)")
        return super().__new__(cls)

    @property
    @abstractmethod
    def worker_id(self) -> Ints:
        """Id of each worker. An id never changes, and is never reused while the process runs.

        Unit: none. Source: the router's list of workers. Age: current.
        """

    @property
    @abstractmethod
    def hit_tokens(self) -> Ints:
        """Number of leading prompt tokens whose KV is on the worker's GPU, or will be soon.

        The number is at most the prompt's length minus one. The last token is always computed,
        because its logits give the next token. Without KV events, the GPU's content is estimated
        from the prompts that this router sent to the worker.

        Unit: tokens. Source: the worker's KV events, and this router's dispatches. Age:
        `event_age_s`; a dispatch of this router counts at once.
        """

    @property
    @abstractmethod
    def hit_tokens_host(self) -> Ints:
        """Number of prompt tokens beyond `hit_tokens` whose KV is in the worker's host memory.

        Unit: tokens. Source: the worker's KV events. Age: `event_age_s`.
        """

    @property
    @abstractmethod
    def hit_tokens_disk(self) -> Ints:
        """Number of prompt tokens whose KV is on the worker's disk, but not in GPU or host memory.

        These tokens follow those of `hit_tokens` and `hit_tokens_host`.

        Unit: tokens. Source: the worker's KV events. Age: `event_age_s`.
        """

    @property
    @abstractmethod
    def hits_unknown(self) -> Bools:
        """True for a worker whose KV events are incomplete: its `hit_tokens` are a lower bound.

        A replay of the missing events clears the flag.

        Unit: none. Source: the sequence numbers of the worker's KV events. Age: current.
        """

    @property
    @abstractmethod
    def queued_prefill_tokens(self) -> Floats:
        """Number of uncached prompt tokens, sent by this router, that the worker has to compute.

        The router estimates how many of the tokens are computed: the queue drains at the worker's
        calibrated prefill rate, and each first token corrects the estimate.

        Unit: tokens. Source: this router's dispatches. Age: current.
        """

    @property
    @abstractmethod
    def token_work(self) -> Floats:
        """Mean work to prefill one queued prompt token, attention included; at least 1.

        Unit: work of one token without attention. Source: this router's dispatches and
        `pair_tokens`. Age: current.
        """

    @property
    @abstractmethod
    def running(self) -> Ints:
        """Number of requests at the worker that have given their first token.

        A load report that is too old does not count.

        Unit: requests. Source: this router's dispatches, plus other clients' requests by the latest
        load report. Age: own requests current, others' `load_age_s`.
        """

    @property
    @abstractmethod
    def waiting(self) -> Ints:
        """Number of requests at the worker that have not given their first token.

        A load report that is too old does not count.

        Unit: requests. Source: this router's dispatches, plus other clients' requests by the latest
        load report. Age: own requests current, others' `load_age_s`.
        """

    @property
    @abstractmethod
    def context_tokens(self) -> Floats:
        """Number of KV tokens that the worker reads in each decode step.

        These are the prompts and answers of this router's requests after their first token. Prompts
        for which this router reserved decode capacity count, too.

        Unit: tokens. Source: this router's dispatches. Age: current.
        """

    @property
    @abstractmethod
    def waiting_prompt_tokens(self) -> Ints:
        """Number of prompt tokens of this router's requests that have no first token yet.

        Cached tokens are included: their KV takes memory, too, while the request runs. Prompts for
        which this router reserved decode capacity are not included; `context_tokens` counts them.

        Unit: tokens. Source: this router's dispatches. Age: current.
        """

    @property
    @abstractmethod
    def kv_used_tokens(self) -> Floats:
        """Number of KV tokens of unfinished requests on the worker's GPU; NaN if never reported.

        Unit: tokens. Source: the worker's latest load report, plus the tokens that this router's
        requests have added since. Age: `load_age_s`; own requests current.
        """

    @property
    @abstractmethod
    def kv_capacity_tokens(self) -> Floats:
        """Number of KV tokens that fit on the worker's GPU; NaN while unknown.

        If the worker's description has no capacity, the router learns a lower bound from evictions
        in KV events, or from cached tokens in answers.

        Unit: tokens. Source: the worker's own description, else learned. Age: as described; a
        learned bound may still rise.
        """

    @property
    @abstractmethod
    def cached_tokens(self) -> Floats:
        """Number of KV tokens on the worker's GPU, in use or only cached; NaN without KV events.

        Unit: tokens. Source: the worker's KV events. Age: `event_age_s`.
        """

    @property
    @abstractmethod
    def host_cached_tokens(self) -> Floats:
        """Number of KV tokens in the worker's host memory; 0 without KV events.

        Unit: tokens. Source: the worker's KV events. Age: `event_age_s`.
        """

    @property
    @abstractmethod
    def disk_cached_tokens(self) -> Floats:
        """Number of KV tokens on the worker's disk; 0 without KV events.

        Unit: tokens. Source: the worker's KV events. Age: `event_age_s`.
        """

    @property
    @abstractmethod
    def host_tokens_per_s(self) -> Floats:
        """Speed of loading KV from host memory; NaN until it is measured.

        Unit: tokens/s. Source: the times to first token of prompts whose KV was mostly loaded from
        host memory. Age: that of the last such prompt.
        """

    @property
    @abstractmethod
    def disk_tokens_per_s(self) -> Floats:
        """Speed of loading KV from disk; NaN until it is measured.

        Unit: tokens/s. Source: the times to first token of prompts whose KV was mostly loaded from
        disk. Age: that of the last such prompt.
        """

    @property
    @abstractmethod
    def prefill_tokens_per_s(self) -> Floats:
        """Speed of the worker's prefill, not counting the work of attention.

        Unit: tokens/s. Source: the worker's description at first, then the measured times of its
        prefills and of other workers' prefills (`router.core.sessions.speed`). Age: that of the
        last measured prefill.
        """

    @property
    @abstractmethod
    def step_s(self) -> Floats:
        """Duration of one decode step of the worker.

        Unit: s. Source: the worker's description at first, then the measured gaps between tokens of
        its answers. Age: that of the last measured gap.
        """

    @property
    @abstractmethod
    def working_set_tokens(self) -> Floats:
        """Number of KV tokens in the worker's cache that live sessions will probably use again.

        The live sessions are those whose latest request was sent to this worker; the session of
        this request is left out. The private tokens of a session are multiplied by the probability
        that the session returns soon. A prefix that several sessions share counts once. Cached
        blocks whose session is unknown count as one idle session.

        Unit: tokens. Source: this router's dispatches and the worker's cached blocks
        (`router.core.sessions`). Age: dispatches current; the probabilities are updated every half
        second or less often.
        """

    @property
    @abstractmethod
    def working_set_s(self) -> Floats:
        """Seconds that the worker needs to recompute the private tokens of `working_set_tokens`.

        Private tokens are those that only one session uses.

        Unit: s. Source: as for `working_set_tokens`. Age: as for `working_set_tokens`.
        """

    @property
    @abstractmethod
    def holds_trunk(self) -> Bools:
        """True for a worker that caches another session with the same shared prefix.

        The shared prefix is the first `RequestView.trunk_tokens` of the prompt.

        Unit: none. Source: this router's dispatches. Age: current.
        """

    @property
    @abstractmethod
    def max_requests(self) -> Floats:
        """Number of unfinished requests at which the worker counts as full; NaN without limit.

        Unit: requests. Source: the worker's own options. Age: current; a change counts at once.
        """

    @property
    @abstractmethod
    def max_queued_tokens(self) -> Floats:
        """Number of queued prefill tokens at which the worker counts as full; NaN without limit.

        Unit: tokens. Source: the worker's own options. Age: current; a change counts at once.
        """

    @property
    @abstractmethod
    def max_kv_fraction(self) -> Floats:
        """Share of KV memory in use at which the worker counts as full; NaN without limit.

        Unit: 0..1. Source: the worker's own options. Age: current; a change counts at once.
        """

    @property
    @abstractmethod
    def load_age_s(self) -> Floats:
        """Seconds since the worker's latest load report; +inf before the first report.

        Unit: s. Source: the worker's load reports. Age: current.
        """

    @property
    @abstractmethod
    def event_age_s(self) -> Floats:
        """Seconds since the worker's latest KV event; +inf before the first event.

        Unit: s. Source: the worker's KV events. Age: current.
        """

    @property
    @abstractmethod
    def arrival_rate_per_s(self) -> float:
        """Number of requests per second that arrive at this router, for all models together.

        Unit: 1/s. Source: this router's arrivals, smoothed exponentially over 10 seconds. Age:
        current.
        """

    @property
    @abstractmethod
    def turnover_per_s(self) -> float:
        """Arrivals per second at this router, divided by the number of its unfinished requests.

        By Little's law, this is the rate at which each unfinished request is replaced by a new one.
        So `requests` times this rate is the number of requests per second that reach a worker.

        Unit: 1/s. Source: this router's arrivals and dispatches. Age: current.
        """

    @property
    @abstractmethod
    def mean_load_s(self) -> float:
        """Mean of `queued_prefill_s` over the workers of this fleet.

        Unit: s. Source: this router's dispatches. Age: current.
        """

    @property
    @abstractmethod
    def live_sessions(self) -> int:
        """Number of sessions that sent this router a request within the last 15 minutes.

        Unit: sessions. Source: this router's arrivals. Age: current.
        """

    @property
    @abstractmethod
    def pair_tokens(self) -> float:
        """Attention work between one prompt token and one earlier token; 0 before the first sample.

        Unit: work of one token without attention. Source: the measured prefill times of all workers
        together. Age: that of the last measured prefill.
        """

    @property
    @abstractmethod
    def cycle_s(self) -> float:
        """Mean seconds from one request of a session to the next, while its cache is warm.

        This is the decode time of an answer plus the pause before the session's next request. The
        value is 0 until a session has returned.

        Unit: s. Source: recent requests of all sessions at this router. Age: that of the last
        session that returned.
        """

    @property
    @abstractmethod
    def hot_trunk_tokens(self) -> int:
        """Number of leading tokens of this prompt that many recent prompts share, or 0.

        These leading tokens are the prompt's hot trunk (`kvkernels.Trunks`).

        Unit: tokens. Source: this router's arrivals. Age: current.
        """

    @property
    @abstractmethod
    def copies_missing(self) -> int:
        """Number of additional workers that should cache the hot trunk; 0 or less if enough do.

        The hot trunk is the leading part of this prompt that many recent prompts share.

        Unit: workers. Source: this router's arrivals, and `hit_tokens`. Age: current.
        """

    def __len__(self) -> int:
        return len(self.worker_id)

    def with_columns(self, **columns: Any) -> TableFleet:
        """Return a copy of the fleet with some columns replaced, as input for another policy."""
        own = {column.name: getattr(self, column.name) for column in fields(TableFleet)}
        return TableFleet(**own | columns)

    @property
    def requests(self) -> Ints:
        """Number of unfinished requests at each worker, int64[rows]."""
        total: Ints = self.running + self.waiting
        return total

    @property
    def queued_prefill_s(self) -> Floats:
        """Seconds that each worker needs, at its own speed, for its `queued_prefill_tokens`."""
        seconds: Floats = self.queued_prefill_tokens * self.token_work / self.prefill_tokens_per_s
        return seconds

    def prefill_s(self, tokens: Floats | Ints | float, cached: Floats | Ints | float) -> Floats:
        """Return the seconds that each worker needs to prefill `tokens` after `cached` tokens.

        The shape is float64[rows]. Because of attention, n tokens after h cached tokens take as
        long as n + pair_tokens * n * (h + n / 2) tokens would take without attention.
        """
        work = tokens * (1.0 + self.pair_tokens * (cached + tokens * 0.5))
        seconds: Floats = work / self.prefill_tokens_per_s
        return seconds

    @property
    def spared_tokens(self) -> Ints:
        """Number of prompt tokens that each worker need not compute, int64[rows].

        A hit on the GPU counts in full. A hit in host memory or on disk counts by the share of its
        prefill time that loading saves, and not at all if loading is slower than computing. So the
        prefill time of the remaining tokens equals the time to load and compute the prompt. Without
        hits below the GPU, the number equals `hit_tokens`.
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
        """Return the number of KV tokens that each worker's caches can hold, float64[rows].

        The number is the assumed capacity of the GPU plus the tokens that host memory and disk hold
        now. A token in host memory or on disk counts as less than one: it counts by the share of
        prefill time that loading its KV saves, for a prompt of `prompt_tokens` tokens.
        """
        prompt_s = self.prefill_s(prompt_tokens, 0)
        host = saved_share(prompt_tokens, self.host_tokens_per_s, prompt_s, HOST_SPEED)
        disk = saved_share(prompt_tokens, self.disk_tokens_per_s, prompt_s, DISK_SPEED)
        kept: Floats = self.assumed_capacity_tokens + self.host_cached_tokens * host
        kept += self.disk_cached_tokens * disk
        return kept

    @property
    def hit_confidence(self) -> Floats:
        """Factor, 0..1, that turns the cached tokens reported by KV events into `hit_tokens`.

        The factor is below 1 if the worker's answers repeatedly report fewer cached tokens than its
        KV events.
        """
        return np.ones(len(self))

    def lacking_trunk(self) -> Bools:
        """Return True for each worker whose GPU lacks a part of the prompt's hot trunk, bool[rows].

        The hot trunk is the leading part of the prompt that many recent prompts share. Without a
        hot trunk, the result is False for all workers.
        """
        lacking: Bools = self.hit_tokens < self.hot_trunk_tokens
        return lacking

    @property
    def step_tokens(self) -> float:
        """Number of prefill tokens that the pool's median worker computes in one decode step.

        The number is 0 if there are no workers. All workers get the same number, because a worker's
        own decode step takes longer while a prefill runs. That prefill counts already, in the
        queued tokens. If it counted twice, requests would swing between workers.
        """
        return median(self.step_s * self.prefill_tokens_per_s)

    def load_tokens(self, step_tokens: float) -> Floats:
        """Return each worker's load in prefill tokens, float64[rows].

        The load is the queued prefill tokens, plus `step_tokens` for each unfinished request.
        """
        load: Floats = self.queued_prefill_tokens + self.requests * step_tokens
        return load

    def missing_tokens(self, prompt_tokens: int) -> Floats:
        """Return the price of the prompt tokens that each worker lacks, float64[rows].

        The unit is a token that no worker holds. A token costs less if several workers hold it;
        `policies.pricing` gives the formula.
        """
        return missing_tokens(self.spared_tokens, prompt_tokens)

    @property
    def has_thresholds(self) -> bool:
        """Return True if at least one worker has a load threshold in its options."""
        own = (self.max_requests, self.max_queued_tokens, self.max_kv_fraction)
        return any(bool(np.count_nonzero(column == column)) for column in own)

    @property
    def has_kv_thresholds(self) -> bool:
        """Return True if at least one worker has a KV memory threshold in its options."""
        return bool(np.count_nonzero(self.max_kv_fraction == self.max_kv_fraction))

    @property
    def assumed_capacity_tokens(self) -> Floats:
        """Known or assumed KV capacity of each worker in tokens, float64[rows], without NaN.

        The assumed capacity is the median of the known ones, so that a worker with unknown capacity
        does not seem unlimited. If no capacity is known, each worker gets 1e18.
        """
        capacity, unknown = self.kv_capacity_tokens, np.isnan(self.kv_capacity_tokens)
        if not np.count_nonzero(unknown):
            return capacity
        assumed = 1e18 if unknown.all() else median(capacity[~unknown])
        return np.where(unknown, assumed, capacity)

    @property
    def kv_fraction(self) -> Floats:
        """Share of the KV capacity in use, 0..1; NaN if the use or the capacity is unknown."""
        fraction: Floats = self.kv_used_tokens / self.kv_capacity_tokens
        return fraction


@dataclass(frozen=True, slots=True)
class TableFleet(FleetView):
    """A fleet of given arrays, for tests, for tools, and for policies that call another policy.

    `FleetView` describes the columns. Each field needs `field()`: without it, the dataclass would
    take the property of `FleetView` as the field's default value.
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
    waiting_prompt_tokens: Ints = field()
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
