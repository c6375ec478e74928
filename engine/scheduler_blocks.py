"""A request's blocks, from admission to release: hit, reserve, grow, publish, leave."""

from __future__ import annotations

from bisect import bisect_left

from engine.block_pool import BlockPool
from engine.request import Request


class RequestBlocks:
    """Which blocks running requests hold, and what they are about to publish; lifetime: worker.

    The frontier maps the next block of each running prefill to the request that computes it,
    so that a waiting request finds in one look-up who is busy with its prefix.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_size = pool.block_size
        self._frontier: dict[int, Request] = {}

    def hit(self, request: Request) -> int:
        """Its leading blocks in the cache; the last token is always computed, for its logits."""
        return self._pool.hit(request.chain, (request.total_tokens - 1) // self._block_size)

    def fits(self, request: Request, hit: int, spare_blocks: int) -> bool:
        """Would all its tokens fit, `hit` blocks being cached, and leave `spare_blocks`?"""
        need = self._blocks(request.total_tokens) - hit
        return need + spare_blocks <= self._pool.available_beyond(request.chain, hit)

    def start(self, request: Request, hit: int) -> None:
        """Hold `hit` cached blocks and reserve the others; `fits` has said that they are there."""
        total_tokens = request.total_tokens
        held = self._pool.acquire(request.chain, hit)
        fresh = self._pool.allocate(self._blocks(total_tokens) - hit)
        if fresh is None:
            raise AssertionError(f"request {request.request_id} was admitted without room")
        request.block_ids = held + fresh
        request.visible_blocks = hit
        request.computed_tokens = hit * self._block_size
        request.prefill_target = total_tokens
        request.epoch = self._pool.epoch
        self._mark(request)

    def grow(self, request: Request) -> bool:
        """One more block; False if none is left."""
        block = self._pool.allocate(1)
        if block is None:
            return False
        request.block_ids += block
        return True

    def publish(self, request: Request) -> None:
        """Show its full computed blocks, unless the cache was cleared since it started.

        A prefill computed before a clear may rest on what the clear was meant to drop.
        """
        start, stop = request.visible_blocks, request.computed_tokens // self._block_size
        if stop == start or request.epoch != self._pool.epoch:
            return
        self._unmark(request)
        request.extend_chain(stop, self._block_size)
        request.block_ids[start:stop] = self._pool.publish(
            request.block_ids[start:stop],
            request.chain[start:stop],
            request.chain[start - 1] if start else None,
            request.tokens(start * self._block_size, stop * self._block_size),
        )
        request.visible_blocks = stop
        self._mark(request)

    def leave(self, request: Request) -> None:
        """Give all its blocks back; the published ones stay cached."""
        self._unmark(request)
        self._pool.release(request.block_ids)
        request.block_ids = []
        request.visible_blocks = request.computed_tokens = request.prefill_target = 0

    def in_flight_tokens(self, request: Request, hit: int) -> int:
        """Tokens beyond its `hit` blocks that a running prefill is about to publish."""
        mine = request.chain
        if hit == len(mine):
            return 0
        owner = self._frontier.get(mine[hit])
        if owner is None or owner.epoch != self._pool.epoch:
            return 0
        theirs = owner.chain
        # Equal chain hashes mean equal prefixes, so the common part can be bisected.
        stop = min(len(mine), len(theirs), owner.prefill_target // self._block_size)
        common = bisect_left(range(stop), True, key=lambda depth: mine[depth] != theirs[depth])
        return (common - hit) * self._block_size

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _mark(self, request: Request) -> None:
        if request.is_prefilling and request.visible_blocks < len(request.chain):
            self._frontier[request.chain[request.visible_blocks]] = request

    def _unmark(self, request: Request) -> None:
        if request.visible_blocks < len(request.chain):
            block_hash = request.chain[request.visible_blocks]
            if self._frontier.get(block_hash) is request:
                del self._frontier[block_hash]
