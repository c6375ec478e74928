"""Between the link that carries messages and what is said in them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

MAX_MESSAGE_BYTES = 256 << 10


class Exchange(Protocol):
    """One replica's side. Peers are named `name@epoch`: a router begun anew is another one.

    All times are this process' own clock. Nothing here raises or waits.
    """

    on_news: Callable[[], None]  # told when there is something to say again; set by the link

    def joined(self, now_s: float) -> None:
        """The link is up, perhaps again: all is told anew, and asked for."""
        ...

    def parted(self, now_s: float) -> None:
        """The link is down: what is known of peers is stale, and stays."""
        ...

    def outgoing(self, now_s: float) -> bytes | None:
        """The next message, of at most `MAX_MESSAGE_BYTES`; None: there is nothing to say."""
        ...

    def incoming(self, peer: str, payload: bytes, now_s: float) -> None:
        """A message of a peer, as it came: it may hold anything."""
        ...

    def present(self, peers: Collection[str], now_s: float) -> None:
        """All peers whose lease holds; any other is gone."""
        ...
