"""The request log: what became of each request, as a line for replays.

The event loop only fills in an `Entry` and puts it into a bounded queue; a thread makes lines of
entries and writes them. Where the disk is slow or full, lines are lost and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from policies.contract import Hashes
from policies.facts import Arrival
from router.core.actions import regret_hit_tokens, regret_s
from router.record.log_files import Background, LogFile
from router.record.request_line import Best, Header, RequestLine, chain_bytes, pseudonym
from router.record.request_record import CLIENT_LEFT, RequestRecord
from router.record.salt import Salt, salt_beside
from router.request.explain import everything

log = logging.getLogger(__name__)

_LINE_BYTES = 512  # of a line without its chain, roughly
_EXPLAINED_BYTES = 8_192  # of one with all that its decision saw, more
_NO_CHAIN: Hashes = np.zeros(0, dtype=np.uint64)


class LineFile(Protocol):
    """Where whole lines go. Each of its calls may raise OSError, `close` none."""

    @property
    def fresh(self) -> bool: ...  # a header is due
    @property
    def where(self) -> str: ...  # for people

    def make_room(self, size_bytes: int) -> None:
        """So many bytes come next: begin anew where they would be too many."""

    def append(self, data: bytes) -> None:
        """Write whole lines, or none of them."""

    def reopen(self) -> None:
        """The file may have been moved away."""

    def close(self) -> None:
        """The end."""


class LineSink:
    """Makes lines of records and appends them, in the thread of the log. Lifetime: process."""

    def __init__(
        self,
        file: LineFile,
        salt: Salt,
        header: Callable[[float], Header],
        now_s: Callable[[], float],
        unix_offset_s: float,
    ) -> None:
        self.lines = 0
        self.lost = 0
        self._file = file
        self._header = header
        self._now_s = now_s
        self._unix_offset_s = unix_offset_s  # one for all: arrivals keep their order and gaps
        self._salt = salt
        self._encoder = msgspec.json.Encoder()
        self._trouble_lines = 0  # lost since the file could last be written

    def write(self, items: Sequence[RequestRecord]) -> None:
        """Append a line for each."""
        try:
            self._file.make_room(sum(map(_size_of, items)))
            chains = self._keyed([_chain_of(record) for record in items])
            lines = [self._line(*pair) for pair in zip(items, chains, strict=True)]
            head = [self._heading()] if self._file.fresh else []
            self._file.append(self._encoder.encode_lines([*head, *lines]))
        except OSError as error:
            self._give_up(len(items), error)
            return
        self.lines += len(items)
        if self._trouble_lines:
            log.warning("request log goes on after %d lost lines", self._trouble_lines)
            self._trouble_lines = 0

    def reopen(self) -> None:
        """Go on where the path leads now."""
        try:
            self._file.reopen()
        except OSError as error:
            log.error("request log: cannot open %s anew: %s", self._file.where, error.strerror)

    def close(self) -> None:
        """The end."""
        self._file.close()

    def _give_up(self, count: int, error: OSError) -> None:
        if not self._trouble_lines:
            why = str(error) if error.filename2 else error.strerror or str(error)
            log.error("request log: lines are lost: cannot write %s: %s", self._file.where, why)
        self._trouble_lines += count
        self.lost += count

    def _heading(self) -> Header:
        return msgspec.structs.replace(self._header(self._now_s()), salt=self._salt.mark)

    def _keyed(self, chains: Sequence[Hashes]) -> Sequence[Hashes]:
        """All of them in one go: each costs a hundred calls of numpy."""
        ends = np.cumsum([len(chain) for chain in chains])
        return np.split(self._salt.keyed(np.concatenate(chains)), ends[:-1])

    def _line(self, record: RequestRecord, chain: Hashes) -> RequestLine:
        arrival, last, usage = _arrival_of(record), record.last, record.usage
        decision = None if last is None else last.decision
        ended = None if record.ended is None else record.ended.outcome
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
            ttft_ms=_ms(first_byte_s, arrival.now_s),
            e2e_ms=_ms(record.end_s, arrival.now_s) or 0.0,
            candidates=()
            if decision is None
            else tuple(Best(c.worker_id, c.cost, c.hit_tokens) for c in decision.candidates),
            sent_ms=_ms(None if last is None else last.sent_s, arrival.now_s),
            worker_prompt_tokens=usage.prompt_tokens,
            **_hindsight(record, first_byte_s),
        )


def _arrival_of(record: RequestRecord) -> Arrival:
    assert record.arrival is not None, "only what came before the core has a line"
    return record.arrival


def _end_of(record: RequestRecord) -> tuple[int, str | None]:
    """Status and error of its line, as of the last attempt."""
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
    """What is known of the decision only now, and what it saw."""
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


def _size_of(record: RequestRecord) -> int:
    """Bytes of its line, roughly."""
    explained = record.last is not None and record.last.decision.details is not None
    return _LINE_BYTES + _EXPLAINED_BYTES * explained + _chain_of(record).nbytes * 4 // 3


def _ms(at_s: float | None, since_s: float) -> float | None:
    return None if at_s is None else round(max(at_s - since_s, 0.0) * 1e3, 3)


_WAITING_RECORDS = 16_384
_WAITING_BYTES = 64 << 20
_RECORD_BYTES = 2_048  # what a record keeps alive besides its chains, roughly
_CLOSE_S = 5.0  # a disk that hangs must not keep the router from ending


def request_log_file(path: Path, limit_bytes: int) -> tuple[LogFile, Salt]:
    """The file of a log that is one file, and its salt.

    Raises OSError that says which file cannot be written and why.
    """
    try:
        return LogFile(path, limit_bytes), salt_beside(path)
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(f"request_log: cannot write {path}: {why}") from error


class RequestLog:
    """Lifetime: process."""

    def __init__(
        self,
        file: LineFile,
        salt: Salt,
        clock: Callable[[], float],
        now_s: Callable[[], float],
        header: Callable[[float], Header],
    ) -> None:
        """`clock` is the router's, `now_s` unix time, `header` makes one as of unix seconds."""
        self._sink = LineSink(file, salt, header, now_s, unix_offset_s=now_s() - clock())
        self._background = Background("request log", self._sink, _WAITING_RECORDS, _WAITING_BYTES)
        self._no_room = 0

    @property
    def lines(self) -> int:
        """Lines written so far."""
        return self._sink.lines

    @property
    def lost(self) -> int:
        """Lines lost so far, for want of room in the queue or on the disk."""
        return self._no_room + self._sink.lost

    def put(self, record: RequestRecord) -> None:
        """A request that came before the core is over."""
        assert record.arrival is not None, "what was refused before has no line"
        size_bytes = _RECORD_BYTES
        for chain in record.arrival.chains.values():
            size_bytes += chain.nbytes
        if not self._background.put(record, size_bytes):
            self._no_room += 1
            if self._no_room & (self._no_room - 1) == 0:
                log.error("request log: %d lines lost: the disk is too slow", self._no_room)

    def reopen(self) -> None:
        """The file was moved away: go on in a new one. Returns at once."""
        self._background.reopen()

    def close(self) -> None:
        """Write what waits. Takes up to five seconds, after which the rest is lost."""
        left = self._background.close(_CLOSE_S)
        if left:
            log.error("request log: %d lines were not written before the end", left)
