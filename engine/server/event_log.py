"""The worker's KV events as numbered batches: buffer for replay, snapshot for late joiners.

No sockets here. The log and the cache move together: whatever the pool changed is either in a
batch with a number or will be in the next one, so a snapshot always has a number it is true for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from engine.block_pool import BlockPool, PoolEvent, Removed, Stored
from engine.request import Request
from engine.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    encode_batch,
    encode_snapshot,
)

BUFFER_BATCHES = 10_000  # vLLM's default
BUFFER_BYTES = 64 << 20


class NumberedBatch(NamedTuple):
    """One batch as it goes over the wire."""

    seq: int
    payload: bytes


class EventLog:
    """Numbers the changes of one pool. Lifetime: worker.

    Keeps the last `buffer_batches` batches, or fewer if they exceed `buffer_bytes`.
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
        """Remember the salt of a request: the first of its blocks will be announced with it."""
        self._salted[request.request_id] = (request, salt)

    def forget_salted(self, request_id: int) -> None:
        """The request is over; its blocks keep their salt while they are visible."""
        self._salted.pop(request_id, None)

    def flush(self) -> NumberedBatch | None:
        """The changes since the last call as the next batch; None if there were none."""
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
        """Buffered batches from `start_seq` on; the first may be later if older ones are gone."""
        # Numbers are consecutive, and the buffer may move on while the caller sends.
        seq = start_seq
        while self._buffer and seq < self.next_seq:
            first_seq = self._buffer[0].seq
            seq = max(seq, first_seq)
            yield self._buffer[seq - first_seq]
            seq += 1

    def snapshot(self) -> bytes:
        """Body of /kv_snapshot, true as of the last batch. Call `flush` before, and publish it."""
        stored = (self._stored(run) for run in self._pool.snapshot())
        return encode_snapshot(self.next_seq - 1, self._wall_s(), stored)

    def _event(self, change: PoolEvent) -> Event:
        if isinstance(change, Stored):
            return self._stored(change)
        if isinstance(change, Removed):
            if self._root_salts:
                for block_hash in change.block_hashes:
                    self._root_salts.pop(block_hash, None)
            return BlockRemoved(tuple(change.block_hashes), medium="GPU")
        self._root_salts.clear()
        return AllBlocksCleared()

    def _stored(self, run: Stored) -> BlockStored:
        salt = self._salt_of(run) if run.parent_hash is None else None
        blocks = len(run.block_hashes)
        return BlockStored(
            hashes=tuple(run.block_hashes),
            parent=run.parent_hash,
            tokens=tuple(run.tokens.tolist()),
            block_size=self._pool.block_size,
            medium="GPU",
            extra_keys=None if salt is None else [[salt], *[None] * (blocks - 1)],
        )

    def _salt_of(self, run: Stored) -> str | None:
        """The salt of a prompt's first block, whose chain hash is all that the pool knows."""
        root = run.block_hashes[0]
        salt = self._root_salts.get(root)
        if salt is not None:
            return salt
        for request, candidate in self._salted.values():
            if request.chain and request.chain[0] == root:
                self._root_salts[root] = candidate
                return candidate
        return None
