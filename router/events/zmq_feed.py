"""Reads one worker's event stream by ZMQ: live batches, and the answers to requests for missing
batches.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from engine.wire.events import WireError, parse_live
from router.events.delivery import Delivery, FeedContext, FeedCounters, LoopYield
from router.events.resync import Resynchronizer, ZmqPublisher
from router.events.sources import ZmqSource
from router.events.zmq_sockets import Receive, joined, subscribed

_BETWEEN_CONNECTIONS_S = 2.0  # one that comes and goes must not be asked without end


class ZmqFeed:
    """A feed that reads one worker's KV events by ZMQ. `run` ends when it is cancelled. Lifetime:
    worker.
    """

    def __init__(self, source: ZmqSource, worker_id: int, model: str, context: FeedContext) -> None:
        self._source = source
        self._context = context
        self._delivery = Delivery(worker_id, model, context)
        publisher = ZmqPublisher(source, self._delivery, context)
        wanted = context.wants_snapshot
        self._resync = Resynchronizer(publisher, self._delivery, wanted, borrowed=self._borrowed)
        self._connections = 0
        self._connected = asyncio.Event()

    @property
    def counters(self) -> FeedCounters:
        """The counters of this worker's KV events so far."""
        return self._delivery.counters

    def resync(self, from_seq: int) -> None:
        """Request the events missed from batch `from_seq` on. If several requests are pending, the
        one with the lowest number counts.
        """
        self._resync.request_from(from_seq)

    async def run(self) -> None:
        """Read the stream until cancelled. Raises zmq.ZMQError if the router cannot connect, and
        ValueError if another worker has the same topic at an endpoint that the router binds.
        """
        async with self._messages() as receive:
            self.resync(self._context.first_seq)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(receive))
                tasks.create_task(self._resync.run())
                tasks.create_task(self._look_again())

    def _messages(self) -> AbstractAsyncContextManager[Receive]:
        if self._source.bind:
            return joined(
                self._source, self._context, self._delivery.dropped, self._note_connection
            )
        return subscribed(self._source, self._context, self._note_connection)

    def _note_connection(self, up: bool) -> None:
        """Note that a publisher connected or was lost. At an endpoint that the router binds, the
        publisher may be that of another worker. Only a request to this worker's own publisher can
        show whether it is.
        """
        bound = self._source.bind
        if not up:
            if self._connections:
                self._delivery.disconnected(self._source.address)
            if not bound:
                return
        self._connections += 1
        self._connected.set()
        if self._connections > 1:
            self._resync.note_absence()
            source = self._source
            self._delivery.reconnected(asked=bool(source.replay or source.snapshot))

    async def _borrowed(self) -> bool:
        borrow, delivery = self._context.borrow, self._delivery
        return borrow is not None and await borrow(delivery.worker_id, lambda: delivery.live_seq)

    async def _listen(self, receive: Receive) -> None:
        pause = LoopYield(self._context.clock)
        while True:
            frames = await receive()
            await pause.over()
            try:
                live = parse_live(frames)
                await self._delivery.batch(live.seq, live.payload, "live")
            except WireError as error:
                self._delivery.malformed(error)

    async def _look_again(self) -> None:
        """Request the batches that were published before the subscription took effect. After each
        absence of the publisher, check whether it is still the same one.
        """
        subscribed_s = self._context.subscribed_s
        await asyncio.sleep(subscribed_s)
        self._resync.request_rest()
        if self._connections == 0:
            self._delivery.on_no_publisher(self._source.live, subscribed_s)
        if self._connections <= 1:
            self._connected.clear()
        while True:
            await self._connected.wait()
            self._connected.clear()
            self._resync.request_after_reconnect()
            await asyncio.sleep(subscribed_s)
            self._resync.request_rest()
            await asyncio.sleep(_BETWEEN_CONNECTIONS_S)
