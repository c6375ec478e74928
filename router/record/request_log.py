"""Writes the request log: one line for each request, for replays.

The event loop only puts a request's record into a bounded queue; a thread makes lines of the
records and writes them. If the disk is slow or full, lines are lost and counted.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from policies.contract import Hashes
from policies.facts import UNIDENTIFIED, Arrival, Identity, WorkerFacts
from router.core.contract.actions import regret_hit_tokens, regret_s
from router.core.contract.settings import NO_LIMIT
from router.core.core import RouterCore
from router.record.access_log import ms_since, names_in
from router.record.explain import everything
from router.record.log_files import (
    LineFile,
    LineSink,
    LogFile,
    Parts,
    QueuedLog,
    Recording,
    opening,
)
from router.record.request_line import (
    Best,
    FleetPart,
    Header,
    RequestLine,
    chain_bytes,
    pseudonym,
    pseudonyms,
)
from router.record.request_record import CLIENT_LEFT, RequestRecord
from router.record.salt import Salt, salt_beside

_NAME, _KEY = "request log", "request_log"
_NO_CHAIN: Hashes = np.zeros(0, dtype=np.uint64)


class LineMaker:
    """Turns records of requests into lines, in the thread of the log. Lifetime: process."""

    def __init__(
        self,
        salt: Salt,
        header: Callable[[float], Header],
        now_s: Callable[[], float],
        unix_offset_s: float,
    ) -> None:
        self._header = header
        self._now_s = now_s
        self._unix_offset_s = unix_offset_s  # one for all: arrivals keep their order and gaps
        self._salt = salt
        self._latest_header: Header | None = (
            None  # the heading, its policy and fleet as of the last batch
        )
        self._encoder = msgspec.json.Encoder()

    def settle(self, policy: str) -> bool:
        """Make the heading for requests that ended while `policy` was in use. Return whether it
        differs from the previous heading.
        """
        before, header = self._latest_header, self._header(self._now_s())
        self._latest_header = msgspec.structs.replace(header, policy=policy)
        if before is None:
            return True
        return self._latest_header != msgspec.structs.replace(before, started=header.started)

    def lines(self, records: Sequence[RequestRecord]) -> bytes:
        """Return one line for each record."""
        chains = self._keyed([_chain_of(record) for record in records])
        lines = [self._line(*pair) for pair in zip(records, chains, strict=True)]
        return self._encoder.encode_lines(lines)

    def heading(self) -> bytes:
        """Return the heading, which is the first line of a file and is repeated when its content
        changes.
        """
        says = self._latest_header or self._header(self._now_s())
        return self._encoder.encode_lines([msgspec.structs.replace(says, salt=self._salt.mark)])

    def _keyed(self, chains: Sequence[Hashes]) -> Sequence[Hashes]:
        """Return all chains keyed with the salt. They are keyed together, because each call costs a
        hundred numpy calls.
        """
        ends = np.cumsum([len(chain) for chain in chains])
        return np.split(self._salt.keyed(np.concatenate(chains)), ends[:-1])

    def _line(self, record: RequestRecord, chain: Hashes) -> RequestLine:
        arrival, last, usage = _arrival_of(record), record.last, record.usage
        decision = None if last is None else last.decision
        ended = None if record.last_ended is None else record.last_ended.outcome
        answered_s = ended.first_byte_s if ended is not None and ended.answers else None
        first_byte_s = answered_s if arrival.stream else None
        status, error = _end_of(record)
        code = None if record.refused is None else record.refused[1]
        return RequestLine(
            at=round(arrival.now_s + self._unix_offset_s, 6),
            model=None if code == "model_not_found" else arrival.model,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=usage.completion_tokens or (ended.events if ended else 0) or None,
            cached_tokens=usage.cached_tokens,
            block_size=_block_size_of(record),
            chain=chain_bytes(chain),
            session=pseudonym(arrival.session, self._salt.names),
            tenant=pseudonym(arrival.tenant, self._salt.names),
            priority=arrival.priority,
            approximate=arrival.approximate,
            stream=arrival.stream,
            worker=None if last is None else last.worker_id,
            policy=None if decision is None else decision.policy,
            reason=code or ("" if decision is None else decision.reason),
            hit_tokens=None if decision is None else decision.hit_tokens,
            attempts=len(record.attempts),
            status=status,
            error=error,
            ttft_ms=ms_since(first_byte_s, arrival.now_s),
            e2e_ms=ms_since(record.end_s, arrival.now_s) or 0.0,
            candidates=()
            if decision is None
            else tuple(Best(c.worker_id, c.cost, c.hit_tokens) for c in decision.candidates),
            sent_ms=ms_since(None if last is None else last.sent_s, arrival.now_s),
            worker_prompt_tokens=usage.prompt_tokens,
            **_hindsight(record, first_byte_s),
            **names_in(record),
            **_identity_in(arrival.identity, self._salt.names),
        )


def _arrival_of(record: RequestRecord) -> Arrival:
    assert record.arrival is not None, "only what came before the core has a line"
    return record.arrival


def _identity_in(identity: Identity, key: bytes) -> dict[str, Any]:
    """Return the fields of a line that identify the agent that sent the request and its user."""
    if identity is UNIDENTIFIED:
        return {}
    shown = pseudonyms(identity, key)
    ids = {name: getattr(shown, name) for name in ("group", "parent", "cache_group", "user")}
    ids = {name: value for name, value in ids.items() if value is not None}
    return ids | {"final": True} if identity.final else ids


def _end_of(record: RequestRecord) -> tuple[int, str | None]:
    """Return the status and the error of the request's last attempt, for its line."""
    last = record.last
    status = None if last is None or last.outcome is None else last.outcome.status
    error = None
    if last is not None and last.error is not None:
        error = last.error if last.by_worker else "client"
    if record.refused is not None:
        status = record.refused[0]
    elif record.broke and status is None:
        ours = record.broke == "internal_error"
        return (500, "internal_error") if ours else (CLIENT_LEFT, "client")
    elif record.broke:
        error = error or "client"
    return CLIENT_LEFT if status is None else status, error


def _hindsight(record: RequestRecord, first_byte_s: float | None) -> dict[str, Any]:
    """Return the fields of a line that became known only after the decision, and what the policy
    saw at the decision.
    """
    last = record.last
    if last is None:
        return {}
    waited_s = None if first_byte_s is None else max(first_byte_s - last.sent_s, 0.0)
    lost_s = regret_s(last.decision, waited_s)
    details = last.decision.details
    return {
        "regret_ms": None if lost_s is None else round(lost_s * 1e3, 3),
        "regret_hit_tokens": regret_hit_tokens(last.decision, record.usage.cached_tokens),
        "explained": None if details is None else everything(details),
    }


def _block_size_of(record: RequestRecord) -> int | None:
    if record.last is not None and record.last.block_size is not None:
        return record.last.block_size
    return min(_arrival_of(record).chains, default=None)


def _chain_of(record: RequestRecord) -> Hashes:
    size = _block_size_of(record)
    return _NO_CHAIN if size is None else _arrival_of(record).chains[size]


_WAITING_RECORDS = 16_384
_WAITING_BYTES = 64 << 20
_RECORD_BYTES = 2_048  # memory of a record besides its chains, roughly


def request_log_file(path: Path, limit_bytes: int) -> tuple[LogFile, Salt]:
    """Return the file of a request log that is a single file, and the log's salt. Raises OSError
    that says which file cannot be written and why.
    """
    with opening(_KEY, path):
        return LogFile(path, limit_bytes), salt_beside(path)


Ended = tuple[str, RequestRecord]  # the policy in force when a request ended, and the request


class RequestSink(LineSink[Ended]):
    """Appends lines of requests, each below a heading with the policy and the workers that apply to
    it. Lifetime: process.
    """

    def __init__(self, file: LineFile, maker: LineMaker) -> None:
        super().__init__(
            _NAME, file, lambda ended: maker.lines([record for _, record in ended]), maker.heading
        )
        self._settle = maker.settle

    def write(self, items: Sequence[Ended]) -> None:
        """Append a line for each request, with a new heading first if the policy or the fleet has
        changed.
        """
        for policy, ended in groupby(items, key=itemgetter(0)):
            if self._settle(policy):
                self.outdated = True
            super().write(list(ended))


class RequestLog(QueuedLog[Ended]):
    """The queue and the thread that write the request log. Lifetime: process."""

    def __init__(
        self,
        file: LineFile,
        salt: Salt,
        clock: Callable[[], float],
        now_s: Callable[[], float],
        header: Callable[[float], Header],
        policy: str,
    ) -> None:
        """Start the log. `clock` is the router's clock, `now_s` returns Unix time, and `header`
        makes a header for a Unix time.

        `policy` is the specification of the present policy; `set_policy` changes it.
        """
        maker = LineMaker(salt, header, now_s, unix_offset_s=now_s() - clock())
        super().__init__(_NAME, RequestSink(file, maker), _WAITING_RECORDS, _WAITING_BYTES)
        self._policy = policy  # of requests that end from now on

    def set_policy(self, policy: str) -> None:
        """Record `policy` as the policy of requests that end from now on."""
        self._policy = policy

    def put(self, record: RequestRecord) -> None:
        """Queue the record of a request that reached the core and has ended."""
        assert record.arrival is not None, "what was refused before has no line"
        chains = record.arrival.chains.values()
        self.queue((self._policy, record), _RECORD_BYTES + sum(chain.nbytes for chain in chains))


def fleet_parts(workers: Iterable[WorkerFacts]) -> tuple[FleetPart, ...]:
    """Return the workers in groups of equal ones, in the order in which each group first
    appears.
    """
    kinds = Counter(
        FleetPart(
            0,
            facts.block_size,
            None if (tokens := _known(facts.kv_capacity_tokens)) is None else round(tokens),
            facts.role,
            _known(facts.max_requests),
            _known(facts.max_queued_tokens),
            _known(facts.max_kv_fraction),
        )
        for facts in workers
    )
    return tuple(msgspec.structs.replace(part, count=count) for part, count in kinds.items())


def _limit(value: int) -> int | None:
    return value if value < NO_LIMIT else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class RequestLogTerms:
    """The settings of the request log: where it is written, and the router's limits, which its
    header states.
    """

    file: str | None
    file_bytes: int
    folder: str | None  # for parts, in place of the file
    parts: Recording
    worker_requests: int
    worker_queued_tokens: int


def request_log_of(
    terms: RequestLogTerms, core: RouterCore, workers: Callable[[], int]
) -> RequestLog | None:
    """Return the request log, or None if neither a file nor a folder is configured. Raises OSError
    if it cannot be written.
    """
    file: LineFile
    salt: Salt
    if terms.folder is not None:
        file = parts = Parts(Path(terms.folder), terms.parts, time.time)
        salt = parts.salt
    elif terms.file is not None:
        file, salt = request_log_file(Path(terms.file), terms.file_bytes)
    else:
        return None

    def header(started: float) -> Header:
        facts = [worker.facts for worker in tuple(core.workers)]  # the loop may change the table
        return Header(
            round(started, 6),
            core.policy.spec,
            workers(),
            fleet=fleet_parts(facts),
            worker_requests=_limit(terms.worker_requests),
            worker_queued_tokens=_limit(terms.worker_queued_tokens),
        )

    return RequestLog(file, salt, time.monotonic, time.time, header, core.policy.spec)
