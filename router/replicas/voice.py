"""What this replica tells its peers of its own requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from msgspec.structs import replace

from policies.facts import Finish
from router.core.hold_queue import Pending
from router.core.workers import Worker
from router.keys.shared_use import Use
from router.replicas.kv_messages import KvSaid
from router.replicas.messages import (
    HASH_TYPE,
    MAX_CHAIN_BLOCKS,
    MAX_TOKENS,
    VERSION,
    Begun,
    Ended,
    Grew,
    Happened,
    Message,
    Retelling,
    Sent,
    Used,
    encoded,
)

_MESSAGE_BYTES = 128 << 10  # of what happened, by a rough count; one alone may have twice as many
_PLAIN_BYTES = 160  # of what happened, but for chains
_GROWTH_TOKENS = 64  # of an answer, that are worth telling
_SILENT_S = 0.5  # without a word: then a message says that nothing was missed
_RETELL_S = 0.2  # at least, between two retellings: each costs what all open requests cost
_QUEUED = 200_000  # told to nobody yet; beyond it all is told anew instead


@dataclass(slots=True)
class _Open:
    """One of our requests at a worker. Lifetime: dispatch."""

    sent: Sent  # without its chains
    begun: bool = False
    told_tokens: int = 0
    output_tokens: int = 0


FetchKv = Callable[[float, int], tuple[KvSaid, ...]]


class Uses(Protocol):
    """What our requests use of keys (`router.keys.shared_use`)."""

    def changed(self) -> list[Use]:
        """Of keys where that changed since this was asked."""
        ...

    def all(self) -> list[Use]:
        """Of all keys."""
        ...


class Voice:
    """A `Listener` of the core, that keeps what it hears until it is fetched. Lifetime: process."""

    def __init__(self, on_news: Callable[[], None], kv: FetchKv = lambda now_s, room: ()) -> None:
        """`on_news` is told when there is something to fetch again; `kv` gives what is to be said
        of KV events, of so many bytes.
        """
        self._on_news, self._kv = on_news, kv
        self.retellings = 0
        self.told = 0  # things that happened, said so far
        self._open: dict[int, _Open] = {}
        self._queue: deque[Happened] = deque()
        self._parts: deque[tuple[Retelling, tuple[Happened, ...]]] = deque()
        self._connected = False
        self._retell = False
        self._untold = True  # what happened is told by the next retelling, which nothing precedes
        self._number = 0
        self._told_open = 0  # requests, as whoever heard all of it must count them
        self._said_s = self._retold_s = float("-inf")

    # --- what the core tells ----------------------------------------------------------------

    def dispatched(self, pending: Pending, worker: Worker, uncached_tokens: int) -> None:
        """A request was charged to a worker."""
        arrival = pending.arrival
        chains = tuple(
            (size, chain[:MAX_CHAIN_BLOCKS].astype(HASH_TYPE, copy=False).tobytes())
            for size, chain in arrival.chains.items()
        )
        sent = Sent(
            arrival.request_id,
            worker.facts.name,
            arrival.model,
            arrival.prompt_tokens,
            uncached_tokens,
            arrival.stream,
            arrival.approximate,
            pending.standing,
            arrival.session,
            arrival.tenant,
            arrival.weight,
            arrival.longest_prompt_tokens,
        )
        self._open[arrival.request_id] = _Open(sent)
        if self._connected:
            self._say(replace(sent, chains=chains))

    def first_token(self, request_id: int) -> None:
        """Its prefill is over."""
        one = self._open.get(request_id)
        if one is not None and not one.begun:
            one.begun = True
            if self._connected:
                self._say(Begun(request_id))

    def progress(self, request_id: int, output_tokens: int) -> None:
        """Its answer has grown to so many tokens."""
        one = self._open.get(request_id)
        if one is None:
            return
        one.output_tokens = output_tokens
        if output_tokens - one.told_tokens >= _GROWTH_TOKENS:
            one.told_tokens = output_tokens
            if self._connected:
                self._say(Grew(request_id, output_tokens))

    def ended(self, request_id: int, finish: Finish | None) -> None:
        """It is at its worker no more; with a `finish` where it was answered."""
        if self._open.pop(request_id, None) is None or not self._connected:
            return
        if finish is None:
            self._say(Ended(request_id))
            return
        counts = finish.prompt_tokens, finish.cached_tokens, finish.output_tokens
        self._say(Ended(request_id, True, *map(_tokens, counts)))

    # --- what is fetched --------------------------------------------------------------------

    def connect(self) -> None:
        """Messages get out again: peers must be told all anew."""
        self._connected = True
        self._drop_queue()

    def disconnect(self) -> None:
        """Messages get out no more: what happens now is told anew later."""
        self._connected = False
        self._drop_queue()

    def retell(self) -> None:
        """A peer missed something."""
        self._retell = True

    def message(self, now_s: float, wants: tuple[str, ...], uses: Uses) -> bytes | None:
        """The next message; None: there is nothing to say."""
        if not self._connected:
            return None
        if self._untold or (not (self._parts or self._queue) and self._due(now_s)):
            self._untold = self._retell = False
            self._retold_s = now_s
            self._parts.extend(_parts(self._all_open()))
            self._told_open = len(self._open)
            self.retellings += 1
        retelling: Retelling = ""
        happened: tuple[Happened, ...] = ()
        size_bytes = 0
        if self._parts:  # what happened since comes after it
            retelling, happened = self._parts.popleft()
            size_bytes = len(happened) * _PLAIN_BYTES
        elif self._queue:
            happened, size_bytes = self._oldest()
        kv = self._kv(now_s, _MESSAGE_BYTES - size_bytes)
        used = uses.all() if retelling in ("first", "only") else uses.changed()
        has_news = happened or retelling or wants or used or kv
        if not has_news and now_s - self._said_s < _SILENT_S:
            return None
        self._said_s = now_s
        self.told += len(happened)
        number, self._number = self._number, self._number + 1
        told_use = tuple(Used(*use) for use in used)
        return encoded(
            Message(VERSION, number, self._told_open, retelling, wants, happened, told_use, kv)
        )

    # --- inside -----------------------------------------------------------------------------

    def _due(self, now_s: float) -> bool:
        return self._retell and now_s - self._retold_s >= _RETELL_S

    def _say(self, one: Happened) -> None:
        if len(self._queue) >= _QUEUED:
            self._drop_queue()
        elif not self._untold:
            self._queue.append(one)
            if len(self._queue) == 1:
                self._on_news()

    def _drop_queue(self) -> None:
        self._queue.clear()
        self._parts.clear()
        self._untold = True

    def _oldest(self) -> tuple[tuple[Happened, ...], int]:
        """As many of the queue as a message holds, at least one; and their bytes."""
        queue, chosen, size_bytes = self._queue, [], 0
        while queue and size_bytes < _MESSAGE_BYTES:
            one = queue.popleft()
            chosen.append(one)
            size_bytes += _size_bytes(one)
            if type(one) is Sent:
                self._told_open += 1
            elif type(one) is Ended:
                self._told_open -= 1
        return tuple(chosen), size_bytes

    def _all_open(self) -> Iterator[Happened]:
        for request_id, one in self._open.items():
            yield one.sent
            if one.begun:
                yield Begun(request_id)
            if one.output_tokens:
                one.told_tokens = one.output_tokens
                yield Grew(request_id, one.output_tokens)


def _parts(happened: Iterator[Happened]) -> list[tuple[Retelling, tuple[Happened, ...]]]:
    """Cut into messages; there is one also where nothing is open."""
    cuts: list[tuple[Happened, ...]] = []
    while cut := tuple(islice(happened, _MESSAGE_BYTES // _PLAIN_BYTES)):
        cuts.append(cut)
    if len(cuts) < 2:
        return [("only", cuts[0] if cuts else ())]
    between: list[tuple[Retelling, tuple[Happened, ...]]] = [("more", cut) for cut in cuts[1:-1]]
    return [("first", cuts[0]), *between, ("last", cuts[-1])]


def _size_bytes(one: Happened) -> int:
    chains = one.chains if type(one) is Sent else ()
    return _PLAIN_BYTES + sum(len(chain) for _, chain in chains)


def _tokens(count: int | None) -> int | None:
    """As it may be told: a worker may have counted anything."""
    return None if count is None else min(max(count, 0), MAX_TOKENS)
