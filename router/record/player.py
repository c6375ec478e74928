"""Plays a recording of facts to a fresh core and says where it decides otherwise.

Same facts, same seed, same policy: same actions. A difference means that the core or a policy
was changed since the recording, that a policy is not pure, or a defect. No I/O but reading the
file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from policies import facts
from policies.contract import Hashes
from policies.load import load
from policies.parameters import PolicyError
from router.core.core import RouterCore
from router.core.settings import CoreSettings
from router.core.take import take
from router.record.facts_file import (
    Preamble,
    RecordingError,
    as_read,
    fact_of,
    hashes,
    plain,
    preamble_of,
    records,
)

Answer = list[Any] | str  # actions as [kind, fields], or the name of the error that was raised


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact that was answered otherwise. After the first one, others may follow from it."""

    fact: int  # its number, from 0
    kind: str
    now_s: float
    recorded: Answer
    played: Answer

    def __str__(self) -> str:
        where = f"fact {self.fact} ({self.kind} at {self.now_s:.6f} s)"
        return f"{where}: recorded {self.recorded}, played {self.played}"


class Player:
    """Lifetime: one playing of one file."""

    def __init__(self, path: Path) -> None:
        """Reads the file once to check it and to find the chains that it tells late.

        Raises OSError, RecordingError, and PolicyError for a policy that is not to be had here.
        """
        self.facts = 0  # played so far
        self.actions = 0  # of these, compared so far
        self.ended = "cut off"  # why the recording ends
        self._path = path
        self._late: dict[tuple[int, int], Hashes] = {}
        self.preamble = self._look_through()
        self._core = self._fresh_core(self.preamble)

    def differences(self) -> Iterator[Difference]:
        """Plays the file to its end; call it once. Raises RecordingError where it is damaged."""
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
                case ["fact" | "explain" | "advance" | "policy" | "slow", *_]:
                    pass
                case _:
                    raise RecordingError(f"{self._path}: record {number} is of no known kind")
        return preamble

    def _fresh_core(self, preamble: Preamble) -> RouterCore:
        try:
            settings = CoreSettings(**preamble.settings)  # type: ignore[arg-type]
            policy = load(preamble.policy)
            return RouterCore(policy, settings, preamble.seed, _forgive)
        except PolicyError:
            raise
        except (TypeError, ValueError, OverflowError, MemoryError) as error:
            raise RecordingError(f"{self._path}: settings of another version: {error}") from error

    def _play(self, record: list[Any]) -> Difference | None:
        match record:
            case ["fact", kind, fields, recorded]:
                return self._told(fact_of(kind, fields), recorded)
            case ["explain", fields]:
                self._explain(fact_of("Arrival", fields))
            case ["advance", now_s]:
                self._core.ledger.advance(now_s)
            case ["policy", spec]:
                self._core.set_policy(load(spec))
            case ["slow", [now_s, took_s]]:
                self._core.guard.settle_slow(now_s, took_s)
        return None

    def _explain(self, arrival: facts.Arrival) -> None:
        with suppress(PolicyError):  # it failed there as well, and whoever asked was told
            self._core.explain(arrival)

    def _told(self, fact: Any, recorded: Answer) -> Difference | None:
        if isinstance(fact, facts.KvEvents):
            fact = self._with_chains(fact)
        played = self._answer(fact)
        number, self.facts = self.facts, self.facts + 1
        self.actions += 0 if isinstance(recorded, str) else len(recorded)
        if played == recorded:
            return None
        return Difference(number, type(fact).__name__, fact.now_s, recorded, played)

    def _answer(self, fact: facts.Fact) -> Answer:
        try:
            actions = take(self._core, fact)
        except Exception as error:  # noqa: BLE001 - it is compared with the recorded one
            return type(error).__name__
        answer: list[Any] = as_read([plain(action) for action in actions])
        return answer

    def _with_chains(self, fact: facts.KvEvents) -> facts.KvEvents:
        """Blocks whose parent never came wait for it here too: any chain does for them."""
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


def _forgive(error: PolicyError) -> None:
    """As the router does: it goes on without the policy's answer."""
