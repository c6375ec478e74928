"""Lines of the request log, made of entries and appended, in the thread of the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from policies.contract import Hashes
from router.core.regret import regret_hit_tokens, regret_s
from router.record.explanation import everything
from router.record.request_entry import CLIENT_LEFT, Entry
from router.record.request_line import Best, Header, RequestLine, chain_bytes, pseudonym
from router.record.salt import Salt

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
        ...

    def append(self, data: bytes) -> None:
        """Write whole lines, or none of them."""
        ...

    def reopen(self) -> None:
        """The file may have been moved away."""
        ...

    def close(self) -> None:
        """The end."""
        ...


class LineSink:
    """Makes lines of entries and appends them, in the thread of the log. Lifetime: process."""

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

    def write(self, items: Sequence[Entry]) -> None:
        """Append a line for each."""
        try:
            self._file.make_room(sum(map(_size_of, items)))
            chains = self._keyed([_chain_of(entry) for entry in items])
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

    def _line(self, entry: Entry, chain: Hashes) -> RequestLine:
        arrival, dispatch, usage = entry.arrival, entry.dispatch, entry.usage
        decision = None if dispatch is None else dispatch.decision
        first_byte_s = entry.first_byte_s if arrival.stream else None
        return RequestLine(
            at=round(arrival.now_s + self._unix_offset_s, 6),
            model=None if entry.reason == "model_not_found" else arrival.model,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=usage.completion_tokens or entry.output_events or None,
            cached_tokens=usage.cached_tokens,
            block_size=_block_size_of(entry),
            chain=chain_bytes(chain),
            session=pseudonym(arrival.session, self._salt.names),
            tenant=pseudonym(arrival.tenant, self._salt.names),
            priority=arrival.priority,
            approximate=arrival.approximate,
            stream=arrival.stream,
            worker=None if dispatch is None else dispatch.worker_id,
            policy=None if decision is None else decision.policy,
            reason=entry.reason or ("" if decision is None else decision.reason),
            hit_tokens=None if decision is None else decision.hit_tokens,
            attempts=entry.attempts,
            status=CLIENT_LEFT if entry.status is None else entry.status,
            error=entry.error,
            ttft_ms=_ms(first_byte_s, arrival.now_s),
            e2e_ms=_ms(entry.end_s, arrival.now_s) or 0.0,
            candidates=()
            if decision is None
            else tuple(Best(c.worker_id, c.cost, c.hit_tokens) for c in decision.candidates),
            sent_ms=_ms(entry.sent_s, arrival.now_s),
            worker_prompt_tokens=usage.prompt_tokens,
            **_hindsight(entry, first_byte_s),
        )


def _hindsight(entry: Entry, first_byte_s: float | None) -> dict[str, Any]:
    """What is known of the decision only now, and what it saw."""
    if entry.dispatch is None or entry.sent_s is None:
        return {}
    decision = entry.dispatch.decision
    waited_s = None if first_byte_s is None else max(first_byte_s - entry.sent_s, 0.0)
    lost_s = regret_s(decision, waited_s)
    details = decision.details
    return {
        "regret_ms": None if lost_s is None else round(lost_s * 1e3, 3),
        "regret_hit_tokens": regret_hit_tokens(decision, entry.usage.cached_tokens),
        "explained": None if details is None else everything(details),
    }


def _block_size_of(entry: Entry) -> int | None:
    if entry.block_size is not None:
        return entry.block_size
    return min(entry.arrival.chains, default=None)


def _chain_of(entry: Entry) -> Hashes:
    size = _block_size_of(entry)
    return _NO_CHAIN if size is None else entry.arrival.chains[size]


def _size_of(entry: Entry) -> int:
    """Bytes of its line, roughly."""
    decision = None if entry.dispatch is None else entry.dispatch.decision
    explained = decision is not None and decision.details is not None
    return _LINE_BYTES + _EXPLAINED_BYTES * explained + _chain_of(entry).nbytes * 4 // 3


def _ms(at_s: float | None, since_s: float) -> float | None:
    return None if at_s is None else round(max(at_s - since_s, 0.0) * 1e3, 3)
