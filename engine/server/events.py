"""The worker's KV events: numbered batches with a replay buffer and snapshots, published over ZMQ.

The log and the cache change together: each change of the pool is in a numbered batch, or will be in
the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import zmq
import zmq.asyncio

from engine.block_pool import BlockPool, PoolEvent, PoolTier, Removed, Stored
from engine.scheduler.request import Request
from engine.wire.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    WireError,
    encode_batch,
    encode_snapshot,
    live_frames,
    parse_replay_request,
    replay_end,
    replay_frames,
)

MEDIA: Mapping[PoolTier, str] = MappingProxyType({"gpu": "GPU", "host": "CPU"})  # as vLLM's
BUFFER_BATCHES = 10_000  # vLLM's default
BUFFER_BYTES = 64 << 20


class NumberedBatch(NamedTuple):
    """One numbered batch of KV events in the form in which it is sent."""

    seq: int
    payload: bytes


class EventLog:
    """Numbers the changes of one pool as batches of KV events. Lifetime: worker.

    The log keeps the last `buffer_batches` batches, or fewer if they exceed `buffer_bytes`.
    `wall_s` gives seconds since the epoch, for the batches' time stamps.
    """

    def __init__(
        self,
        pool: BlockPool,
        wall_s: Callable[[], float],
        buffer_batches: int = BUFFER_BATCHES,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.next_seq = 0
        self._pool = pool
        self._wall_s = wall_s
        self._max_batches = buffer_batches
        self._max_bytes = buffer_bytes
        self._buffer: deque[NumberedBatch] = deque()
        self._bytes = 0
        self._salted: dict[int, tuple[Request, str]] = {}  # unfinished requests with a salt
        self._root_salts: dict[int, str] = {}  # visible first blocks of salted prompts

    def add_salted(self, request: Request, salt: str) -> None:
        """Remember the cache salt of a request, so that the KV event of its first block has it."""
        self._salted[request.request_id] = (request, salt)

    def forget_salted(self, request_id: int) -> None:
        """Forget the salt of an ended request; its blocks keep it while they are visible."""
        self._salted.pop(request_id, None)

    def flush(self) -> NumberedBatch | None:
        """Return the changes since the last call as the next batch; None if there were none."""
        changes = self._pool.drain_events()
        if not changes:
            return None
        events = [self._event(change) for change in changes]
        batch = NumberedBatch(self.next_seq, encode_batch(self._wall_s(), events))
        self.next_seq += 1
        self._buffer.append(batch)
        self._bytes += len(batch.payload)
        while len(self._buffer) > self._max_batches or (
            self._bytes > self._max_bytes and len(self._buffer) > 1
        ):
            self._bytes -= len(self._buffer.popleft().payload)
        return batch

    def since(self, start_seq: int) -> Iterator[NumberedBatch]:
        """Yield buffered batches from `start_seq` on; the first may be later if older ones are
        gone.
        """
        # Numbers are consecutive, and the buffer may move on while the caller sends.
        seq = start_seq
        while self._buffer and seq < self.next_seq:
            first_seq = self._buffer[0].seq
            seq = max(seq, first_seq)
            yield self._buffer[seq - first_seq]
            seq += 1

    def snapshot(self) -> bytes:
        """Return the body of /kv_snapshot, which has the cache's contents after the last batch.
        Call `flush` first, and publish its batch.
        """
        stored = (self._stored(run) for run in self._pool.snapshot())
        return encode_snapshot(self.next_seq - 1, self._wall_s(), stored)

    def _event(self, change: PoolEvent) -> Event:
        if isinstance(change, Stored):
            return self._stored(change)
        if isinstance(change, Removed):
            if self._root_salts:
                for block_hash in change.block_hashes:
                    if not change.group and not self._pool.holds(block_hash):
                        self._root_salts.pop(block_hash, None)
            return BlockRemoved(
                tuple(change.block_hashes), medium=MEDIA[change.tier], group_idx=change.group
            )
        self._root_salts.clear()
        return AllBlocksCleared()

    def _stored(self, run: Stored) -> BlockStored:
        # Blocks that the host takes over bring no tokens: they are known already.
        salt = self._salt_of(run) if run.parent_hash is None and len(run.tokens) else None
        blocks = len(run.block_hashes)
        kind, window = self._kind_of(run)
        return BlockStored(
            hashes=tuple(run.block_hashes),
            parent=run.parent_hash,
            tokens=tuple(run.tokens.tolist()),
            block_size=self._pool.block_size,
            medium=MEDIA[run.tier],
            extra_keys=None if salt is None else [[salt], *[None] * (blocks - 1)],
            group_idx=run.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )

    def _kind_of(self, run: Stored) -> tuple[str | None, int | None]:
        """Return vLLM's name for the kind of layers that these blocks belong to, and the size of
        their window.
        """
        if run.group is None or self._pool.groups is None:
            return None, None
        if not run.group:
            return "full_attention", None
        group = self._pool.groups.groups[run.group - 1]
        return ("sliding_window", group.window) if group.kind == "window" else ("mamba", None)

    def _salt_of(self, run: Stored) -> str | None:
        """Return the salt of a prompt's first block; the pool knows only the block's chain hash."""
        root = run.block_hashes[0]
        salt = self._root_salts.get(root)
        if salt is not None:
            return salt
        for request, candidate in self._salted.values():
            if request.chain and request.chain[0] == root:
                self._root_salts[root] = candidate
                return candidate
        return None


TOPIC = ""
SEND_HWM = 100_000  # batches queued for one slow subscriber; beyond it they vanish, as in vLLM
_REPLAY_TURN = 64  # batches sent before others get a turn of the event loop

log = logging.getLogger(__name__)


class KvPublisher:
    """The two ZMQ sockets on which one worker publishes and replays its KV events. Lifetime:
    worker; needs a running event loop.

    The system chooses a port that is 0; `endpoint` and `replay_endpoint` have the result. Raises
    zmq.ZMQError if a port is taken.
    """

    def __init__(self, event_log: EventLog, host: str, port: int, replay_port: int) -> None:
        self._log = event_log
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._replay = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
        self._live.setsockopt(zmq.SNDHWM, SEND_HWM)
        # A whole buffer must fit, or the tail of a replay would be dropped without a word.
        self._replay.setsockopt(zmq.SNDHWM, 2 * (BUFFER_BATCHES + 1))
        try:
            self.endpoint = _bind(self._live, host, port)
            self.replay_endpoint = _bind(self._replay, host, replay_port)
        except zmq.ZMQError:
            self.close()
            raise

    def publish(self, batch: NumberedBatch) -> None:
        """Send a batch to all subscribers; a PUB socket never blocks."""
        self._live.send_multipart(live_frames(TOPIC, batch.seq, batch.payload), copy=True)

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled."""
        while True:
            frames = await self._replay.recv_multipart()
            try:
                identity, start_seq = parse_replay_request(frames)
            except WireError as error:
                log.warning("replay request ignored: %s", error)
                continue
            sent = 0
            for batch in self._log.since(start_seq):
                await self._replay.send_multipart(replay_frames(identity, TOPIC, *batch))
                sent += 1
                if sent % _REPLAY_TURN == 0:
                    await asyncio.sleep(0)
            await self._replay.send_multipart(replay_end(identity))
            log.info("replayed %d batches from seq %d", sent, start_seq)

    def close(self) -> None:
        """Close both sockets, and drop the messages that are not sent yet."""
        self._live.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()

    def sources(self) -> dict[str, dict[str, object]]:
        """Return the body of /kv_event_sources, in the form of vLLM 0.31."""
        return {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.endpoint,
                "replay_endpoint": self.replay_endpoint,
                "buffer_steps": BUFFER_BATCHES,
                "hwm": SEND_HWM,
                "max_queue_size": SEND_HWM,
                "topic": TOPIC,
            }
        }


def _bind(socket: zmq.Socket[Any], host: str, port: int) -> str:
    """Bind a socket, and return its endpoint with the port that is in use."""
    wildcard = host in ("0.0.0.0", "::", "*")
    name = "*" if wildcard else f"[{host}]" if ":" in host else host
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(f"tcp://{name}:{port or '*'}")
    chosen = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"tcp://{name}:{chosen}"
