"""Defines the format of recorded facts, and replays a recording with a new core to check it.

The first record is the `Preamble`. The others follow in the order in which the core saw them:

    ["fact", kind, fields, actions]   one fact; each action as [kind, fields]; or, where the core
                                      raised an error, its name instead of the list
    ["explain", fields]               a question where this arrival would go
    ["advance", now_s]                the load was read at this time
    ["policy", specification]         another policy decides from here on
    ["limits", [line, ...]]           models have these limits (`model_limits`) from here on
    ["slow", [now_s, took_s]]         a call of the policy took too long
    ["late", fact, event, chain]      the chain of blocks of an earlier fact (counted from 0)
                                      whose parent became known only here
    ["end", why]                      why the recording ends; without it the file was cut off

Stored blocks carry chain hashes, never token ids. An array of hashes is bytes, uint64
little-endian.

The same facts, seed and policy give the same actions. A difference means that the core or a policy
has changed since the recording, that a policy is not pure, or that there is a defect. This module
does no I/O except reading the file.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import msgspec
import numpy as np

from policies import facts
from policies.contract import Hashes
from policies.load import PolicyError, load
from router.core.contract.settings import CoreSettings
from router.core.core import RouterCore, take
from router.record.model_limits import model_limits

FORMAT = "warmroute-facts"
VERSION = 1
MAX_RECORD_BYTES = 1 << 28

_LENGTH = struct.Struct(">I")


class RecordingError(ValueError):
    """Raised when a file is not a recording that can be replayed; the text says where the error is,
    and why.
    """


class Preamble(msgspec.Struct, frozen=True):
    """The settings, seed and policy with which the recorded core started. Settings are given by
    their names.
    """

    settings: dict[str, float | int | str]
    seed: int
    policy: str  # specification, every parameter written out
    format: str = FORMAT
    version: int = VERSION


def framed(record: Any) -> bytes:
    """Return a record as bytes for the file: its length, followed by the record in msgpack."""
    data = msgspec.msgpack.encode(record, enc_hook=_plain_value)
    return _LENGTH.pack(len(data)) + data


def as_read(record: Any) -> Any:
    """Return a record as `records` would return it from a file."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record, enc_hook=_plain_value))


def records(path: Path) -> Iterator[Any]:
    """Yield the file's decoded records; an incomplete last record is left out.

    Raises OSError if the file cannot be read, RecordingError if it is not a recording.
    """
    with path.open("rb") as file:
        number = 0
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if length > MAX_RECORD_BYTES:
                raise RecordingError(f"{path}: record {number} has {length} bytes: no recording")
            data = file.read(length)
            if len(data) < length:
                return
            try:
                yield msgspec.msgpack.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RecordingError(f"{path}: record {number} is no msgpack: {error}") from error
            number += 1


def preamble_of(record: Any, path: Path) -> Preamble:
    """Return the first record of a file as a checked Preamble. Raises RecordingError if it is
    something else.
    """
    try:
        preamble = msgspec.convert(record, Preamble)
    except msgspec.ValidationError as error:
        raise RecordingError(f"{path}: does not begin as a recording: {error}") from error
    if (preamble.format, preamble.version) != (FORMAT, VERSION):
        found = f"{preamble.format!r}, version {preamble.version}"
        raise RecordingError(f"{path}: is {found}; expected {FORMAT!r}, version {VERSION}")
    return preamble


# --- to the file ----------------------------------------------------------------------------


def plain(thing: Any) -> list[Any]:
    """Return a fact, an event or an action as `[kind, fields]`."""
    return [type(thing).__name__, fields_of(thing)]


def fields_of(thing: Any) -> dict[str, Any]:
    """Return the fields of an object by name; objects in its fields are converted in the
    same way.
    """
    kind: Any = type(thing)
    return {name: _plain(name, getattr(thing, name)) for name in _names(kind)}


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (int, float, str, bytes)):
        return value
    if name == "hashes":  # names of blocks, which may be an array
        return value.tolist() if isinstance(value, np.ndarray) else value
    if name == "events":
        return [plain(event) for event in value]
    if isinstance(value, tuple) and value and not isinstance(value[0], (int, str, bytes)):
        return [fields_of(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic, tuple, frozenset, Mapping)):
        return value
    return fields_of(value)


def _plain_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype("<u8", copy=False).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"no fact holds a {type(value).__name__}: {value!r:.80}")


# --- from the file --------------------------------------------------------------------------


def fact_of(kind: Any, fields: Any) -> Any:
    """Return the fact that `plain` turned into a kind and fields. Raises ValueError or TypeError if
    it is malformed.
    """
    return _of_kind(_FACTS, kind, fields)


def hashes(data: bytes) -> Hashes:
    """Return the uint64[blocks] that the bytes contain. Raises ValueError if their length is not a
    multiple of 8.
    """
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)


def _of_kind(kinds: Mapping[str, Callable[..., Any]], kind: Any, fields: Any) -> Any:
    if kind not in kinds:
        raise ValueError(f"{kind!r} is none of {', '.join(kinds)}")
    return _built(kinds[kind], fields)


def _built(kind: Callable[..., Any], fields: Any) -> Any:
    if not isinstance(fields, dict):
        raise ValueError(f"{fields!r:.80} are no fields of {kind!r}")
    return kind(
        **{
            name: value if value is None or name not in _READ else _READ[name](value)
            for name, value in fields.items()
        }
    )


_FACTS = MappingProxyType({kind.__name__: kind for kind in get_args(facts.Fact)})
_EVENTS = MappingProxyType({kind.__name__: kind for kind in get_args(facts.KvEvent)})
# Readers of fields whose values are written in another form in a file, by name.
_READ: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "chains": lambda chains: {int(size): hashes(data) for size, data in chains.items()},
        "chain": hashes,
        "tokens": lambda none: (),
        **dict.fromkeys(("hashes", "models", "extras", "among"), tuple),
        **dict.fromkeys(("adapters", "lacks", "denied"), frozenset),
        "events": lambda events: tuple(_of_kind(_EVENTS, *event) for event in events),
        "spec": partial(_built, facts.WorkerFacts),
        "snapshot": partial(_built, facts.CacheSnapshot),
        "finish": partial(_built, facts.Finish),
        "identity": partial(_built, facts.Identity),
        **dict.fromkeys(("arrival", "rest"), partial(_built, facts.Arrival)),
    }
)


Answer = list[Any] | str  # actions as [kind, fields], or the name of the error that was raised


@dataclass(frozen=True, slots=True)
class FactDifference:
    """One fact at which the fresh core returned other actions than the recorded core. Later
    differences may result from the first.
    """

    fact: int  # its number, from 0
    kind: str
    now_s: float
    recorded: Answer
    played: Answer

    def __str__(self) -> str:
        where = f"fact {self.fact} ({self.kind} at {self.now_s:.6f} s)"
        return f"{where}: recorded {self.recorded}, played {self.played}"


class Player:
    """Replays a recording with a fresh core and compares the actions. Lifetime: one replay of one
    file.
    """

    def __init__(self, path: Path) -> None:
        """Read the file once to check it and to find the chains that it records late.

        Raises OSError, RecordingError, and PolicyError if the policy is not available here.
        """
        self.facts = 0  # played so far
        self.actions = 0  # of these, compared so far
        self.ended = "cut off"  # why the recording ends
        self._path = path
        self._late: dict[tuple[int, int], Hashes] = {}
        self.preamble = self._look_through()
        self._core = self._fresh_core(self.preamble)

    def differences(self) -> Iterator[FactDifference]:
        """Replay the file to its end and yield the differences. It can be called only once. Raises
        RecordingError if the file is damaged.
        """
        for number, record in enumerate(records(self._path)):
            if number == 0:
                continue
            try:
                found = self._play(record)
            except (ValueError, TypeError, KeyError, IndexError) as error:
                raise RecordingError(f"{self._path}: record {number}: {error!r}") from error
            if found is not None:
                yield found

    def _look_through(self) -> Preamble:
        read = records(self._path)
        first = next(read, None)
        preamble = preamble_of(first, self._path)
        for number, record in enumerate(read, start=1):
            match record:
                case ["late", int(fact), int(event), bytes(chain)]:
                    self._late[fact, event] = hashes(chain)
                case ["end", str(why)]:
                    self.ended = why
                case ["fact" | "explain" | "advance" | "policy" | "limits" | "slow", *_]:
                    pass
                case _:
                    raise RecordingError(f"{self._path}: record {number} is of no known kind")
        return preamble

    def _fresh_core(self, preamble: Preamble) -> RouterCore:
        try:
            settings = CoreSettings(**preamble.settings)  # type: ignore[arg-type]
            policy = load(preamble.policy)
            return RouterCore(policy, settings, preamble.seed, _ignore_policy_error)
        except PolicyError:
            raise
        except (TypeError, ValueError, OverflowError, MemoryError) as error:
            raise RecordingError(f"{self._path}: settings of another version: {error}") from error

    def _play(self, record: list[Any]) -> FactDifference | None:
        match record:
            case ["fact", kind, fields, recorded]:
                return self._replayed(fact_of(kind, fields), recorded)
            case ["explain", fields]:
                self._explain(fact_of("Arrival", fields))
            case ["advance", now_s]:
                self._core.ledger.advance(now_s)
            case ["policy", spec]:
                self._core.set_policy(load(spec))
            case ["limits", lines]:
                self._core.model_limits.limits = model_limits(lines)
            case ["slow", [now_s, took_s]]:
                self._core.guard.settle_slow(now_s, took_s)
        return None

    def _explain(self, arrival: facts.Arrival) -> None:
        # The recorded policy failed there as well, and that was reported.
        with suppress(PolicyError):
            self._core.explain(arrival)

    def _replayed(self, fact: Any, recorded: Answer) -> FactDifference | None:
        if isinstance(fact, facts.KvEvents):
            fact = self._with_chains(fact)
        played = self._answer(fact)
        number, self.facts = self.facts, self.facts + 1
        self.actions += 0 if isinstance(recorded, str) else len(recorded)
        if played == recorded:
            return None
        return FactDifference(number, type(fact).__name__, fact.now_s, recorded, played)

    def _answer(self, fact: facts.Fact) -> Answer:
        try:
            actions = take(self._core, fact)
        except Exception as error:  # noqa: BLE001 - it is compared with the recorded one
            return type(error).__name__
        answer: list[Any] = as_read([plain(action) for action in actions])
        return answer

    def _with_chains(self, fact: facts.KvEvents) -> facts.KvEvents:
        """Return the fact with a chain of hashes for each stored block.

        A block whose parent never arrived waits for its parent in the fresh core, too, so that it
        may get any chain.
        """
        events = tuple(
            replace(event, chain=self._chain(position, event))
            if isinstance(event, facts.Stored)
            and event.chain is not None
            and len(event.chain) != len(event.hashes)
            else event
            for position, event in enumerate(fact.events)
        )
        return replace(fact, events=events)

    def _chain(self, position: int, event: facts.Stored) -> Hashes:
        found = self._late.get((self.facts, position))
        return np.zeros(len(event.hashes), dtype=np.uint64) if found is None else found


def _ignore_policy_error(error: PolicyError) -> None:
    """Ignore a policy's error, because the router also does so and decides without the policy."""
