"""One reader of an address for several feeds: a bound endpoint, a URL where reading destroys.

The reader starts with the first feed that joins and ends with the last. Each feed has a seat, named
by what its messages are told apart by (a topic, a rank), with a bounded queue in front.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from router.lines import worth_a_line

log = logging.getLogger(__name__)

Key = str | int
Message = Any  # what the reader of that address gives; feed and reader are of one file


class Seat:
    """One feed's place at a hub. Lifetime: feed."""

    def __init__(self, limit: int, dropped: Callable[[], None]) -> None:
        self._queue: asyncio.Queue[Message] = asyncio.Queue(limit)
        self._dropped = dropped
        self.connected: Callable[[], None] = lambda: None
        self._end: BaseException | None = None

    async def receive(self) -> Message:
        """The next message. Raises what ended the reader."""
        message = await self._queue.get()
        if self._end is not None:
            raise self._end
        return message

    def give(self, message: Message) -> None:
        """Keep it for the feed; one beyond the limit is dropped, and counted there."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self._dropped()

    def end(self, error: BaseException) -> None:
        """No more will come."""
        self._end = error
        with suppress(asyncio.QueueFull):  # a full queue wakes its feed as well
            self._queue.put_nowait(None)


class Hub:
    """The seats at one address. Lifetime: from the first feed's start to the last one's end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.seats: dict[Key, Seat] = {}
        self.strays = 0  # messages that nobody sits there for
        self.reader: asyncio.Task[None] | None = None

    def give(self, key: Key, message: Message) -> None:
        """A message for the seat `key`; where nobody sits there, count it."""
        seat = self.seats.get(key)
        if seat is not None:
            seat.give(message)
            return
        self.strays += 1
        if worth_a_line(self.strays):
            log.warning(
                "%s: %d messages with events that no worker is to have, now of %.100r",
                self.address,
                self.strays,
                key,
            )

    def give_all(self, message: Message) -> None:
        """A message for everybody."""
        for seat in self.seats.values():
            seat.give(message)

    def connected(self) -> None:
        """Somebody connected: tell everybody, for nobody knows yet who it is."""
        for seat in self.seats.values():
            seat.connected()

    def end(self, reader: asyncio.Task[None]) -> None:
        """The reader ended by itself, which it never should: tell everybody."""
        error = None if reader.cancelled() else reader.exception()
        for seat in self.seats.values():
            seat.end(error or RuntimeError(f"nobody reads {self.address} any more"))


Reader = Callable[[Hub], Coroutine[Any, Any, None]]


class Hubs:
    """All hubs, by their address. Lifetime: process."""

    def __init__(self) -> None:
        self._open: dict[str, Hub] = {}

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def joined(
        self, address: str, key: Key, limit: int, dropped: Callable[[], None], read: Reader
    ) -> AsyncIterator[Seat]:
        """A seat for `key` at `address`, read by `read` from the first seat on.

        At most `limit` messages wait in it. Raises ValueError where the seat is taken.
        """
        hub = self._open.get(address)
        if hub is None or hub.reader is None or hub.reader.done():
            hub = self._open[address] = Hub(address)
            hub.reader = asyncio.create_task(read(hub))
            hub.reader.add_done_callback(hub.end)
        if key in hub.seats:
            raise ValueError(f"two workers take the events of {key!r} at {address}")
        seat = hub.seats[key] = Seat(limit, dropped)
        try:
            yield seat
        finally:
            del hub.seats[key]
            if not hub.seats:
                await self._close(hub)

    async def _close(self, hub: Hub) -> None:
        if self._open.get(hub.address) is hub:
            del self._open[hub.address]
        assert hub.reader is not None
        hub.reader.cancel()
        await asyncio.gather(hub.reader, return_exceptions=True)
