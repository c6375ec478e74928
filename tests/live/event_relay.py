"""A relay between an engine's event sockets and the router's that injects every fault a network can
cause.

It loses batches, one or many at a time, sends them twice, delays them and drops its connections. It
answers replays late, twice, in part, in the older form or not at all. It never reorders live
batches, which TCP and one publisher never do either. All faults are drawn from one seed and
counted. The relay can also rewrite events into the forms of other engines, with other block names.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

Payload = Callable[[bytes], bytes]

END = b"\xff" * 8
UPSTREAM_S = 0.5  # for the engine's next replayed batch; a dead engine sends none
COMPLETE = ("whole", "slow", "twice", "four_frames")
INCOMPLETE = ("late_start", "cut", "no_end", "refused")


@dataclass(frozen=True, slots=True)
class Faults:
    """The probability of each fault for a live event batch, and of an incomplete replay."""

    drop: float = 0.01
    burst: float = 0.003
    burst_batches: int = 40  # most batches lost at once
    twice: float = 0.0
    hang: float = 0.003
    hang_s: float = 0.3  # at most
    reconnect: float = 0.001
    replay: float = 0.6
    pause_s: float = 0.02  # between two batches of a slow replay, at most


CALM = Faults(drop=0, burst=0, twice=0, hang=0, reconnect=0, replay=0)


@dataclass
class EventRelay:
    """The event relay of one engine. Lifetime: test; the engine's process may be replaced at the
    same ports.
    """

    context: zmq.asyncio.Context
    rng: random.Random
    upstream_live: str
    upstream_replay: str
    rewrite: Payload = lambda payload: payload
    replay_modes: tuple[str, ...] = COMPLETE + INCOMPLETE
    faults: Faults = CALM
    counted: Counter[str] = field(default_factory=Counter)
    live: str = ""  # the endpoint to which the router subscribes
    replay: str = ""

    def __post_init__(self) -> None:
        self._to_lose = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._listening: asyncio.Task[None] | None = None
        self._pub = self.context.socket(zmq.PUB)
        self.live = _bound(self._pub)
        self._router = self.context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self.replay = _bound(self._router)

    def reach_again(self) -> None:
        """Connect again to an engine that was restarted, with a new socket.

        If no process listens at a port, a connection to it may reach its own socket or another one
        that got the same number; ZMQ treats a peer of the wrong kind as final. The old socket
        cannot be disconnected: libzmq 4.3.5 ends the process if a peer is disconnected while a
        message is half read.
        """
        assert self._tasks is not None
        assert self._listening is not None
        self._listening.cancel()
        self._listening = self._tasks.create_task(self._relay_live())

    async def run(self) -> None:
        """Relay events and replays until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._listening = self._tasks.create_task(self._relay_live())
                while True:
                    identity, _, start = await self._router.recv_multipart()
                    self._tasks.create_task(self._answer(identity, start))
        finally:
            for socket in (self._pub, self._router):
                socket.close(linger=0)

    async def _relay_live(self) -> None:
        with self.context.socket(zmq.SUB) as sub:
            sub.setsockopt(zmq.LINGER, 0)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            # A restarted engine must be heard at once, as by a router on the same machine.
            sub.setsockopt(zmq.RECONNECT_IVL, 10)
            sub.connect(self.upstream_live)
            await self._relay_batches(sub)

    async def _relay_batches(self, sub: zmq.asyncio.Socket) -> None:
        while True:
            topic, seq, payload = await sub.recv_multipart()
            self.counted["live"] += 1
            faults, draw = self.faults, self.rng.random
            if self._to_lose and faults.burst:  # setting CALM ends the rest of a burst
                self._to_lose -= 1
                self.counted["lost"] += 1
                continue
            self._to_lose = 0
            if draw() < faults.drop:
                self.counted["lost"] += 1
                continue
            if draw() < faults.burst:
                self.counted["bursts"] += 1
                self._to_lose = self.rng.randint(2, faults.burst_batches)
            if draw() < faults.hang:
                self.counted["hangs"] += 1
                await asyncio.sleep(self.rng.uniform(0, faults.hang_s))
            if draw() < faults.reconnect:
                await self._reconnect()
            frames = [topic, seq, self.rewrite(payload)]
            await self._pub.send_multipart(frames)
            if draw() < faults.twice:
                self.counted["twice"] += 1
                await self._pub.send_multipart(frames)

    async def _reconnect(self) -> None:
        """Close all connections to the router; batches published before it reconnects are lost."""
        self.counted["reconnects"] += 1
        self._pub.close(linger=0)
        self._pub = self.context.socket(zmq.PUB)
        while True:  # another thread frees the port
            with suppress(zmq.ZMQError):
                self._pub.bind(self.live)
                return
            await asyncio.sleep(0.005)

    async def _answer(self, identity: bytes, start: bytes) -> None:
        bad = self.rng.random() < self.faults.replay
        mode = self.rng.choice(self.replay_modes) if bad else "whole"
        self.counted[f"replay_{mode}"] += 1
        if mode == "refused":
            return
        skipped = self.rng.randint(1, 20) if mode == "late_start" else 0  # as if it had moved on
        left = self.rng.randint(1, 50) if mode in ("cut", "no_end") else -1
        four = mode == "four_frames"
        with suppress(TimeoutError):
            latest = None  # the latest skipped batch: the engine always has its last one
            batches = self._fetch(start)
            async for topic, seq, payload in batches:
                if skipped:
                    skipped -= 1
                    latest = topic, seq, payload
                    continue
                latest = None
                if left == 0:
                    break
                left -= 1
                frames = self._frames(identity, four, topic, seq, payload)
                await self._router.send_multipart(frames)
                if mode == "twice":
                    await self._router.send_multipart(frames)
                if mode == "slow" and self.rng.random() < 0.1:
                    await asyncio.sleep(self.rng.uniform(0, self.faults.pause_s))
            await batches.aclose()
            if latest is not None:
                await self._router.send_multipart(self._frames(identity, four, *latest))
            if mode != "no_end":
                head = [identity, b""] if four else [identity, b"", b""]
                await self._router.send_multipart([*head, END, b""])

    def _frames(
        self, identity: bytes, four: bool, topic: bytes, seq: bytes, payload: bytes
    ) -> list[bytes]:
        head = [identity, b""] if four else [identity, b"", topic]
        return [*head, seq, self.rewrite(payload)]

    async def _fetch(self, start: bytes) -> AsyncGenerator[tuple[bytes, bytes, bytes], None]:
        """Yield the engine's own replay from `start`. Raises TimeoutError if the engine does not
        answer.
        """
        dealer = self.context.socket(zmq.DEALER)
        try:
            dealer.connect(self.upstream_replay)
            await dealer.send_multipart([b"", start])
            while True:
                async with asyncio.timeout(UPSTREAM_S):
                    _, topic, seq, payload = await dealer.recv_multipart()
                if seq == END:
                    return
                yield topic, seq, payload
        except TimeoutError:
            self.counted["replay_of_nobody"] += 1
            raise
        finally:
            dealer.close(linger=0)


@asynccontextmanager
async def relaying(*relays: EventRelay) -> AsyncIterator[None]:
    """Run the event relays until the block ends."""
    tasks = [asyncio.create_task(relay.run()) for relay in relays]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if not isinstance(result, asyncio.CancelledError) and result is not None:
            raise result


def _bound(socket: zmq.asyncio.Socket) -> str:
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    return f"tcp://127.0.0.1:{port}"
