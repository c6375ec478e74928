"""The most hits a cache of so many blocks can have when the future is known."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush

NEVER_AGAIN = (1 << 62) - 1


def most_hits(requests: Sequence[Sequence[int]], reusable: Sequence[int], capacity: int) -> int:
    """Most block hits when `requests` (ids, each once in a request) are served in order.

    Of a request only the first `reusable` ids can be hits; all its ids can be kept afterwards.
    `capacity` blocks are kept from one request to the next, at least 1.

    Keeping a block for its next hit occupies one place over all the gaps between; as many such
    intervals as possible are to be had with `capacity` at most over each gap. Taking them as they
    come and dropping the one that ends last wherever there are too many is optimal (Belady, 1966,
    for pages; Carlisle and Lloyd, 1995, for intervals). Blocks count one by one here, while a
    real cache has only whole prefixes to offer: one more reason why this is a bound.
    It also bounds a pool of caches with `capacity` in all: a hit in one is a hit in their union.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1 block, got {capacity}")
    nexts = _next_hits(requests, reusable)
    kept: dict[int, int] = {}  # id -> request that hits it next
    latest: list[tuple[int, int]] = []  # (-next hit, id), stale entries included
    found = 0
    for serial, (ids, usable) in enumerate(zip(requests, reusable, strict=True)):
        for depth, (block, next_hit) in enumerate(zip(ids, nexts[serial], strict=True)):
            due = kept.get(block)
            if due == serial and depth < usable:
                found += 1
            if next_hit == NEVER_AGAIN:
                kept.pop(block, None)
            else:
                kept[block] = next_hit
                heappush(latest, (-next_hit, block))
        while len(kept) > capacity:
            negative, block = heappop(latest)
            if kept.get(block) == -negative:
                del kept[block]
    return found


def _next_hits(requests: Sequence[Sequence[int]], reusable: Sequence[int]) -> list[array[int]]:
    """For each id of each request, the next request that has it, if it can be a hit there.

    Where it cannot, that request offers it anew, and keeping it until then is of no use.
    """
    coming: dict[int, int] = {}
    nexts: list[array[int]] = []
    for serial in range(len(requests) - 1, -1, -1):
        ids = requests[serial]
        nexts.append(array("q", [coming.get(block, NEVER_AGAIN) for block in ids]))
        for depth, block in enumerate(ids):
            coming[block] = serial if depth < reusable[serial] else NEVER_AGAIN
    nexts.reverse()
    return nexts
