"""Where a worker's KV is read from and written to, and the link that carries it.

`KvStore` is all that a transfer knows of tensors; `ModelledKv` has none, only their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.timed import Clock
from engine.transfer.wire import Form, Pool, Welcome

PART_BYTES = 4 << 20  # of KV sent at once


@dataclass(frozen=True, slots=True)
class Place:
    """Where the KV of a prompt's tokens `start`..`stop` goes: the prompt's blocks, its first one
    first. Lifetime: read."""

    block_ids: Sequence[int]
    start: int
    stop: int


class KvStore(Protocol):
    """A worker's KV. Lifetime: worker."""

    @property
    def form(self) -> Form:
        """What must be the same at both ends."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def pools(self) -> Sequence[Pool]:
        """Memory that others of this host may map; empty: none."""

    def size(self, blocks: int) -> int:
        """Bytes of so many blocks, scales included."""

    async def pack(self, block_ids: Sequence[int]) -> bytes | memoryview:
        """The KV of these blocks in the order in which it is sent, whatever the pool's is."""

    async def put(
        self, data: bytes, block_tokens: int, first_block: int, blocks: int, place: Place
    ) -> None:
        """Write what another worker packed: `blocks` of its own of `block_tokens` tokens, from the
        prompt's block `first_block` on. Raises ValueError for another size."""

    async def copy(self, welcome: Welcome, place: Place) -> int:
        """Read the other worker's pools themselves; bytes copied. Raises OSError, ValueError."""


class ModelledKv:
    """KV that only has a size. Lifetime: worker."""

    def __init__(self, model: str, bytes_per_token: int, block_tokens: int) -> None:
        self.form = Form(model, 1, 1, bytes_per_token, "modelled")
        self.block_tokens = block_tokens
        self.pools: Sequence[Pool] = ()

    def size(self, blocks: int) -> int:
        return blocks * self.block_tokens * self.form.row_bytes

    async def pack(self, block_ids: Sequence[int]) -> bytes | memoryview:
        return b""

    async def put(
        self, data: bytes, block_tokens: int, first_block: int, blocks: int, place: Place
    ) -> None:
        if data:
            raise ValueError(f"{len(data)} bytes of KV came where only their size is modelled")

    async def copy(self, welcome: Welcome, place: Place) -> int:
        raise OSError("there is no memory to map: KV is modelled")


class Link:
    """What leaves a worker, one after another; lifetime: worker.

    `bytes_per_s` None: as fast as the sockets take it. `latency_s`: of each read, before its first
    byte. Raises ValueError for what no link is.
    """

    def __init__(self, clock: Clock, bytes_per_s: float | None, latency_s: float = 0.0) -> None:
        if bytes_per_s is not None and not 0.0 < bytes_per_s < float("inf"):
            raise ValueError(f"a link must carry more than 0 bytes/s, got {bytes_per_s}")
        if not 0.0 <= latency_s < float("inf"):
            raise ValueError(f"a link's latency must be 0 s or more, got {latency_s}")
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = 0.0  # when all that was given to it has left

    async def open(self) -> None:
        """A read begins."""
        if self._latency_s:
            await self._clock.sleep_until(self._clock.now_s() + self._latency_s)

    async def carry(self, size: int) -> None:
        """Until so many bytes, and all those before them, have left."""
        if self._bytes_per_s is None:
            return
        self._free_s = max(self._free_s, self._clock.now_s()) + size / self._bytes_per_s
        await self._clock.sleep_until(self._free_s)
