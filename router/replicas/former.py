"""Reports the open requests of the old router to its successor during a hot restart, until these
requests end.

Both use the connection of the hot restart (`hot_restart.py`). Each frame is a length (four bytes,
little endian) and a message of `router.replicas.messages` that has only request events. To the new
router, the old one is therefore a peer: it counts the old router's requests as load of their
workers, like a replica's requests. Load that a worker reports itself is not counted twice; where a
worker reports nothing, the requests still count.

An empty frame means that the old router accepts no more requests. The new router sends `RETELL` to
get a full report of all open requests again. When the connection ends, the old router has ended,
and its requests with it. A router that is itself replaced passes the connection on to its
successor.
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
HEAD = struct.Struct("<I")  # of a frame: its length in bytes
GONE_FRAME = HEAD.pack(0)
MOST_BYTES = 1 << 20  # of a message
_BEAT_S = 0.5  # after this time without news an empty message is sent as a sign of life
_FLUSH_S = 0.005  # pause between two messages, so that many events are sent together
_FIRST_REPORT_S = 2.0  # for the first account of the router before, which serves meanwhile
_REST_S = 1.0  # timeout for the rest of a message that has begun to arrive


class OpenRequestReporter:
    """Reports this router's open requests to its successor. Lifetime: connection."""

    def __init__(self, line: socket.socket, core: RouterCore, clock: Callable[[], float]) -> None:
        self._line = line
        self._core = core
        self._clock = clock
        self._news = asyncio.Event()
        self._publisher = RequestPublisher(self._news.set)
        self._before = core.listener
        self._gone_due = False
        self._gone_sent = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Report all open requests to the successor, and from then on each of their events."""
        listener: RequestListener = self._publisher
        if type(self._before) is not RequestListener:  # replicas hear of them, too
            listener = _Both(self._before, self._publisher)
        self._core.listener = listener
        self._core.report_open_charges(self._publisher)
        self._publisher.connect()
        self._tasks = [
            asyncio.create_task(self._send_reports(), name="tells the router that follows")
        ]

    async def handed(self) -> None:
        """Send the empty frame, which means that this router accepts no more requests. Return once
        it is sent, or once the connection has failed.
        """
        self._gone_due = True
        self._news.set()
        said = asyncio.create_task(self._gone_sent.wait())
        await asyncio.wait([said, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        said.cancel()
        self._tasks.append(
            asyncio.create_task(self._read_report_requests(), name="hears the router that follows")
        )

    async def aclose(self) -> None:
        """Stop reporting. The successor then counts all of this router's requests as ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._stop()

    def _stop(self) -> None:
        if self._core.listener is not self._before:
            self._core.listener = self._before
        self._line.close()

    async def _send_reports(self) -> None:
        """Send the reports of this router's requests until the connection to the
        successor fails.
        """
        loop, uses = asyncio.get_running_loop(), SharedUse(dict)
        try:
            while True:
                self._news.clear()
                while (message := self._publisher.message(self._clock(), (), uses)) is not None:
                    await loop.sock_sendall(self._line, HEAD.pack(len(message)) + message)
                    await asyncio.sleep(_FLUSH_S)
                if self._gone_due and not self._gone_sent.is_set():
                    await loop.sock_sendall(self._line, GONE_FRAME)
                    self._gone_sent.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_BEAT_S):
                        await self._news.wait()
        except OSError as error:
            log.info("hot_restart: the new router gets no more reports of requests (%s)", error)
            self._core.listener = self._before

    async def _read_report_requests(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while await loop.sock_recv(self._line, 64):
                self._publisher.resend_all()
                self._news.set()


class _Both(RequestListener):
    """A listener that passes each request event to two listeners. Lifetime: a hot restart."""

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
    """The connection to one earlier router on this host. Lifetime: until that router has ended."""

    def __init__(
        self, line: socket.socket, shares: str, subscriber: RequestSubscriber | None
    ) -> None:
        """Hold the connection to an earlier router. `shares` is the field of `RestartHandover` of
        that name. `subscriber` is None if the requests of that router already arrive over the
        shared state.
        """
        self.line = line
        self.shares = shares
        self.subscriber = subscriber
        self.may_request = False
        self.gone = asyncio.Event()  # set once the old router accepts no more requests
        self.in_sync = asyncio.Event()
        self.between = True  # no part of a message has arrived
        self.left = False  # another router hears it after this message
        self.reading: asyncio.Task[None] | None = None
        self.requested_s = float("-inf")


class FormerRouters:
    """The earlier routers on this host whose requests at workers have not all ended. Lifetime:
    process.
    """

    def __init__(
        self,
        core: RouterCore,
        report_fact: Callable[[PeerFact], None],
        clock: Callable[[], float],
        shares: str = "",
    ) -> None:
        """Start with no earlier router. `report_fact` passes a fact to the core; `shares` names
        where this router shares state, as in `RestartHandover`.
        """
        self.shares = shares
        self._core = core
        self._report_fact = report_fact
        self._clock = clock
        self._names = Names(core.workers)
        self._former: list[_Former] = []

    def __len__(self) -> int:
        """Return the number of earlier routers that have not ended."""
        return len(self._former)

    @property
    def requests(self) -> int:
        """The number of earlier routers' requests at workers that this router knows."""
        return sum(len(one.subscriber) for one in self._former if one.subscriber is not None)

    async def follow(self, line: socket.socket, shares: str) -> None:
        """Read the reports of the router at the other end of `line`.

        Returns once all of its requests are known, or after `_FIRST_REPORT_S` seconds. Before
        `serve`, this router does not ask it for full reports.
        """
        former = self._begin(line, shares)
        if former.subscriber is not None:
            await self._until(former.in_sync, former, _FIRST_REPORT_S)
            log.info("hot_restart: the earlier router has %d requests at workers", self.requests)

    async def wait_until_gone(self) -> None:
        """Wait until each earlier router accepts no more requests, or has ended."""
        for former in tuple(self._former):
            await self._until(former.gone, former, None)

    def serve(self, lines: Iterable[tuple[socket.socket, str]]) -> None:
        """Ask every earlier router for a full report, because this router serves now.

        `lines` are the connections to still earlier routers, which the previous router has read
        until now, each with the name of where that router shares state.
        """
        for line, shares in lines:
            self._begin(line, shares)
        for former in self._former:
            former.may_request = True
            self._request_full_report(former)

    def lines(self) -> list[tuple[socket.socket, str]]:
        """Return the connections to pass on to a successor, each with the name of where the router
        at its other end shares state.
        """
        return [(one.line, one.shares) for one in self._former]

    async def leave(self) -> None:
        """Stop reading all connections at the end of a message, because the successor reads them
        from now on.
        """
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
            subscriber = RequestSubscriber(find, peers.room, peers.numbers, self._report_fact)
        former = _Former(line, shares, subscriber)
        self._former.append(former)
        former.reading = asyncio.create_task(self._read_reports(former), name="router before")
        return former

    async def _until(self, event: asyncio.Event, former: _Former, within_s: float | None) -> None:
        assert former.reading is not None
        waiting = asyncio.create_task(event.wait())
        tasks = [waiting, former.reading]
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def _read_reports(self, former: _Former) -> None:
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
                    "hot_restart: an earlier router sends no more reports, with %d requests%s",
                    len(subscriber),
                    trouble,
                )
                subscriber.end_all(self._clock())

    def _take(self, former: _Former, message: bytes) -> None:
        """Process one frame of an earlier router. Raises ValueError if the message is malformed."""
        if not message:
            former.gone.set()
        elif former.subscriber is not None:
            former.subscriber.on_message(decoded(message), self._clock())
            if former.subscriber.in_sync:
                former.in_sync.set()
            else:
                self._request_full_report(former)

    def _request_full_report(self, former: _Former) -> None:
        """Ask the earlier router for a full report, at most once in `_BEAT_S` seconds."""
        now_s = self._clock()
        if (
            former.may_request
            and former.subscriber is not None
            and now_s - former.requested_s >= _BEAT_S
        ):
            former.requested_s = now_s
            with suppress(OSError):
                former.line.send(RETELL)


async def _message(former: _Former) -> bytes | None:
    """Return the next message of an earlier router, or None if that router has ended.

    Raises OSError if the connection fails, ValueError if the message is too long.
    """
    former.between = True
    head = await _bytes(former, HEAD.size)
    if not head:
        return None
    (size,) = HEAD.unpack(head)
    if size > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return await _bytes(former, size)


async def _bytes(former: _Former, size: int) -> bytes:
    """Return exactly `size` bytes from the connection, or b"" if it ends between two messages.

    Raises OSError if the connection fails. If it is cancelled between two messages, no byte of the
    next message is lost.
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
