"""What a policy is asked and what it answers; the request, the fleet as numpy columns, costs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from policies.arrays import Bools, Floats, Hashes, Ints, median
from policies.pricing import DISK_SPEED, HOST_SPEED, missing_tokens, saved_share
from policies.record import record

__all__ = [
    "Bools", "FleetView", "Floats", "Hashes", "Ints", "Policy", "RequestView", "Standing",
    "Wrapper",
]  # fmt: skip

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
    session: str | None = None  # its tenant's: another one may use the same name
    tenant: str | None = None
    priority: int = 0  # lower is served first, as in vLLM
    # Of its session, known by its id or by the prompt it goes on from (`router.core.sessions`):
    # "new" where this is its first request, "cold" where no worker holds half of what was its own,
    # else "warm".
    standing: Standing = "new"
    home_id: int = -1  # worker that its session was last sent to; -1: none, or gone
    trunk_tokens: int = 0  # leading tokens of the prompt that other sessions use, too
    # That its session sends another request soon enough after this one's answer for its memory to
    # pay, 0..1, as sessions did lately.
    return_chance: float = 0.0
    held_s: float = 0.0  # has waited at the router so long
    may_wait_s: float = inf  # and may for so much longer; 0: whom nobody takes now is refused

    @property
    def private_tokens(self) -> int:
        """Tokens of the prompt that only its session uses: its footprint in a cache."""
        return self.prompt_tokens - self.trunk_tokens

    @property
    def prompt_blocks(self) -> int:
        """Full blocks of the prompt."""
        return len(self.chain)


@dataclass(frozen=True, slots=True)
class FleetView:
    """The eligible workers, one row each, in the order of their ids.

    "Own" numbers count what this router dispatched and are exact and immediate; "reported"
    ones come from the worker and are as old as `load_age_s`. A signal nobody has given is NaN
    (float columns); a policy says in its docstring what it does then.
    """

    worker_id: Ints  # stable number of the worker, never reused while the process lives
    # Prompt tokens on the GPU, or on their way by our own dispatches. Less than the prompt: its
    # last token is computed even if all are resident, since its logits give the next one.
    hit_tokens: Ints
    hit_tokens_host: Ints  # further prompt tokens in host memory
    hit_tokens_disk: Ints  # further prompt tokens on disk
    hits_unknown: Bools  # events were lost: `hit_tokens` is a lower bound
    queued_prefill_tokens: Floats  # dispatched, not yet computed: own ledger, drained by the model
    token_work: Floats  # linear work of one queued token: 1, and its attention on top
    running: Ints  # requests past their first token; own count, plus others' as reported
    waiting: Ints  # requests before their first token; own count, plus others' as reported
    context_tokens: Floats  # KV tokens read by one decode step: own ledger
    kv_used_tokens: Floats  # reported, plus own dispatches since; NaN when never reported
    kv_capacity_tokens: Floats  # as it told, or as evictions showed; NaN: neither
    cached_tokens: Floats  # on the GPU, in use or not, by its KV events; NaN without them
    host_cached_tokens: Floats  # in host memory, by its KV events; 0 without them
    disk_cached_tokens: Floats
    # KV that it loads from there, by its first tokens (`sessions.speed`); NaN: not known yet.
    host_tokens_per_s: Floats
    disk_tokens_per_s: Floats
    prefill_tokens_per_s: Floats  # calibrated on this worker's own first tokens (`sessions.speed`)
    step_s: Floats  # seconds of one decode step, calibrated on inter-token gaps
    # What the live sessions at home on it will want again, each by the chance that it returns in
    # time to be worth its memory; without the session of this request (`router.core.sessions`).
    working_set_tokens: Floats  # private tokens, and each of their trunks once
    working_set_s: Floats  # seconds of its prefill to compute the private ones again
    holds_trunk: Bools  # a session with the trunk of this request is at home on it
    max_requests: Floats  # the worker's own thresholds; NaN when its options set none
    max_queued_tokens: Floats
    max_kv_fraction: Floats
    load_age_s: Floats  # age of the last load report; +inf before the first
    event_age_s: Floats  # age of the last KV event; +inf before the first
    arrival_rate_per_s: float = 0.0  # smoothed arrivals of the pool
    # Arrivals per second for each unfinished request: by Little's law, how often one worker's
    # requests are replaced; so `requests` times this is what comes to a worker in a second.
    turnover_per_s: float = 0.0
    mean_load_s: float = 0.0  # mean over rows of queued prefill in seconds
    live_sessions: int = 0  # sessions with a request in flight or seen lately
    pair_tokens: float = 0.0  # prefill attention of one query to one key, in tokens of linear work
    cycle_s: float = 0.0  # a session's turn when its cache is warm: pause and decode; 0: unknown
    # The request's trunk, a head that many prompts share (`kvkernels.Trunks`): its tokens,
    # 0: none that counts; and how many more of the rows should hold it, 0 or less: enough do.
    hot_trunk_tokens: int = 0
    copies_missing: int = 0

    def __len__(self) -> int:
        return len(self.worker_id)

    def with_columns(self, **columns: Any) -> FleetView:
        """The same fleet with other columns, such as to ask another policy about it."""
        own = {field.name: getattr(self, field.name) for field in fields(FleetView)}
        return FleetView(**own | columns)

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
        """int64[rows]: prompt tokens whose prefill its hits spare, in whatever tier.

        One that must be loaded counts by the share of its prefill that loading is shorter, so what
        remains of a prompt costs as much as load and prefill; a tier slower than computing counts
        nothing. Hits on the GPU where there are no others.
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
        """float64[rows]: KV that it keeps, in tokens that it need not compute again.

        The GPU's capacity as it is assumed, and what lower tiers hold as `spared_tokens` counts it
        in prompts of so many tokens. A tier that is still filling up counts as what it holds.
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

        Less than 1 only where its answers keep finding less than was promised.
        """
        return np.ones(len(self))

    def lacking_trunk(self) -> Bools:
        """bool[rows]: without the request's whole trunk; where there is none, nobody lacks it."""
        lacking: Bools = self.hit_tokens < self.hot_trunk_tokens
        return lacking

    @property
    def step_tokens(self) -> float:
        """Prefill tokens that fit into one decode step, the median of the pool; 0 of no workers.

        Not a worker's own step, which grows with every prefill beside it: queued tokens count that
        already, and load counted twice swings between workers.
        """
        return median(self.step_s * self.prefill_tokens_per_s)

    def load_tokens(self, step_tokens: float) -> Floats:
        """float64[rows]: queued prefill, and so many tokens for each unfinished request."""
        load: Floats = self.queued_prefill_tokens + self.requests * step_tokens
        return load

    def missing_tokens(self, prompt_tokens: int) -> Floats:
        """float64[rows]: tokens of the prompt a worker lacks, priced by `policies.pricing`."""
        return missing_tokens(self.spared_tokens, prompt_tokens)

    @property
    def has_thresholds(self) -> bool:
        """Whether any worker has a threshold of its own."""
        own = (self.max_requests, self.max_queued_tokens, self.max_kv_fraction)
        return any(bool(np.count_nonzero(column == column)) for column in own)

    @property
    def has_kv_thresholds(self) -> bool:
        """Whether any worker has a threshold of its own for its KV in use."""
        return bool(np.count_nonzero(self.max_kv_fraction == self.max_kv_fraction))

    @property
    def assumed_capacity_tokens(self) -> Floats:
        """float64[rows]: KV capacity; where unknown, the others' median; 1e18 where nobody told.

        One that does not tell must not look as if everything fitted in.
        """
        told, unknown = self.kv_capacity_tokens, np.isnan(self.kv_capacity_tokens)
        if not np.count_nonzero(unknown):
            return told
        return np.where(unknown, 1e18 if unknown.all() else median(told[~unknown]), told)

    @property
    def kv_fraction(self) -> Floats:
        """KV in use as a share of capacity, 0..1; NaN where either is unknown."""
        fraction: Floats = self.kv_used_tokens / self.kv_capacity_tokens
        return fraction


@runtime_checkable
class Policy(Protocol):
    """The whole of what the decision core needs from a policy.

    One with a memory also has `initial_state() -> state` and `observe(fact, state) -> state`, for
    the same facts as the core (`policies.facts`): its state is passed in and returned.
    """

    def costs(self, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """Cost of each row of `fleet` for `request`; see the module's docstring."""


@runtime_checkable
class Wrapper(Protocol):
    """What goes round any policy: `lmetric|bounded_load?epsilon=0.25` (`policies.wrappers`).

    As pure as a policy, and as one it may remember (`initial_state`, `observe`: its own state).
    """

    def adjust(self, costs: Floats, request: RequestView, fleet: FleetView, state: Any) -> Floats:
        """New costs from those of the policy inside, which are finite or +inf and read-only."""
