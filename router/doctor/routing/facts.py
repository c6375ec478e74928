"""Defines the facts about a router's cache hits: its workers, its decisions, its engines and its
counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from router.doctor.routing.prompts import GivenPrompts
from router.doctor.routing.tokens import ComparedTokens

LOW_SHARE = 0.3  # share of prompt tokens below which the hit rate counts as low


class GroupRow(msgspec.Struct, frozen=True):
    """A cache group of an engine: layers that cache KV by the same rule."""

    kind: str = "full"


class HitsRow(msgspec.Struct, frozen=True):
    """Says how exact the cache hits are that the router expects of a worker, and why."""

    mode: str = ""
    cause: str | None = None
    reason: str | None = None
    lift: str | None = None


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker as the router shows it in `/workers`."""

    id: int
    url: str = ""
    rank: int | None = None
    state: str = ""
    kind: str = ""
    models: list[str] = []
    block_size: int = 0  # tokens, by which the router follows it
    told_block_size: int | None = None  # that its engine names
    kv_capacity_tokens: float | None = None
    events: str | None = None  # where the router reads its KV events; None: nowhere
    events_from: str | None = None
    advice: str | None = None
    resident_blocks: int = 0
    kv_known: bool = False
    kv_evicted_blocks: int = 0  # that the router's index forgot at its bound
    events_skipped: dict[str, int] = {}
    mirrored: str | None = None
    hit_confidence: float | None = None
    hits: HitsRow | None = None
    working_set_tokens: float | None = None
    cache_groups: list[GroupRow] | None = None

    @property
    def name(self) -> str:
        """The worker's id and URL, for people."""
        return f"worker {self.id} ({self.url}{'' if self.rank is None else f'#{self.rank}'})"


class BestRow(msgspec.Struct, frozen=True):
    """One of the workers that a decision considered, as `/explain` shows it."""

    worker: int
    hit_tokens: int = 0


class DecisionRow(msgspec.Struct, frozen=True):
    """A request that was sent to a worker, and the router's reasons, as `/explain` shows them."""

    request: int
    worker: int
    now_s: float = 0.0
    model: str = ""
    expected_hit_tokens: int = 0
    prompt_tokens: int = 0
    approximate: bool = False
    cached_tokens: int | None = None  # as the worker reported; None: it reported nothing
    worker_prompt_tokens: int | None = None  # that the worker counted
    best: list[BestRow] = []

    @property
    def elsewhere_tokens(self) -> int:
        """The number of prompt tokens by which the best other worker's cached prefix exceeded that
        of the chosen worker.
        """
        return max([one.hit_tokens - self.expected_hit_tokens for one in self.best] + [0])


class PolicyRow(msgspec.Struct, frozen=True):
    """The router's policy, as the router's page `/policy` shows it."""

    policy: str = ""
    deciding: str = ""
    suspended_for_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts that an engine reports about itself. A fact is NaN or None if the engine does not
    report it.
    """

    trouble: str = ""  # why it could not be asked
    settings: Mapping[str, str] = field(default_factory=dict)  # of its cache
    endpoints: Mapping[int, str] | None = None  # of its KV events by rank; None: it names none
    adapters: frozenset[str] = frozenset()  # names of models that are LoRA adapters
    query_tokens: float = math.nan  # looked up in its prefix cache since it started
    hit_tokens: float = math.nan  # of these, found
    finished: float = math.nan  # requests that ended there while it was watched

    @property
    def prefix_caching(self) -> bool | None:
        """True if the engine reports that it keeps prefixes, False if it reports that it keeps
        none, and None if it reports neither.
        """
        if "enable_prefix_caching" in self.settings:
            return self.settings["enable_prefix_caching"] == "True"
        if "disable_radix_cache" in self.settings:
            return self.settings["disable_radix_cache"] != "True"
        return None


@dataclass(frozen=True, slots=True)
class ExaminedWorker:
    """One worker: the router's row for it, its engine's facts, and the router's counts about it."""

    row: WorkerRow
    engine: EngineFacts = EngineFacts()
    events: Mapping[str, float] = field(default_factory=dict)  # `warmroute_kv_events_total` by kind
    foreign: float = 0.0  # requests at it that are not of this router
    answered: float = math.nan  # requests that it answered this router while it was watched
    inflight: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """All facts found by a routing examination. The causes are judged from these facts alone."""

    url: str
    workers: tuple[ExaminedWorker, ...] = ()
    decisions: tuple[DecisionRow, ...] = ()  # the decisions that are judged
    of_when: str = "the latest"  # when these decisions were made
    policy: PolicyRow = field(default_factory=PolicyRow)
    tokenizer_exact: Mapping[str, float] = field(
        default_factory=dict
    )  # by model; empty: no tokenizer is set
    mismatches: Mapping[str, float] = field(default_factory=dict)  # of tokens, by model
    template_refusals: float = 0.0
    # Requests whose client put an attribution line before its prompt: as the request before of
    # their session, and unlike it.
    same_attributions: float = 0.0
    changed_attributions: float = 0.0
    index_evicted: float = 0.0  # blocks
    sharing: bool = False  # the router shares state with other routers
    others: Mapping[str, frozenset[str]] = field(default_factory=dict)  # routers: their workers
    # The engine's tokens compared with those of a given folder.
    tokens: ComparedTokens | None = None
    given: GivenPrompts | None = None  # requests of clients, that the operator gave
    unread: tuple[str, ...] = ()  # pages that could not be read
    alone: bool = False  # only engines were asked, and no router
    looked_up_tokens: float = 0.0  # of prompts, in the caches of engines alone
    found_tokens: float = 0.0  # of these

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens of all judged requests."""
        return sum(one.prompt_tokens for one in self.decisions)

    @property
    def expected(self) -> float:
        """The share of the judged requests' prompt tokens that the router expected to be cached;
        NaN if there are no prompt tokens.
        """
        return _share(sum(one.expected_hit_tokens for one in self.decisions), self.prompt_tokens)

    @property
    def reported(self) -> float:
        """The share of prompt tokens that workers reported as cached; NaN if no worker reported a
        number.
        """
        told = [one for one in self.decisions if one.cached_tokens is not None]
        cached = sum(one.cached_tokens or 0 for one in told)
        return _share(cached, sum(one.worker_prompt_tokens or one.prompt_tokens for one in told))

    @property
    def hit_share(self) -> float:
        """The share of prompt tokens that were cached: as workers reported it, or else as the
        router expected it. Without a router, it is the share that the engines count.
        """
        if self.alone:
            return _share(self.found_tokens, self.looked_up_tokens)
        return self.expected if math.isnan(self.reported) else self.reported

    @property
    def low(self) -> bool:
        """True if requests were judged and few of their prompt tokens were cached."""
        return self.hit_share < LOW_SHARE

    def of(self, worker: ExaminedWorker) -> tuple[DecisionRow, ...]:
        """Return the judged requests that were sent to a worker."""
        return tuple(one for one in self.decisions if one.worker == worker.row.id)

    def weight(self, workers: Iterable[ExaminedWorker]) -> float:
        """Return the share of judged prompt tokens that were sent to these workers. If there are no
        requests, return these workers' share of all workers.
        """
        ids = {one.row.id for one in workers}
        if not self.prompt_tokens:
            return len(ids) / max(len(self.workers), 1)
        there = sum(one.prompt_tokens for one in self.decisions if one.worker in ids)
        return there / self.prompt_tokens

    def serving(self) -> Iterator[ExaminedWorker]:
        """Yield the workers of a known kind that are not down."""
        return (one for one in self.workers if one.row.kind and one.row.state != "down")


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
