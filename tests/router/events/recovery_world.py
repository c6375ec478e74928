"""A core, the task that requests missed events, and a publisher that answers when the
test says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from engine.wire.events import AllBlocksCleared, BlockRemoved, encode_batch
from kvkernels import EventBatch
from policies.facts import CacheSnapshot, WorkerChange, WorkerFacts
from router.core.contract.actions import Resync as RouterResync
from router.core.core import take
from router.events.delivery import Delivery, FeedContext, FeedFact, SharedReaders
from router.events.resync import Replayed, Resynchronizer
from tests.router.core.core_world import BLOCK, World, removed, stored
from tests.router.events.feed_support import wire

BLOCKS = 8
CAPACITY_BLOCKS = BLOCKS
BUFFER = 6  # batches that a publisher can replay


@dataclass
class Publisher:
    """A worker's publisher in one life, from a start to the next. Lifetime: example."""

    life: int
    held: set[int] = field(default_factory=set)
    payloads: list[bytes] = field(default_factory=list)
    history: dict[int, set[int]] = field(default_factory=lambda: {-1: set()})

    def publish(self, block: int) -> tuple[int, bytes]:
        """Store the block, or remove it if the cache holds it; -1 clears the cache. Return (number,
        bytes) of the batch.
        """
        if block < 0:
            event: Any = AllBlocksCleared()
            self.held.clear()
        elif block in self.held:
            event = BlockRemoved(removed([block]).hashes, medium="GPU")
            self.held.discard(block)
        else:
            event = wire(stored([block]))
            self.held.add(block)
        seq = len(self.payloads)
        # The stamp tells one life from the other, as it does in a payload's digest.
        self.payloads.append(encode_batch(self.life * 1e6 + seq, [event]))
        self.history[seq] = set(self.held)
        return seq, self.payloads[-1]

    def snapshot(self) -> tuple[int, list[EventBatch]]:
        events = [wire(stored([block])) for block in self.held]
        return len(self.payloads) - 1, [EventBatch(encode_batch(0.0, events))]


class Recovery:
    """The core and the task that requests missed events, whose waits end when the test calls
    `go_on`. Lifetime: example.
    """

    def __init__(self, snapshot: bool, buffer: int) -> None:
        self.has_snapshot = snapshot
        self.has_replay = True
        self.where = None
        self.publishers = [Publisher(0)]
        self.on_the_way: deque[tuple[int, bytes]] = deque()
        self.saved: CacheSnapshot | None = None
        # A publisher was replaced, and whoever asks has not been told: batches of both may mix.
        self._unnoticed = False
        self._buffer = buffer
        self._gate: asyncio.Future[int] | None = None
        self._task: asyncio.Task[None] | None = None
        self._start()

    @property
    def publisher(self) -> Publisher:
        return self.publishers[-1]

    @property
    def kv(self):
        return self.world.core.workers.get(0).kv

    @property
    def seen(self) -> set[int]:
        return {block for block in range(BLOCKS) if self.world.hits([block]) == [1]}

    # --- the router -------------------------------------------------------------------------

    def _start(self, saved: CacheSnapshot | None = None) -> None:
        """Start another router, with the state that the one before it saved."""
        self.world = World(workers=0, backlog_batches=BUFFER + 2)
        facts = WorkerFacts(
            name="w", models=("m",), block_size=BLOCK, kv_capacity_tokens=CAPACITY_BLOCKS * BLOCK
        )
        self.world.core.on_worker(WorkerChange(0.0, 0, "ready", facts, saved))
        self._follow()

    def _follow(self) -> None:
        self._unnoticed = False
        caches = self.world.core.caches
        nobody = cast(Any, None)
        context = FeedContext(nobody, nobody, lambda: 0.0, self._tell, SharedReaders(), 1.0, 8)
        self._teller = Delivery(0, "m", context)
        self._missed = Resynchronizer(
            self, self._teller, lambda: caches.wants_snapshot(0), self._pause
        )
        self._missed.request_from(caches.first_question(0))
        self._task = asyncio.create_task(self._missed.run())

    def _tell(self, fact: FeedFact) -> None:
        for action in take(self.world.core, fact):
            assert isinstance(action, RouterResync)
            self._missed.request_from(action.from_seq)

    async def stop(self) -> None:
        """Stop the requesting task; messages that are on their way are lost."""
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._gate = None
        self.on_the_way.clear()

    # --- its publisher, asked ---------------------------------------------------------------

    async def _wait(self) -> int:
        self._gate = asyncio.get_running_loop().create_future()
        return await self._gate

    async def _pause(self, seconds: float) -> None:
        await self._wait()

    async def snapshot(self) -> bool:
        """Answer with a snapshot of now, with one of the time of the request's arrival, or with
        none.
        """
        if not self.has_snapshot:
            return False
        publisher, heard_seq = self.publisher, self._teller.next_seq - 1
        now = publisher.snapshot()
        how = await self._wait()
        if how >= 3 or publisher is not self.publisher:
            return False
        self._teller.snapshot(*(now if how == 2 else publisher.snapshot()), heard_seq)
        return True

    async def replay(self, from_seq: int) -> Replayed | None:
        """Answer with a complete replay, one that begins later, is cut off or breaks off,
        or none.
        """
        publisher = self.publisher
        first = max(from_seq, len(publisher.payloads) - self._buffer)
        batches = list(enumerate(publisher.payloads))[first:]
        how = await self._wait()
        if how == 1 and len(batches) > 1:
            batches = batches[-max(1, len(batches) - 2) :]
        replayed = Replayed(0.0)
        if how == 4:
            return None
        for n, (seq, payload) in enumerate(batches):
            if how == 2 and n == 2:
                return replayed
            if (how == 3 and n == 1) or publisher is not self.publisher:
                return None
            if replayed.first_seq is None:
                replayed.first_seq = seq
            replayed.last_seq = seq
            await self._teller.batch(seq, payload, "replay")
            await self._wait()
        return None if how == 3 else replayed

    # --- what a test does -------------------------------------------------------------------

    async def publish(self, block: int, lost: bool) -> None:
        batch = self.publisher.publish(block)
        if not lost:
            self.on_the_way.append(batch)

    async def deliver(self, times: int) -> None:
        if self.on_the_way:
            seq, payload = self.on_the_way.popleft()
            for _ in range(times):
                await self._teller.batch(seq, payload, "live")

    async def go_on(self, how: int) -> None:
        """Let the requesting task do one step; `how` is the kind of answer, and 0 a
        complete one.
        """
        if self._gate is not None and not self._gate.done():
            self._gate.set_result(how)

    async def reconnect(self) -> None:
        """Break the connection and restore it; messages that are on their way are lost."""
        self.on_the_way.clear()
        self._missed.note_absence()
        self._missed.request_after_reconnect()

    async def restart_unseen(self) -> None:
        """Restart the publisher; the router notices only a broken connection."""
        self._unnoticed = True
        self.publishers.append(Publisher(len(self.publishers)))
        await self.reconnect()

    async def restart(self) -> None:
        """Restart the publisher; health probes notice it."""
        await self.stop()
        self.publishers.append(Publisher(len(self.publishers)))
        for state in ("down", "ready"):
            self.world.core.on_worker(WorkerChange(0.0, 0, state))
        self._follow()

    async def save(self) -> None:
        frozen = None if self._unnoticed else self.kv.frozen()
        if frozen is not None and frozen.digest:
            self.saved = frozen.thawed()

    async def restart_router(self) -> None:
        await self.stop()
        self._start(self.saved)

    async def quiet(self) -> None:
        """Let every task run until it waits."""
        for _ in range(6):
            await asyncio.sleep(0)
        assert self._task is not None
        if self._task.done():
            self._task.result()

    async def settle(self) -> None:
        """Deliver all messages and answer every request completely."""
        for _ in range(500):
            await self.deliver(1)
            await self.quiet()
            if not self.on_the_way and (self._gate is None or self._gate.done()):
                self._unnoticed = False
                return
            await self.go_on(0)
            await self.quiet()
        raise AssertionError("it asks without end")

    def check(self) -> None:
        """Check that a state that counts as exact equals the cache after that batch, and that any
        other state is a part of it.
        """
        kv, seen = self.kv, self.seen
        if kv._doubtful or self._unnoticed:
            return
        then = [one.history.get(kv.next_seq - 1) for one in self.publishers]
        if kv.exact:
            assert seen in then
        assert any(held is not None and seen <= held for held in then)
