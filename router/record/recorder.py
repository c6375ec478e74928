"""The recorder of facts: what the core was told and what it answered, for debugging.

It sees facts before the core does. A session reaches core and file as the same keyed digest, so
that what is played later is what was decided; token ids of KV events become chain hashes on
their way to the file (`names.py`). A recording with a hole could not be played: where a bound or
the disk's end is reached it ends, and says so.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from policies.facts import Arrival, Fact, KvCopied, KvEvents, PeerDispatched, Stored, WorkerChange
from router.core.actions import Action, Reject
from router.core.core import RouterCore
from router.core.wire_events import WireEvents
from router.record.background import Background
from router.record.facts_file import Preamble, fields_of, framed, plain
from router.record.log_file import LogFile
from router.record.names import ChainNames, Late
from router.record.request_line import pseudonym

log = logging.getLogger(__name__)

Told = tuple[
    str, Any, Any
]  # "fact", "explain", "advance", "policy" or "slow"; what; what came of it

_WAITING_ITEMS = 65_536
_WAITING_BYTES = 256 << 20
_ITEM_BYTES = 512  # what a fact keeps alive besides its arrays and tokens, roughly
_WIRE_BLOCK_BYTES = 256  # a name and the tokens of a block as they came
_END_BYTES = 1_024  # kept free for the last record
_CLOSE_S = 5.0


class FactRecorder:
    """Lifetime: process. Told by the one thread that tells the core."""

    def __init__(self, path: Path, limit_bytes: int, core: RouterCore, seed: int) -> None:
        """Begins a recording of `core`, which has been told nothing yet; an older file becomes
        `FILE.1`. Raises OSError that says which file cannot be written and why.
        """
        try:
            file = LogFile(path, limit_bytes)
            file.make_room(limit_bytes)
        except OSError as error:
            why = error.strerror or str(error)
            raise OSError(f"record_facts: cannot write {path}: {why}") from error
        preamble = Preamble(fields_of(core.settings), seed, core.policy.spec)
        names = ChainNames(core.settings.index_entries, core.settings.parked_blocks)
        self._sink = _FactSink(file, limit_bytes, preamble, names)
        self._background: Background[Told] = Background(
            "facts recorder", self._sink, _WAITING_ITEMS, _WAITING_BYTES
        )
        self._key = secrets.token_bytes(32)
        self._core = core

    @property
    def ended(self) -> bool:
        """It records nothing more."""
        return self._sink.ended

    def record(self, fact: Fact, take: Callable[[Fact], list[Action]]) -> list[Action]:
        """Let the core take a fact, and note both sides."""
        if isinstance(fact, Arrival):
            fact = self._shown(fact)
        elif isinstance(fact, PeerDispatched):
            fact = replace(fact, arrival=self._shown(fact.arrival))
        elif isinstance(fact, WorkerChange) and fact.saved is not None:
            # A saved cache may hold tokens of blocks that wait for their parents: not for a file
            # of facts. What is recorded begins cold.
            fact = replace(fact, saved=None)
        try:
            actions = take(fact)
        except Exception as error:
            self._note("fact", fact, type(error).__name__)
            raise
        if isinstance(fact, Arrival) and not self._core.workers.serving(fact.model):
            self._note("fact", *self._nameless(fact, actions))
        else:
            self._note("fact", fact, actions)
        return actions

    def explain(self, arrival: Arrival) -> Arrival:
        """Somebody asks where `arrival` would go; returns it as the core shall see it."""
        arrival = self._shown(arrival)
        served = self._core.workers.serving(arrival.model)
        self._note("explain", arrival if served else self._nameless(arrival, [])[0], None)
        return arrival

    def advance(self, now_s: float) -> None:
        """Somebody looks at the load as of now: queues are drained up to here."""
        self._note("advance", now_s, None)

    def set_policy(self, spec: str) -> None:
        """Another policy decides from here on."""
        self._note("policy", spec, None)

    def slow(self, now_s: float, took_s: float) -> None:
        """The policy took too long for one of its calls: a fault of its own from here on."""
        self._note("slow", (now_s, took_s), None)

    def close(self) -> None:
        """Write what waits, and end. Takes up to five seconds."""
        if left := self._background.close(_CLOSE_S):
            log.error("facts recorder: %d facts were not written before the end", left)

    def _shown(self, arrival: Arrival) -> Arrival:
        if arrival.session is None:
            return arrival
        return replace(arrival, session=pseudonym(arrival.session, self._key))

    def _nameless(self, arrival: Arrival, actions: list[Action]) -> tuple[Arrival, list[Action]]:
        """The name of a model that nobody serves may be any text; its digest is refused alike."""
        name, digest = arrival.model, pseudonym(arrival.model, self._key)
        assert digest is not None
        answers: list[Action] = [
            replace(action, message=action.message.replace(repr(name), repr(digest)))
            if isinstance(action, Reject)
            else action
            for action in actions
        ]
        return replace(arrival, model=digest), answers

    def _note(self, kind: str, what: Any, result: Any) -> None:
        if self._sink.ended:
            return
        if not self._background.put((kind, what, result), _size_of(what)):
            self._sink.end("facts came faster than they could be written")
            self._background.close(0.0)


class _FactSink:
    """Frames and writes in the recorder's thread. Lifetime: recording."""

    def __init__(
        self, file: LogFile, limit_bytes: int, preamble: Preamble, names: ChainNames
    ) -> None:
        self.facts = 0
        self._why = ""
        self._over = False  # the last record is written
        self._file = file
        self._left_bytes = limit_bytes - _END_BYTES
        self._names = names
        self._append(framed(preamble))

    @property
    def ended(self) -> bool:
        """Nothing more is wanted."""
        return bool(self._why)

    def end(self, why: str) -> None:
        """What was put before this is the last; called by either thread."""
        if not self._why:
            self._why = why
            log.error("facts recorder ends: %s", why)

    def write(self, items: Sequence[Told]) -> None:
        """Append a record for each, and the chains that became known by them."""
        if self._over:
            return
        data = b"".join(frame for told in items for frame in self._frames(told))
        if len(data) > self._left_bytes:
            self.end(f"{self._file.path} has reached its limit, record_facts_bytes")
            self._finish()
        else:
            self._append(data)

    def reopen(self) -> None:
        """A recording is one file; there is nothing to go on with in another."""

    def close(self) -> None:
        """The last record says why it is the last."""
        if not self._why:
            self._why = "the router ended"
        self._finish()
        self._file.close()
        without = self._names.unresolved
        log.info("facts recorder: %d facts, %d blocks without their chains", self.facts, without)

    def _frames(self, told: Told) -> Iterator[bytes]:
        kind, what, result = told
        if kind != "fact":
            yield framed([kind, fields_of(what) if kind == "explain" else what])
            return
        late: list[Late] = []
        if isinstance(what, KvEvents):
            what, late = self._names.translate(self.facts, what)
        elif isinstance(what, WorkerChange):
            self._names.worker_changed(what)
        answer = result if isinstance(result, str) else [plain(action) for action in result]
        yield framed(["fact", *plain(what), answer])
        for one in late:
            yield framed(["late", one.fact, one.event, one.chain])
        self.facts += 1

    def _finish(self) -> None:
        if not self._over:
            self._append(framed(["end", self._why]))
            self._over = True

    def _append(self, data: bytes) -> None:
        try:
            self._file.append(data)
            self._left_bytes -= len(data)
        except OSError as error:
            self.end(f"cannot write {self._file.path}: {error.strerror}")
            self._over = True


def _size_of(what: Any) -> int:
    """Bytes that it keeps alive, roughly."""
    size_bytes = _ITEM_BYTES
    if isinstance(what, PeerDispatched):
        what = what.arrival
    if isinstance(what, Arrival):
        for chain in what.chains.values():
            size_bytes += chain.nbytes
    elif isinstance(what, KvEvents) and isinstance(what.events, WireEvents):
        size_bytes += _ITEM_BYTES * len(what.events) + _WIRE_BLOCK_BYTES * what.events.blocks
    elif isinstance(what, KvCopied):
        size_bytes += len(what.blocks)
    elif isinstance(what, KvEvents):
        for event in what.events:
            size_bytes += _ITEM_BYTES
            if isinstance(event, Stored):
                size_bytes += 8 * len(event.tokens)
    return size_bytes
