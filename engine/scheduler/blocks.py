"""The KV blocks of each request, from admission to release."""

from __future__ import annotations

from bisect import bisect_left

from engine.block_pool import BlockPool, BlockRetention
from engine.pins import Pins
from engine.scheduler.request import Request
from engine.scheduler.types import SchedulerSettings


class RequestBlocks:
    """The blocks that running requests hold, and those that they are about to make visible;
    lifetime: worker.

    A dictionary maps the next block of each running prefill to the request that computes it, so a
    waiting request finds in one look-up which request is computing its prefix. If outputs are
    reserved, a request counts from its start with the blocks of its longest output. These blocks
    are not taken before they are used, so their cached contents stay until then.
    """

    def __init__(self, settings: SchedulerSettings, pool: BlockPool) -> None:
        self.pins = Pins(pool, int(settings.pinned_share * pool.blocks))
        self._pool = pool
        self._groups = pool.groups
        self._block_size = pool.block_size
        self._frontier: dict[int, Request] = {}
        self._ends_in_flight: dict[int, tuple[int, Request]] = {}  # by chain hash; see `_plan_ends`
        self._reserves = settings.reserves_outputs
        self.reserved_blocks = 0  # promised to running requests, not yet theirs
        self._held_by: dict[str, int] = {}  # own blocks of running requests, by tenant

    def hit(self, request: Request) -> int:
        """Return how many leading blocks the request reuses; its last token is always computed."""
        limit = (request.total_tokens - 1) // self._block_size
        if self._groups is None:
            return self._pool.hit(request.chain, limit)
        return self._pool.reusable(request.chain, limit)

    def host_hit(self, request: Request, hit: int) -> int:
        """Return how many blocks after the request's `hit` cached blocks are in host memory; 0 for
        a request that reads its KV from another worker.
        """
        if request.imports or not self._pool.host.blocks:
            return 0
        limit = (request.total_tokens - 1) // self._block_size
        return self._pool.host.hit(request.chain, hit, limit)

    def fits(self, request: Request, hit: int, spare_blocks: int) -> bool:
        """Return whether all tokens of the request fit into the cache, with `hit` blocks cached,
        and leave `spare_blocks` free.
        """
        available = self._pool.available_beyond(request.chain, hit) - self.reserved_blocks
        return self.fresh(request, hit) + spare_blocks <= available

    def fits_whole(self, request: Request, hit: int) -> bool:
        """Return whether the blocks reserved for the request's output fit into the cache
        as well.
        """
        if not self._reserves:
            return True
        available = self._pool.available_beyond(request.chain, hit) - self.reserved_blocks
        # Blocks that may still be pinned cannot be promised.
        available -= self.pins.max_blocks - self.pins.held_blocks
        return self._limit(request) + self._working(request) - hit <= available

    def fresh(self, request: Request, hit: int) -> int:
        """Return the number of new blocks that the request takes at its start, if `hit` blocks are
        cached.
        """
        fresh = -(-request.total_tokens // self._block_size) - hit
        return fresh if self._groups is None else fresh + self._working(request)

    def held_by(self, tenant: str) -> int:
        """Return the number of blocks that running requests of `tenant` hold. Blocks that were
        cached before do not count, so a tenant does not pay alone for a shared prefix.
        """
        return self._held_by.get(tenant, 0)

    def start(self, request: Request, hit: int, host_hit: int = 0) -> None:
        """Hold the request's `hit` cached blocks and reserve its other blocks, for which `fits` has
        found room. The next `host_hit` blocks stay in host memory until `end_load`.
        """
        total_tokens = request.total_tokens
        request.host_blocks = host_hit
        # Evicting blocks adds others to the host.
        self._pool.host.pin(request.chain[hit : hit + host_hit])
        if self._groups is not None:
            self._plan_ends(request, hit)
            self._pool.touch_end(request.chain, hit)
        held = self._pool.acquire(request.chain, hit, self._retentions(request, 0, hit))
        fresh = self._pool.allocate(self.fresh(request, hit))
        if fresh is None:
            raise AssertionError(f"request {request.request_id} was admitted without room")
        self._own(request, len(fresh))
        if self._groups is not None:
            working = self._working(request)
            request.group_ids, fresh = fresh[:working], fresh[working:]
        request.block_ids = held + fresh
        if self._reserves:
            self.reserved_blocks += self._limit(request) - len(request.block_ids)
        request.visible_blocks = hit
        request.computed_tokens = request.scheduled_tokens = hit * self._block_size
        request.prefill_target = total_tokens
        request.epoch = self._pool.epoch
        self._mark(request)

    def end_load(self, request: Request) -> None:
        """End the request's load from host memory."""
        start, count = request.visible_blocks, request.host_blocks
        if count and request.epoch == self._pool.epoch:
            self._pool.host.unpin(request.chain[start : start + count])
        request.host_blocks = 0

    def grow(self, request: Request) -> bool:
        """Take one more block; return False if none is left."""
        block = self._pool.allocate(1)
        if block is None:
            return False
        if self._reserves:
            self.reserved_blocks -= 1
        request.block_ids += block
        self._own(request, 1)
        return True

    def publish(self, request: Request) -> None:
        """Publish the request's full computed blocks, unless the cache was cleared since it
        started.

        A prefill computed before a clear may rest on blocks that the clear was meant to drop.
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
            self._retentions(request, start, stop),
        )
        request.visible_blocks = stop
        while request.ends and request.ends[0] <= stop:
            end = self._drop_end(request)
            tokens = request.tokens(0, end * self._block_size)
            self._pool.keep_end(request.chain, end, tokens)
        self._mark(request)

    def leave(self, request: Request) -> None:
        """Release all blocks of the request; published ones stay cached."""
        self.end_load(request)
        self._unmark(request)
        if self._reserves:
            self.reserved_blocks -= self._limit(request) - len(request.block_ids)
        self._own(request, -request.own_blocks)
        self._pool.release(request.block_ids)
        request.block_ids = []
        if self._groups is not None:
            self._leave_groups(request)
        request.visible_blocks = request.prefill_target = 0
        request.computed_tokens = request.scheduled_tokens = 0

    def in_flight_tokens(self, request: Request, hit: int) -> int:
        """Return how many of the request's tokens after its `hit` cached blocks a running prefill
        is about to make visible.
        """
        mine = request.chain
        if self._groups is not None:
            return self._ends_in_flight_tokens(request, hit)
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

    def _ends_in_flight_tokens(self, request: Request, hit: int) -> int:
        """Return the same as `in_flight_tokens`, for caches that keep windows and states only at
        the ends of prefixes.
        """
        chain, limit = request.chain, (request.total_tokens - 1) // self._block_size
        best = hit
        for block_hash, (end, owner) in self._ends_in_flight.items():
            is_usable = best < end <= limit and chain[end - 1] == block_hash
            if is_usable and owner.epoch == self._pool.epoch:
                best = end
        return (best - hit) * self._block_size

    def _plan_ends(self, request: Request, hit: int) -> None:
        """Plan after which blocks the request stores windows and states. These are the block where
        it departs from the blocks that full attention has cached, and the last block that a
        repetition of the request need not compute.
        """
        parts = self._pool.hit(request.chain, (request.total_tokens - 1) // self._block_size)
        request.ends = sorted({end for end in (parts, self._own_end(request)) if end > hit})
        for end in request.ends:
            self._ends_in_flight[request.chain[end - 1]] = end, request

    def _leave_groups(self, request: Request) -> None:
        """Release the blocks of the request's windows and states; those stored at its end are
        marked as used now.
        """
        self._pool.release(request.group_ids)
        if request.group_ids:
            self._pool.touch_end(request.chain, self._own_end(request))
        while request.ends:
            self._drop_end(request)
        request.group_ids = ()

    def _drop_end(self, request: Request) -> int:
        """Remove the first of the request's planned blocks for windows and states, which was
        reached or never will be; return it.
        """
        end, *request.ends = request.ends
        block_hash = request.chain[end - 1]
        if self._ends_in_flight.get(block_hash, (end, None))[1] is request:
            del self._ends_in_flight[block_hash]
        return end

    def _own_end(self, request: Request) -> int:
        return (request.prompt_tokens - 1) // self._block_size

    def _working(self, request: Request) -> int:
        """Return the number of blocks that the request's windows and states take while it runs."""
        groups = self._groups
        return 0 if groups is None else groups.working(self._blocks(request.token_limit))

    def _limit(self, request: Request) -> int:
        """Return the most blocks that the request may hold. The KV of its last token is never
        computed.
        """
        return self._blocks(request.token_limit - 1)

    def _retentions(self, request: Request, start: int, stop: int) -> list[BlockRetention] | None:
        """Return the worths that the request gives to its blocks `start`..`stop`; None if it gives
        none.
        """
        retention = request.retention
        if retention is None:
            return None
        return retention.block_retentions(start, stop, self._block_size, request.prompt_tokens)

    def _own(self, request: Request, blocks: int) -> None:
        request.own_blocks += blocks
        left = self._held_by.get(request.tenant, 0) + blocks
        if left:
            self._held_by[request.tenant] = left
        else:
            self._held_by.pop(request.tenant, None)

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
