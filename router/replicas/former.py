"""The requests of a router that was followed, told to the router that follows until they end.

Both speak over the connection of the hot restart (`hot_restart.py`), in frames: four bytes, the
length, little endian; and a message of `router.replicas.messages` with request events only. So the
router before is a peer of the new one, which charges its requests to the workers as a replica does:
what a worker reports is not counted twice, and where it reports nothing the requests still count.
An empty frame says that the router before accepts nothing more. The new router asks by `RETELL` to
be told all anew. Where the connection ends, the router before has ended, and its requests with it.

The connection outlives its first listener: a router that is followed in its turn passes it on.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress

from policies.facts import Finish, PeerFact
from router.core.core import RequestListener, RouterCore
from router.core.placement.pending import Pending
from router.core.workers.ledger import Charge
from router.core.workers.table import Worker
from router.keys.quota import SharedUse
from router.replicas.messages import decoded
from router.replicas.publisher import RequestPublisher
from router.replicas.subscriber import Names, RequestSubscriber

log = logging.getLogger(__name__)

RETELL = b"r"
HEAD = struct.Struct("<I")  # of a frame: its length
GONE_FRAME = HEAD.pack(0)
MOST_BYTES = 1 << 20  # of a message
_BEAT_S = 0.5  # without news: then a message says that the router is there
_FLUSH_S = 0.005  # between two messages, so that events of a flood come together
_KNOWN_S = 2.0  # for the first account of the router before, which serves meanwhile
_REST_S = 1.0  # for the rest of a message that has begun to come


class Teller:
    """Tells a router that follows of our requests, from its first word on. Lifetime: connection."""

    def __init__(self, line: socket.socket, core: RouterCore, clock: Callable[[], float]) -> None:
        self._line = line
        self._core = core
        self._clock = clock
        self._news = asyncio.Event()
        self._publisher = RequestPublisher(self._news.set)
        self._before = core.listener
        self._gone_due = False
        self._said_gone = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Tell all that is open, and then what becomes of it."""
        listener: RequestListener = self._publisher
        if type(self._before) is not RequestListener:  # replicas hear of them, too
            listener = _Both(self._before, self._publisher)
        self._core.listener = listener
        self._core.tell_open(self._publisher)
        self._publisher.connect()
        self._tasks = [asyncio.create_task(self._tell(), name="tells the router that follows")]

    async def handed(self) -> None:
        """Say that we accept nothing more; returns once that is said, or cannot be."""
        self._gone_due = True
        self._news.set()
        said = asyncio.create_task(self._said_gone.wait())
        await asyncio.wait([said, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        said.cancel()
        self._tasks.append(asyncio.create_task(self._hear(), name="hears the router that follows"))

    async def aclose(self) -> None:
        """Tell nothing more: the other end takes all that we had for ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._stop()

    def _stop(self) -> None:
        if self._core.listener is not self._before:
            self._core.listener = self._before
        self._line.close()

    async def _tell(self) -> None:
        """Until nobody hears it any more."""
        loop, uses = asyncio.get_running_loop(), SharedUse(dict)
        try:
            while True:
                self._news.clear()
                while (message := self._publisher.message(self._clock(), (), uses)) is not None:
                    await loop.sock_sendall(self._line, HEAD.pack(len(message)) + message)
                    await asyncio.sleep(_FLUSH_S)
                if self._gone_due and not self._said_gone.is_set():
                    await loop.sock_sendall(self._line, GONE_FRAME)
                    self._said_gone.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_BEAT_S):
                        await self._news.wait()
        except OSError as error:
            log.info("hot_restart: nobody hears of our requests any more (%s)", error)
            self._core.listener = self._before

    async def _hear(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while await loop.sock_recv(self._line, 64):
                self._publisher.retell()
                self._news.set()


class _Both(RequestListener):
    """Two that hear of the same requests. Lifetime: a hot restart."""

    def __init__(self, first: RequestListener, second: RequestListener) -> None:
        self._both = first, second

    def dispatched(self, pending: Pending, charge: Charge, worker: Worker) -> None:
        for one in self._both:
            one.dispatched(pending, charge, worker)

    def first_token(self, charge: Charge) -> None:
        for one in self._both:
            one.first_token(charge)

    def progress(self, charge: Charge, output_tokens: int) -> None:
        for one in self._both:
            one.progress(charge, output_tokens)

    def ended(self, charge: Charge, finish: Finish | None) -> None:
        for one in self._both:
            one.ended(charge, finish)


class _Former:
    """One router before this one, by its line. Lifetime: until that router has ended."""

    def __init__(
        self, line: socket.socket, shares: str, subscriber: RequestSubscriber | None
    ) -> None:
        """`shares`: of `Handover`; `subscriber`: None where its requests are heard of there."""
        self.line = line
        self.shares = shares
        self.subscriber = subscriber
        self.may_ask = False
        self.gone = asyncio.Event()  # it accepts nothing more
        self.in_sync = asyncio.Event()
        self.between = True  # no message has begun to come
        self.left = False  # another router hears it after this message
        self.reading: asyncio.Task[None] | None = None
        self.asked_s = float("-inf")


class FormerRouters:
    """The routers before this one that still have requests at workers. Lifetime: process."""

    def __init__(
        self,
        core: RouterCore,
        tell: Callable[[PeerFact], None],
        clock: Callable[[], float],
        shares: str = "",
    ) -> None:
        """`tell` hands the core a fact; `shares`: as in `Handover`, of this router."""
        self.shares = shares
        self._core = core
        self._tell = tell
        self._clock = clock
        self._names = Names(core.workers)
        self._former: list[_Former] = []

    def __len__(self) -> int:
        """Those that have not ended."""
        return len(self._former)

    @property
    def requests(self) -> int:
        """Theirs, at workers that are known here."""
        return sum(len(one.subscriber) for one in self._former if one.subscriber is not None)

    async def follow(self, line: socket.socket, shares: str) -> None:
        """Hear the router at the other end; returns once all that it has is known, or later.

        It is not asked for anything until `serve`.
        """
        former = self._begin(line, shares)
        if former.subscriber is not None:
            await self._until(former.in_sync, former, _KNOWN_S)
            log.info("hot_restart: the router before has %d requests at workers", self.requests)

    async def gone(self) -> None:
        """Return once the router that we follow accepts nothing more, or has ended."""
        for former in tuple(self._former):
            await self._until(former.gone, former, None)

    def serve(self, lines: Iterable[tuple[socket.socket, str]]) -> None:
        """We serve. `lines`: to routers before the one that we follow, which heard them so far,
        and where each shares state.
        """
        for line, shares in lines:
            self._begin(line, shares)
        for former in self._former:
            former.may_ask = True
            self._ask(former)

    def lines(self) -> list[tuple[socket.socket, str]]:
        """To be passed on to a router that follows, and where the router at the other end shares
        state.
        """
        return [(one.line, one.shares) for one in self._former]

    async def leave(self) -> None:
        """Another router hears them from now on; between two messages."""
        for former in tuple(self._former):
            if former.reading is None:
                continue
            former.left = True
            if not former.between:
                await asyncio.wait([former.reading], timeout=_REST_S)
            former.reading.cancel()
            await asyncio.wait([former.reading])

    aclose = leave

    def _begin(self, line: socket.socket, shares: str) -> _Former:
        line.setblocking(False)
        subscriber = None
        if not shares or shares != self.shares:
            peers = self._core.peer_requests
            find = self._names.worker_id
            subscriber = RequestSubscriber(find, peers.room, peers.numbers, self._tell)
        former = _Former(line, shares, subscriber)
        self._former.append(former)
        former.reading = asyncio.create_task(self._hear(former), name="router before")
        return former

    async def _until(self, event: asyncio.Event, former: _Former, within_s: float | None) -> None:
        assert former.reading is not None
        waiting = asyncio.create_task(event.wait())
        tasks = [waiting, former.reading]
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def _hear(self, former: _Former) -> None:
        trouble = ""
        try:
            while not former.left and (message := await _message(former)) is not None:
                self._take(former, message)
        except (OSError, ValueError) as error:
            trouble = f": {error}"
        finally:
            self._former.remove(former)
            former.line.close()
            if (subscriber := former.subscriber) is not None:
                log.info(
                    "hot_restart: a router before this one is heard no more, with %d requests%s",
                    len(subscriber),
                    trouble,
                )
                subscriber.gone(self._clock())

    def _take(self, former: _Former, message: bytes) -> None:
        """Raises ValueError."""
        if not message:
            former.gone.set()
        elif former.subscriber is not None:
            former.subscriber.hear(decoded(message), self._clock())
            if former.subscriber.in_sync:
                former.in_sync.set()
            else:
                self._ask(former)

    def _ask(self, former: _Former) -> None:
        """To be told all anew."""
        now_s = self._clock()
        if former.may_ask and former.subscriber is not None and now_s - former.asked_s >= _BEAT_S:
            former.asked_s = now_s
            with suppress(OSError):
                former.line.send(RETELL)


async def _message(former: _Former) -> bytes | None:
    """The next one; None: the router has ended. Raises OSError, ValueError."""
    former.between = True
    head = await _bytes(former, HEAD.size)
    if not head:
        return None
    (size,) = HEAD.unpack(head)
    if size > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return await _bytes(former, size)


async def _bytes(former: _Former, size: int) -> bytes:
    """So many; none at the end between two messages. Raises OSError.

    Cancelled between two messages, nothing of the next one was taken.
    """
    data = b""
    while len(data) < size:
        await _readable(former.line)
        with suppress(BlockingIOError):
            more = former.line.recv(size - len(data))
            if not more and former.between:
                return b""
            if not more:
                raise OSError("it hung up within a message")
            former.between = False
            data += more
    return data


async def _readable(line: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    come = asyncio.Event()
    loop.add_reader(line, come.set)
    try:
        await come.wait()
    finally:
        loop.remove_reader(line)
