"""Checks of the invariants that a pool of blocks has after every call."""

from __future__ import annotations

from engine.block_pool import BlockPool, IdleBlocks


def check_pool(pool: BlockPool) -> None:
    """Raise AssertionError unless every block is accounted for exactly once; takes O(blocks)."""
    free, idle = set(pool._free), set(pool._idle)
    held = {block for block, count in enumerate(pool._references) if count > 0}
    assert len(free) == len(pool._free), "a block is in the free list twice"
    assert free.isdisjoint(idle), "a block is free and idle"
    assert held.isdisjoint(free | idle), "a held block can be given away"
    kept = [block for _, one in pool.groups or () for block in one.block_ids]
    assert pool.groups is None or len(kept) == pool.groups.blocks, "blocks of groups are miscounted"
    assert len(set(kept)) == len(kept), "a block is in two groups"
    assert (free | idle | held).isdisjoint(kept), "a group's block can be given away"
    assert len(free) + len(idle) + len(held) + len(kept) == pool.blocks, "a block was lost"
    assert all(pool._by_hash[h] == b for b, h in enumerate(pool._hash) if h is not None)
    assert len(pool._by_hash) == sum(h is not None for h in pool._hash), "a stale hash"
    assert all(pool._hash[block] is not None for block in idle), "an idle block has no content"
    parents: dict[int, int] = {}
    for block in pool._by_hash.values():
        parent_hash = pool._parent[block]
        if parent_hash is not None:
            assert parent_hash in pool._by_hash, f"block {block} outlived its parent"
            parents[block] = pool._by_hash[parent_hash]
            assert parents[block] in held or block in idle, "a block is held without its prefix"
    _check_idle(pool._idle, parents)
    _check_host(pool)


def _check_host(pool: BlockPool) -> None:
    """Raise AssertionError unless host memory is within its bound and no block there lacks its
    parent.
    """
    host = pool.host
    assert len(host) <= host.blocks, "the host holds more than it may"
    assert host._held.keys() >= host._pins.keys(), "a block that is being loaded is gone"
    assert host._ids.keys() == host._held.keys(), "a block of the host lies nowhere"
    taken = [*host._ids.values(), *host._free]
    assert len(set(taken)) == len(taken) <= host.blocks, "two blocks lie in one place"
    assert sorted(taken) == list(range(len(taken))), "a place was lost"
    newer: set[int] = set()
    for block_hash, block in reversed(host._held.items()):
        parent_hash = block.parent_hash
        known = parent_hash is None or parent_hash in pool._by_hash or parent_hash in newer
        assert known, "the host's block has no parent, or one that goes first"
        newer.add(block_hash)


def _check_idle(blocks: IdleBlocks, parents: dict[int, int]) -> None:
    """Raise AssertionError unless idle blocks are in the right order; `parents` gives the parent of
    each visible block.
    """
    counted = [0] * len(blocks._children)
    for block, parent in parents.items():
        assert blocks._parent[block] == parent, "a block has another parent"
        counted[parent] += 1
        assert block not in blocks._marked or parent in blocks._marked, "a mark ends in a chain"
        if block in blocks._plain and parent in blocks._plain:
            assert blocks._plain[block] < blocks._plain[parent], "a parent would go first"
    assert counted == blocks._children, "children are counted wrongly"
    assert blocks._marked.isdisjoint(blocks._plain), "a marked block stands in the queue"
    assert blocks._marked.issuperset(blocks._kept), "a block without a mark stands in the heap"
    assert blocks._marked.issuperset(blocks._retention), "a block with a worth has no mark"
    offered = {entry for entry in blocks._leaves if blocks._is_current(entry)}
    leaves = {block for block in blocks._kept if not counted[block]}
    assert {block for _, _, block in offered} == leaves, "a leaf was lost"
