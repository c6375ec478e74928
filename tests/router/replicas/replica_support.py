"""Replicas without routers for tests: real links, whose exchanges record each message that they
receive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any

from router.config.extras import Replicas
from router.redis.url import parse_redis_url
from router.replicas.link import Link
from router.replicas.membership import VERSION, new_identity

WAIT_S = 20.0
TERMS: Mapping[str, str] = {VERSION: "1", "policy": "warmset"}


class Notes:
    """An `Exchange` that sends the messages a test gives it and records all that it receives.
    Lifetime: test.
    """

    def __init__(self) -> None:
        self.outbox: deque[bytes] = deque()
        self.heard: list[tuple[str, bytes]] = []
        self.peers: frozenset[str] = frozenset()
        self.presence_calls: list[frozenset[str]] = []
        self.on_news: Callable[[], None] = lambda: None  # the link has its own put there
        self.joins = self.parts = self.leaves = 0

    def joined(self, now_s: float) -> None:
        self.joins += 1

    def parted(self, now_s: float) -> None:
        self.parts += 1

    def leave(self) -> None:
        self.leaves += 1

    def outgoing(self, now_s: float) -> bytes | None:
        return self.outbox.popleft() if self.outbox else None

    def incoming(self, peer: str, payload: bytes, now_s: float) -> None:
        assert peer in self.peers
        self.heard.append((peer, payload))

    def present(self, peers: Collection[str], now_s: float) -> None:
        self.peers = frozenset(peers)
        self.presence_calls.append(self.peers)

    def messages(self) -> list[bytes]:
        """Return the messages received from all peers."""
        return [payload for _, payload in self.heard]


class Replica:
    """A link between replicas and the record of its messages. Lifetime: test."""

    def __init__(
        self, url: str, name: str, terms: Mapping[str, str] = TERMS, **replicas: Any
    ) -> None:
        options = {"lease_s": 1.5, **replicas}
        self.notes = Notes()
        self.identity = new_identity(name)
        self.link = Link(
            parse_redis_url(url), Replicas(**options), self.identity, self.notes, terms
        )

    def send(self, *words: bytes) -> None:
        self.notes.outbox.extend(words)

    def received(self, *words: bytes) -> Callable[[], bool]:
        """Return a function that returns whether this replica has received all of these
        messages.
        """
        return lambda: set(words) <= set(self.notes.messages())

    def has_peers(self, *others: Replica) -> Callable[[], bool]:
        """Return a function that returns whether exactly these peers are present for this
        replica.
        """
        return lambda: self.notes.peers == {other.identity for other in others}


async def until(condition: Callable[[], bool], within_s: float = WAIT_S) -> float:
    """Wait until the condition holds, and return the seconds that it took; fails after
    `within_s`.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while not condition():
        assert loop.time() - begun < within_s, "it does not come about"
        await asyncio.sleep(0.005)
    return loop.time() - begun


async def all_present(*replicas: Replica, within_s: float = WAIT_S) -> float:
    def seen() -> bool:
        return all(
            one.link.up and one.has_peers(*(other for other in replicas if other is not one))()
            for one in replicas
        )

    return await until(seen, within_s)


@contextlib.asynccontextmanager
async def fleet(url: str, *names: str, **options: Any) -> AsyncIterator[list[Replica]]:
    """Yield started replicas, each of which sees all others."""
    replicas = [Replica(url, name, **options) for name in names]
    for replica in replicas:
        replica.link.start()
    try:
        await all_present(*replicas)
        yield replicas
    finally:
        await asyncio.gather(*(replica.link.aclose() for replica in replicas))
