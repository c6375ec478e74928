"""Records the core's facts and actions in a file, for debugging."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from policies.contract import Hashes
from policies.facts import (
    UNIDENTIFIED,
    Arrival,
    Fact,
    KvCopied,
    KvEvent,
    KvEvents,
    PeerDispatched,
    Removed,
    Stored,
    WorkerChange,
)
from router.core.contract.actions import Action, Reject
from router.core.core import RouterCore
from router.core.workers.kv_events import WireEvents, block_name, block_names, chain_of
from router.record.facts import Preamble, fields_of, framed, plain
from router.record.log_files import Background, LogFile, opening
from router.record.request_line import pseudonym, pseudonyms

# The chain of blocks whose parent has not arrived.
NOT_KNOWN: Hashes = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Late:
    """The chain of the event number `event` in the fact number `fact`, which became known only
    later. Lifetime: until it is written.
    """

    fact: int
    event: int
    chain: Hashes


@dataclass(frozen=True, slots=True)
class _Orphan:
    """Stored blocks whose parent block is not known yet. Lifetime: until the parent arrives, or
    memory is needed.
    """

    fact: int
    event: int
    stored: Stored


@dataclass(slots=True)
class _WorkerNames:
    """The engine's names of blocks in one worker's KV events, each with its chain hash. Lifetime:
    worker.
    """

    chain_of: dict[int, int] = field(default_factory=dict)  # the latest used are last
    orphans: dict[int, list[_Orphan]] = field(default_factory=dict)  # by parent
    group: int = 0  # the cache group of a hybrid model that counts
    full_attention: bool = False  # it was reported as one of full attention


class ChainNames:
    """Finds the chain hashes of all workers' blocks by the engines' names for the blocks. Lifetime:
    recording.

    At most `names_max` names are kept; within a worker, the least recently used name is dropped
    first. At most `waiting_max` blocks wait for their parents.
    """

    def __init__(self, names_max: int, waiting_max: int) -> None:
        self.unresolved = 0  # stored blocks without a chain, including those that may still get one
        self._names_max = names_max
        self._waiting_max = waiting_max
        self._names = 0
        self._waiting = 0
        self._workers: dict[int, _WorkerNames] = {}

    def translate(self, number: int, fact: KvEvents) -> tuple[KvEvents, list[Late]]:
        """Return the fact number `number` with chains in place of tokens, and the chains of earlier
        facts that became known by it.

        Events that every core ignores are left out: blocks with missing fields, and cache groups
        that do not count.
        """
        late: list[Late] = []
        events: list[KvEvent] = []
        worker = self._workers.setdefault(fact.worker_id, _WorkerNames())
        for event in fact.events:
            if isinstance(event, Stored):
                events += self._switch_group(worker, event)
                if not _counts(worker, event) or not _whole(event):
                    continue
                event, found = self._stored(worker, number, len(events), event)
                late += found
            elif isinstance(event, Removed):
                if not _counts(worker, event):
                    continue
                event = replace(event, group=None)
            events.append(event)
        return replace(fact, events=tuple(events)), late

    def worker_changed(self, fact: WorkerChange) -> None:
        """Drop the block names of a worker that is gone."""
        if fact.state == "gone" and (worker := self._workers.pop(fact.worker_id, None)):
            self._names -= len(worker.chain_of)
            for orphans in worker.orphans.values():
                self._waiting -= sum(len(orphan.stored.hashes) for orphan in orphans)

    def _switch_group(self, worker: _WorkerNames, event: Stored) -> Sequence[KvEvent]:
        """Make the first cache group with full attention the one that counts. Return events that
        remove the blocks of other groups.
        """
        if not event.full_attention or worker.full_attention:
            return ()
        worker.full_attention = True
        if (event.group or 0) == worker.group:
            return ()
        worker.group = event.group or 0
        held = tuple(worker.chain_of)
        return [Removed(held, tier) for tier in ("gpu", "host", "disk")] if held else ()

    def _stored(
        self, worker: _WorkerNames, number: int, position: int, event: Stored
    ) -> tuple[Stored, list[Late]]:
        nameless = replace(event, tokens=(), extras=(), group=None, full_attention=False)
        chain = event.chain
        if chain is None and not len(event.tokens):
            return nameless, []  # it only names blocks that are known
        if chain is None:
            seed = _seed(worker, event)
            if seed is None:
                self._wait(worker, _Orphan(number, position, event))
                return replace(nameless, chain=NOT_KNOWN), []
            chain = chain_of(event, seed)
        self._learn(worker, event, chain)
        return replace(nameless, chain=chain), list(self._wake(worker, event, chain))

    def _learn(self, worker: _WorkerNames, event: Stored, chain: Hashes) -> None:
        names = worker.chain_of
        before = len(names)
        for name, hash_ in zip(_names(event), chain.tolist(), strict=True):
            names.pop(name, None)
            names[name] = hash_
        self._names += len(names) - before
        while self._names > self._names_max and names:
            del names[next(iter(names))]
            self._names -= 1

    def _wait(self, worker: _WorkerNames, orphan: _Orphan) -> None:
        blocks, parent = len(orphan.stored.hashes), orphan.stored.parent
        self.unresolved += blocks
        if parent is None or self._waiting + blocks > self._waiting_max:
            return
        self._waiting += blocks
        worker.orphans.setdefault(block_name(parent), []).append(orphan)

    def _wake(self, worker: _WorkerNames, event: Stored, chain: Hashes) -> Iterator[Late]:
        """Yield the chains of blocks whose parent is a block of `event`, and of blocks that waited
        for them in turn.
        """
        if not worker.orphans:
            return
        known = [(event, chain)]
        while known:
            parent, chain = known.pop()
            for name, seed in zip(_names(parent), chain.tolist(), strict=True):
                for orphan in worker.orphans.pop(name, ()):
                    stored = orphan.stored
                    self._waiting -= len(stored.hashes)
                    self.unresolved -= len(stored.hashes)
                    known.append((stored, chain_of(stored, seed)))
                    self._learn(worker, *known[-1])
                    yield Late(orphan.fact, orphan.event, known[-1][1])


def _seed(worker: _WorkerNames, event: Stored) -> int | None:
    if event.parent is None:
        return event.seed
    parent = block_name(event.parent)
    seed = worker.chain_of.pop(parent, None)
    if seed is not None:
        worker.chain_of[parent] = seed  # used last, forgotten last
    return seed


def _names(event: Stored) -> list[int]:
    names: list[int] = block_names(event.hashes).tolist()
    return names


def _counts(worker: _WorkerNames, event: Stored | Removed) -> bool:
    return event.group in (None, worker.group)


def _whole(event: Stored) -> bool:
    """Return whether a stored event has all fields for each of its blocks."""
    blocks = len(event.hashes)
    if event.chain is not None:
        return len(event.chain) == blocks
    if len(event.extras) not in (0, blocks):
        return False
    return event.block_size > 0 and len(event.tokens) in (0, blocks * event.block_size)


log = logging.getLogger(__name__)

Told = tuple[
    str, Any, Any
]  # "fact", "explain", "advance", "policy", "limits" or "slow"; what; what came of it

_WAITING_ITEMS = 65_536
_WAITING_BYTES = 256 << 20
_ITEM_BYTES = 512  # memory of a fact besides its arrays and tokens, roughly
_WIRE_BLOCK_BYTES = 256  # a name and the tokens of a block as they came
_END_BYTES = 1_024  # kept free for the last record
_CLOSE_S = 5.0


class FactRecorder:
    """Records a core's facts and actions; only the thread that calls the core uses it. Lifetime:
    process.
    """

    def __init__(self, path: Path, limit_bytes: int, core: RouterCore, seed: int) -> None:
        """Begin a recording of `core`, which has seen no fact yet. An older file becomes `FILE.1`.

        Raises OSError that says which file cannot be written and why.
        """
        with opening("record_facts", path):
            file = LogFile(path, limit_bytes)
            file.make_room(limit_bytes)
        preamble = Preamble(fields_of(core.settings), seed, core.policy.spec)
        names = ChainNames(core.settings.index_entries, core.settings.parked_blocks)
        self._sink = _FactSink(file, limit_bytes, preamble, names)
        self._background: Background[Told] = Background(
            "facts recorder", self._sink, _WAITING_ITEMS, _WAITING_BYTES
        )
        self._key = secrets.token_bytes(32)
        self._core = core

    @property
    def is_closed(self) -> bool:
        """True if the recorder has stopped writing to its file."""
        return self._sink.is_closed

    def record(self, fact: Fact, take: Callable[[Fact], list[Action]]) -> list[Action]:
        """Pass a fact to the core by `take`, record the fact and the core's actions, and return the
        actions.
        """
        if isinstance(fact, Arrival):
            fact = self._shown(fact)
        elif isinstance(fact, PeerDispatched):
            fact = replace(fact, arrival=self._shown(fact.arrival))
        elif isinstance(fact, WorkerChange) and fact.saved is not None:
            # A saved cache may contain tokens of blocks that wait for their parents, which must not
            # be in a file of facts. The recorded worker begins without a cache.
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
        """Record the question to which worker `arrival` would go. Return the arrival as the core
        must see it.
        """
        arrival = self._shown(arrival)
        served = self._core.workers.serving(arrival.model)
        self._note("explain", arrival if served else self._nameless(arrival, [])[0], None)
        return arrival

    def advance(self, now_s: float) -> None:
        """Record that the load was read at `now_s`, because that changes the core's estimate of
        queues up to then.
        """
        self._note("advance", now_s, None)

    def set_policy(self, spec: str) -> None:
        """Record that another policy decides from now on."""
        self._note("policy", spec, None)

    def set_model_limits(self, lines: Sequence[str]) -> None:
        """Record that models have these limits from now on."""
        self._note("limits", list(lines), None)

    def slow(self, now_s: float, took_s: float) -> None:
        """Record that a call of the policy took too long, which the core counts as a fault of the
        policy.
        """
        self._note("slow", (now_s, took_s), None)

    def close(self) -> None:
        """Write the queued facts, and stop recording. This takes up to five seconds."""
        if left := self._background.close(_CLOSE_S):
            log.error("facts recorder: %d facts were not written before the end", left)

    def _shown(self, arrival: Arrival) -> Arrival:
        session, identity = arrival.session, arrival.identity
        if session is None and identity is UNIDENTIFIED:
            return arrival
        return replace(
            arrival,
            session=pseudonym(session, self._key),
            identity=pseudonyms(identity, self._key),
        )

    def _nameless(self, arrival: Arrival, actions: list[Action]) -> tuple[Arrival, list[Action]]:
        """Return an arrival and its actions with a digest in place of the model name if no worker
        serves it, because such a name may be any text.
        """
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
        if self._sink.is_closed:
            return
        if not self._background.put((kind, what, result), _size_of(what)):
            self._sink.end("facts came faster than they could be written")
            self._background.close(0.0)


class _FactSink:
    """Writes records with their lengths to the file, in the recorder's thread. Lifetime:
    recording.
    """

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
    def is_closed(self) -> bool:
        """True if no more records will be written to the file."""
        return bool(self._why)

    def end(self, why: str) -> None:
        """End the recording after the facts that are already queued. Either thread may call it."""
        if not self._why:
            self._why = why
            log.error("facts recorder ends: %s", why)

    def write(self, items: Sequence[Told]) -> None:
        """Append a record for each item, and records for the chains that became known by it."""
        if self._over:
            return
        data = b"".join(frame for told in items for frame in self._frames(told))
        if len(data) > self._left_bytes:
            self.end(f"{self._file.path} has reached its limit, record_facts_bytes")
            self._finish()
        else:
            self._append(data)

    def reopen(self) -> None:
        """Do nothing: a recording is one file, which cannot continue in another."""

    def close(self) -> None:
        """Write a last record that says why the recording ends."""
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
    """Return roughly how many bytes of memory an item keeps alive."""
    size_bytes = _ITEM_BYTES
    if isinstance(what, PeerDispatched):
        what = what.arrival
    if isinstance(what, Arrival):
        for chain in what.chains.values():
            size_bytes += chain.nbytes
    elif isinstance(what, KvEvents) and isinstance(what.events, WireEvents):
        size_bytes += _ITEM_BYTES * len(what.events) + _WIRE_BLOCK_BYTES * what.events.blocks
    elif isinstance(what, KvCopied):
        size_bytes += len(what.snapshot.blocks)
    elif isinstance(what, KvEvents):
        for event in what.events:
            size_bytes += _ITEM_BYTES
            if isinstance(event, Stored):
                size_bytes += 8 * len(event.tokens)
    return size_bytes
