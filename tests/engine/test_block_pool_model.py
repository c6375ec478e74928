"""The block pool against a naive model: a tree, stamps, and a search for the oldest leaf."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, Cleared, Removed, Stored
from kvkernels import chain_hashes
from tests.effort import EFFORT

SIZE = 2
BLOCKS = 9


@dataclass(eq=False)
class Node:
    """One block of the model. `path` is its whole prefix in tokens; None: never visible."""

    path: tuple[int, ...] | None = None
    holders: int = 0
    stamp: int = 0  # when it was last let go


@dataclass(eq=False)
class Holder:
    """One request of the model beside what it holds in the real pool."""

    tokens: list[int]
    chain: list[int]
    nodes: list[Node]
    ids: list[int]
    visible: int
    epoch: int


class PoolMachine(RuleBasedStateMachine):
    """Random lives of requests; after each step both must tell the same."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.resident: dict[tuple[int, ...], Node] = {}
        self.names: dict[int, tuple[int, ...]] = {}  # every hash ever seen -> its path
        self.holders: list[Holder] = []
        self.clock = 0
        self.epoch = 0
        self.told: set[int] = set()  # contents as a listener to the events sees them

    @rule(pieces=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def start(self, pieces: list[int]) -> None:
        tokens = [piece for piece in pieces for _ in range(SIZE)]
        chain = [int(h) for h in chain_hashes(np.array(tokens, dtype=np.int32), SIZE)]
        paths = [tuple(tokens[: (i + 1) * SIZE]) for i in range(len(chain))]
        self.names.update(zip(chain, paths, strict=True))
        hit = 0
        while hit < len(paths) and paths[hit] in self.resident:
            hit += 1
        assert self.pool.hit(chain) == hit
        room = self.room(exclude=[self.resident[path] for path in paths[:hit]])
        assert self.pool.available_beyond(chain, hit) == room
        if len(chain) - hit > room:
            return
        nodes = [self.resident[path] for path in paths[:hit]]
        for node in nodes:
            node.holders += 1
        ids = self.pool.acquire(chain, hit)
        self.evict(len(chain) - hit)
        fresh = self.pool.allocate(len(chain) - hit)
        assert fresh is not None
        nodes += [Node(holders=1) for _ in fresh]
        self.holders.append(Holder(tokens, chain, nodes, ids + fresh, hit, self.epoch))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        count = data.draw(st.integers(0, len(holder.chain) - holder.visible))
        if holder.epoch != self.epoch or not count:
            return
        start, stop = holder.visible, holder.visible + count
        for position in range(start, stop):
            path = self.names[holder.chain[position]]
            twin = self.resident.get(path)
            if twin is not None:
                twin.holders += 1
                holder.nodes[position] = twin
            else:
                holder.nodes[position].path = path
                self.resident[path] = holder.nodes[position]
        holder.ids[start:stop] = self.pool.publish(
            holder.ids[start:stop],
            holder.chain[start:stop],
            holder.chain[start - 1] if start else None,
            np.array(holder.tokens[start * SIZE : stop * SIZE], dtype=np.int32),
        )
        holder.visible = stop

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        for node in reversed(holder.nodes):
            self.clock += 1
            node.holders -= 1
            node.stamp = self.clock
        self.pool.release(holder.ids)

    @rule()
    def clear(self) -> None:
        self.resident.clear()
        self.epoch += 1
        self.pool.clear()

    @invariant()
    def same_contents(self) -> None:
        self.pool.check()
        held = {id(node) for holder in self.holders for node in holder.nodes}
        assert self.pool.used_blocks == len(held)
        for event in self.pool.drain_events():
            if isinstance(event, Stored):
                parent = event.parent_hash or 0
                assert event.block_hashes == chain_hashes(event.tokens, SIZE, parent).tolist()
                assert event.parent_hash is None or event.parent_hash in self.told
                assert not self.told & set(event.block_hashes)
                self.told |= set(event.block_hashes)
            elif isinstance(event, Removed):
                assert self.told >= set(event.block_hashes)
                self.told -= set(event.block_hashes)
            else:
                assert event == Cleared()
                self.told.clear()
        expected = set(self.resident)
        assert {self.names[h] for h in self.told} == expected
        stored = [self.names[h] for event in self.pool.snapshot() for h in event.block_hashes]
        before = {path: rank for rank, path in enumerate(stored)}
        assert all(before.get(path[:-SIZE], -1) < rank for path, rank in before.items())
        assert len(stored) == len(expected)
        assert set(stored) == expected

    def room(self, exclude: list[Node]) -> int:
        held = {id(node) for holder in self.holders for node in holder.nodes}
        return BLOCKS - len(held | {id(node) for node in exclude})

    def evict(self, count: int) -> None:
        """Make room for `count` blocks: the oldest leaf that nobody holds, again and again."""
        held = {id(node) for holder in self.holders for node in holder.nodes}
        held |= {id(node) for node in self.resident.values() if node.holders}
        idle = [node for node in self.resident.values() if not node.holders]
        for _ in range(max(0, count - (BLOCKS - len(held) - len(idle)))):
            parents = {path[:-SIZE] for path in self.resident}
            leaves = [node for node in idle if node.path not in parents]
            oldest = min(leaves, key=lambda node: node.stamp)
            idle.remove(oldest)
            assert oldest.path is not None
            del self.resident[oldest.path]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=400 * EFFORT, stateful_step_count=40, deadline=None
)
