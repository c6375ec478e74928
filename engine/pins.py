"""Holders of blocks besides the requests: pins and exports.

A prefix that an operator pins stays in the cache until its time is over. A pin names the prefix by
its chain; blocks that are not in the cache yet are held as soon as a request has computed them. The
limit counts all pinned blocks, cached or not, so a pinned block never has to be evicted. An export
is KV that another worker may read: the prompt of an ended request, held under a lease. The export
ends when its reader says so or when its lease is over, whichever comes first; its blocks then stay
in the prefix cache. A read is valid if the same generation of the export was still held when the
reading ended: `Exports.is_held`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from engine.block_pool import BlockPool, Tokens

MAX_PINS = 1024
PinRefusal = Literal["pins_off", "pin_share", "too_many_pins", "too_short", "not_cached"]


class PinRefused(Exception):  # noqa: N818 - an answer, not a failure
    """Raised if a prefix cannot be pinned; `reason` is a code, `message` is for people."""

    def __init__(self, reason: PinRefusal, message: str) -> None:
        super().__init__(message)
        self.reason: PinRefusal = reason
        self.message = message


@dataclass(slots=True)
class Pin:
    """One pinned prefix. Lifetime: until it is unpinned or `until_s`."""

    chain: tuple[int, ...]  # chain hashes from the first block of the prompt on
    until_s: float = inf
    block_ids: list[int] = field(default_factory=list)  # held: the leading ones of `chain`
    epoch: int = 0  # of the pool, when they were taken

    @property
    def name(self) -> int:
        """The chain hash of the prefix's last block."""
        return self.chain[-1]


class Pins:
    """Pins prefixes in `pool`, at most `max_blocks` blocks. Lifetime: worker."""

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._pool = pool
        self._pins: dict[int, Pin] = {}
        self._pin_counts: Counter[int] = Counter()  # how many pins want a chain hash

    @property
    def all(self) -> list[Pin]:
        """All pins in the order in which they were made."""
        return list(self._pins.values())

    @property
    def spared_tokens(self) -> int:
        """The number of KV tokens that remain for requests even if as many blocks are pinned as
        allowed.
        """
        return (self._pool.blocks - self.max_blocks) * self._pool.block_size

    @property
    def wanted_blocks(self) -> int:
        """Number of blocks of all pins, cached or not; a shared block counts once."""
        return len(self._pin_counts)

    @property
    def held_blocks(self) -> int:
        """Number of blocks that pins keep in the cache."""
        return len({block for pin in self._pins.values() for block in pin.block_ids})

    def chain_to(self, block_hash: int) -> list[int]:
        """Return the chain that ends with this pinned or cached block. Raises PinRefused for any
        other block.
        """
        pin = self._pins.get(block_hash)
        if pin is not None:
            return list(pin.chain)
        try:
            return self._pool.chain_to(block_hash)
        except KeyError:
            message = f"no cached block has the chain hash {block_hash}: pin by the prompt"
            raise PinRefused("not_cached", message) from None

    def pin(self, chain: Sequence[int], until_s: float) -> Pin:
        """Keep the blocks of `chain`, which begins with a prompt's first block, in the cache until
        `until_s`. If the prefix is pinned already, its end is set to `until_s`. Raises PinRefused
        if the prefix cannot be pinned.
        """
        if not self.max_blocks:
            message = "this worker pins nothing: start it with --pinned-share above 0"
            raise PinRefused("pins_off", message)
        if not chain:
            message = "the prefix does not fill one block, and only whole blocks are cached"
            raise PinRefused("too_short", message)
        pin = self._pins.get(chain[-1])
        if pin is None:
            self._check_room(chain)
            pin = self._pins[chain[-1]] = Pin(tuple(chain))
            self._pin_counts.update(chain)
        pin.until_s = until_s
        self._top_up(pin)
        return pin

    def unpin(self, name: int) -> bool:
        """Unpin the prefix that ends with the block `name`. Return False if it was not pinned."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        self._pin_counts -= Counter(pin.chain)  # drops blocks that no pin wants
        self._pool.release(pin.block_ids)
        return True

    def advance(self, now_s: float) -> None:
        """Advance the time to `now_s`: end the pins whose time is over, and the worths of blocks in
        the pool whose time is over. Pinned blocks that became visible since the last call are held,
        so call this before anything can be evicted.
        """
        self._pool.advance(now_s)
        for pin in self.all:
            if pin.until_s <= now_s:
                self.unpin(pin.name)
            elif len(pin.block_ids) < len(pin.chain) or pin.epoch != self._pool.epoch:
                self._top_up(pin)

    def _top_up(self, pin: Pin) -> None:
        pool, before = self._pool, pin.block_ids
        hit = pool.hit(pin.chain)
        if pin.epoch == pool.epoch and hit == len(before):
            return
        # Acquired before the old ones are released, because they are mostly the same.
        pin.block_ids, pin.epoch = pool.acquire(pin.chain, hit), pool.epoch
        pool.release(before)

    def _check_room(self, chain: Sequence[int]) -> None:
        fresh = sum(block_hash not in self._pin_counts for block_hash in chain)
        if self.wanted_blocks + fresh > self.max_blocks:
            raise PinRefused(
                "pin_share",
                f"{fresh} more blocks beside the {self.wanted_blocks} pinned ones exceed the "
                f"{self.max_blocks} of --pinned-share: unpin something, or raise it",
            )
        if len(self._pins) >= MAX_PINS:
            raise PinRefused("too_many_pins", f"{MAX_PINS} prefixes are pinned: unpin some")


EXTENSION = 2 / 3  # of a lease, that a sign of life adds, as in vLLM


@dataclass(slots=True)
class Export:
    """The KV of one prompt, held for other workers. Lifetime: until it is released or `until_s`."""

    request_id: int
    generation: int  # no two exports of a worker have the same
    prompt: Tokens
    block_ids: list[int]  # whole prompt, first block first
    until_s: float  # infinity while its request computes it: that one holds its blocks
    cached_tokens: int = 0  # of them, ones that this worker had not to compute
    ready_tokens: int = 0  # leading ones whose KV is in the blocks
    name: str | None = None  # that the router gave it, before its answer named it

    @property
    def is_computing(self) -> bool:
        """True while the request still computes the prompt whose KV is offered."""
        return self.until_s == inf


class Exports:
    """Holds the blocks of at most `most` prompts in `pool` for other workers. Lifetime: worker."""

    def __init__(self, pool: BlockPool, lease_s: float, most: int) -> None:
        self.lease_s = lease_s
        self.kept_total = 0
        self.expired_total = 0  # leases that ended before a reader released them
        self.refused_total = 0  # prompts beyond `most`, which no worker can read
        self._pool = pool
        self._most = most
        self._held: dict[int, Export] = {}  # by generation

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held_blocks(self) -> int:
        """The number of blocks that exports hold; a shared block counts once."""
        return len({block for export in self._held.values() for block in export.block_ids})

    @property
    def next_s(self) -> float | None:
        """The time at which the next lease ends; None if there is none."""
        ends = [export.until_s for export in self._held.values() if not export.is_computing]
        return min(ends, default=None)

    def begin(
        self,
        request_id: int,
        prompt: Tokens,
        block_ids: list[int],
        cached: int,
        name: str | None = None,
    ) -> Export | None:
        """Offer a prompt that is about to be computed into `block_ids`, its request's own list;
        return None if too many exports are held. Other workers may read it block by block as
        `ready_tokens` grows. Call `keep` at the end of its request, and `release` if the request
        loses its blocks before.
        """
        if len(self._held) >= self._most:
            self.refused_total += 1
            return None
        self.kept_total += 1
        kv = prompt, block_ids, inf, cached, cached, name
        export = Export(request_id, self.kept_total, *kv)
        self._held[export.generation] = export
        return export

    def keep(self, export: Export, block_ids: Sequence[int], now_s: float) -> None:
        """Hold the blocks of the export's whole computed prompt beyond the end of its request."""
        if not self.is_held(export):
            return
        self._pool.hold(block_ids)
        export.block_ids = list(block_ids)
        export.ready_tokens = len(export.prompt)
        export.until_s = now_s + self.lease_s

    def find(self, request_id: int, generation: int) -> Export | None:
        """Return the export of this request and generation if it is still held, else None."""
        export = self._held.get(generation)
        return export if export is not None and export.request_id == request_id else None

    def named(self, name: str) -> Export | None:
        """Return the export to which its router gave this name if it is still held, else None."""
        return next((one for one in self._held.values() if one.name == name), None)

    def is_held(self, export: Export) -> bool:
        """Return whether the export has held its blocks without a break until now."""
        return self._held.get(export.generation) is export

    def extend(self, export: Export, now_s: float) -> None:
        """Extend the lease of an export whose reader is alive, so that it ends EXTENSION of a lease
        from now or later.
        """
        export.until_s = max(export.until_s, now_s + self.lease_s * EXTENSION)  # or infinity

    def release(self, export: Export) -> bool:
        """Release the export's blocks. Return False if they were released before."""
        if not self.is_held(export):
            return False
        del self._held[export.generation]
        if not export.is_computing:
            self._pool.release(export.block_ids)
        return True

    def advance(self, now_s: float) -> None:
        """Advance the time to `now_s`, and end the exports whose leases are over."""
        for export in [one for one in self._held.values() if one.until_s <= now_s]:
            self.release(export)
            self.expired_total += 1
