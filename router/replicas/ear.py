"""What is understood of one peer: which of its requests are at which of our workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import count

import numpy as np

from policies.facts import (
    Arrival,
    Finish,
    PeerDispatched,
    PeerEnded,
    PeerFact,
    PeerFirstToken,
    PeerProgress,
)
from router.replicas.messages import HASH_TYPE, Begun, Ended, Grew, Happened, Message, Sent

_KEPT = 1 << 17  # requests of one peer that are told apart
_UNKNOWN = 0  # stands for the number of a request at a worker that we do not know


@dataclass(slots=True)
class EarCounters:
    """Of one peer, or of all there ever were. Counts only ever grow. Lifetime: peer, or process."""

    messages: int = 0
    happened: int = 0
    gaps: int = 0  # messages missed
    miscounted: int = 0  # messages after which it has more or fewer requests than we know of
    strange: int = 0  # requests at workers that this replica does not know
    beyond: int = 0  # requests for which there was no room

    def add(self, other: EarCounters) -> None:
        """Count what another one counted."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Ear:
    """Lifetime: peer. Makes facts of what it hears, with numbers of ours for its requests.

    `tell` takes each fact as it is made; `worker_id` finds a worker by its name; `room` says
    whether one more request may be kept, once the facts so far are told.
    """

    def __init__(
        self,
        worker_id: Callable[[str], int | None],
        room: Callable[[], bool],
        numbers: Iterator[int],
        tell: Callable[[PeerFact], None],
    ) -> None:
        self.counters = EarCounters()
        self.in_step = False  # nothing was missed since all was told
        self.heard_s = float("-inf")
        self._worker_id, self._room, self._numbers = worker_id, room, numbers
        self._tell = tell
        self._next_number: int | None = None
        self._ours: dict[int, int] = {}  # its number of a request -> ours
        self._worker: dict[int, str] = {}  # its number of a request -> where that is
        self._waiting: set[int] = set()  # of ours: before their first tokens
        self._retold: set[int] | None = None  # its numbers, in the retelling under way

    def __len__(self) -> int:
        """Its requests at workers that we know."""
        return sum(number != _UNKNOWN for number in self._ours.values())

    def hear(self, message: Message, now_s: float) -> None:
        """Tell the facts of a message."""
        self.heard_s = now_s
        self.counters.messages += 1
        if message.number != self._next_number:
            self.counters.gaps += self._next_number is not None
            self.in_step, self._retold = False, None
        self._next_number = message.number + 1
        if message.retelling in ("first", "only"):
            self._retold = set()
        self.counters.happened += len(message.happened)
        for one in message.happened:
            self._understand(one, now_s)
        if message.retelling in ("last", "only") and self._retold is not None:
            self._end_all_but(self._retold, now_s)
            self._retold, self.in_step = None, True
        if self.in_step and message.open_requests != len(self._ours):
            self.counters.miscounted += 1
            self.in_step = False

    def gone(self, now_s: float) -> None:
        """The peer is no more, and so is all that it had."""
        self.in_step = False
        self._end_all_but(set(), now_s)

    def stale(self, now_s: float) -> None:
        """Nothing is heard any more. What it had stays, as load of its workers; but prompts do
        get computed, and a queue that never drains would be a worse guess than none.
        """
        self.in_step, self._next_number, self._retold = False, None, None
        for number in sorted(self._waiting, reverse=True):
            self._tell(PeerFirstToken(now_s, number))
        self._waiting.clear()

    def _understand(self, one: Happened, now_s: float) -> None:
        if self._retold is not None:
            self._retold.add(one.request_id)
        if type(one) is Sent:
            self._sent(one, now_s)
        elif type(one) is Ended:
            self._end(one.request_id, now_s, one)
        elif (number := self._ours.get(one.request_id, _UNKNOWN)) == _UNKNOWN:
            return
        elif type(one) is Begun:
            self._waiting.discard(number)
            self._tell(PeerFirstToken(now_s, number))
        elif type(one) is Grew:
            self._tell(PeerProgress(now_s, number, one.output_tokens))

    def _sent(self, sent: Sent, now_s: float) -> None:
        known = self._ours.get(sent.request_id)
        if known is not None:
            if self._retold is not None and self._worker[sent.request_id] == sent.worker:
                return
            self._end(sent.request_id, now_s)  # it was sent anew, unheard by us
        if len(self._ours) >= _KEPT:
            self.counters.beyond += 1
            return
        self._worker[sent.request_id] = sent.worker
        worker_id = self._worker_id(sent.worker)
        if worker_id is None or not self._room():
            self.counters.strange += worker_id is None
            self.counters.beyond += worker_id is not None
            self._ours[sent.request_id] = _UNKNOWN
            return
        number = self._ours[sent.request_id] = next(self._numbers)
        self._waiting.add(number)
        arrival, uncached = _arrival(sent, number, now_s), max(sent.uncached_tokens, 1)
        self._tell(PeerDispatched(now_s, arrival, worker_id, uncached, sent.standing))

    def _end(self, request_id: int, now_s: float, ended: Ended | None = None) -> None:
        self._worker.pop(request_id, None)
        number = self._ours.pop(request_id, _UNKNOWN)
        self._waiting.discard(number)
        if number != _UNKNOWN:
            finish = None if ended is None else _finish(ended, number, now_s)
            self._tell(PeerEnded(now_s, number, finish))

    def _end_all_but(self, kept: set[int], now_s: float) -> None:
        for request_id in [one for one in self._ours if one not in kept]:
            self._end(request_id, now_s)


def numbers_below_zero() -> Iterator[int]:
    """Our numbers for peers' requests: none of them is one of ours, or comes twice."""
    return count(-1, -1)


def _arrival(sent: Sent, number: int, now_s: float) -> Arrival:
    return Arrival(
        now_s=now_s,
        request_id=number,
        model=sent.model,
        prompt_tokens=max(sent.prompt_tokens, 1),
        chains={size: np.frombuffer(chain, HASH_TYPE) for size, chain in sent.chains},
        approximate=sent.approximate,
        session=sent.session,
        tenant=sent.tenant,
        stream=sent.stream,
        longest_prompt_tokens=sent.longest_prompt_tokens,
        weight=sent.weight,
    )


def _finish(ended: Ended, number: int, now_s: float) -> Finish | None:
    if not ended.answered:
        return None
    return Finish(now_s, number, ended.prompt_tokens, ended.cached_tokens, ended.output_tokens)
