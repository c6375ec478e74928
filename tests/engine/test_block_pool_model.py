"""Tests of the block pool and its pins against a naive model: a tree with time stamps, and a search
for the leaf of least worth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import DEFAULT_RETENTION, BlockPool, BlockRetention, Cleared, Removed, Stored
from engine.pins import PinRefused, Pins
from kvkernels import chain_hashes
from tests.effort import examples
from tests.oracles.block_pool import check_pool

SIZE = 2
BLOCKS = 9
PINNED_BLOCKS = 3
WORTHS = st.sampled_from(
    [
        DEFAULT_RETENTION,
        BlockRetention(0),
        BlockRetention(34),
        BlockRetention(80),
        BlockRetention(80, 3.0),
        BlockRetention(5, 2.0),
    ]
)


@dataclass(eq=False)
class Node:
    """One block of the naive model. `path` is its whole prefix in tokens, or None if it was never
    visible.
    """

    path: tuple[int, ...] | None = None
    holders: int = 0
    stamp: int = 0  # when it was last let go
    worth: BlockRetention = DEFAULT_RETENTION
    until_s: float = inf  # while nobody holds it

    def raise_worth(self, worth: BlockRetention) -> None:
        """Raise the block's worth to `worth`; of several requests that share it, the most demanding
        wins.
        """
        self.worth = max(self.worth, worth)


@dataclass(eq=False)
class Holder:
    """One request of the naive model, with the blocks that it holds in the real pool."""

    tokens: list[int]
    chain: list[int]
    nodes: list[Node]
    ids: list[int]
    visible: int
    epoch: int
    worths: list[BlockRetention] | None

    def worth(self, position: int) -> BlockRetention:
        return DEFAULT_RETENTION if self.worths is None else self.worths[position]


@dataclass(eq=False)
class ModelPin:
    """A pin of the naive model, with the prefixes it wants and the blocks it holds."""

    paths: list[tuple[int, ...]]
    until_s: float
    nodes: list[Node] = field(default_factory=list)
    epoch: int = 0


class PoolMachine(RuleBasedStateMachine):
    """Runs random histories of requests; after each step the pool and the naive model
    must agree.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.pins = Pins(self.pool, PINNED_BLOCKS)
        self.model_pins: dict[int, ModelPin] = {}
        self.now_s = 0.0
        self.resident: dict[tuple[int, ...], Node] = {}
        self.names: dict[int, tuple[int, ...]] = {}  # every hash ever seen -> its path
        self.holders: list[Holder] = []
        self.clock = 0
        self.epoch = 0
        self.told: set[int] = set()  # contents as a listener to the events sees them

    def tokens_chain_and_paths(
        self, pieces: list[int]
    ) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
        tokens = [piece for piece in pieces for _ in range(SIZE)]
        chain = [int(h) for h in chain_hashes(np.array(tokens, dtype=np.int32), SIZE)]
        paths = [tuple(tokens[: (i + 1) * SIZE]) for i in range(len(chain))]
        self.names.update(zip(chain, paths, strict=True))
        return tokens, chain, paths

    @rule(
        pieces=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        worths=st.none() | st.lists(WORTHS, min_size=5, max_size=5),
    )
    def start(self, pieces: list[int], worths: list[BlockRetention] | None) -> None:
        self.advance(0.0)  # as a scheduler does before it lets anything be evicted
        tokens, chain, paths = self.tokens_chain_and_paths(pieces)
        hit = 0
        while hit < len(paths) and paths[hit] in self.resident:
            hit += 1
        assert self.pool.hit(chain) == hit
        room = self.room(exclude=[self.resident[path] for path in paths[:hit]])
        assert self.pool.available_beyond(chain, hit) == room
        if len(chain) - hit > room:
            return
        nodes = [self.resident[path] for path in paths[:hit]]
        for position, node in enumerate(nodes):
            node.holders += 1
            node.raise_worth(DEFAULT_RETENTION if worths is None else worths[position])
        ids = self.pool.acquire(chain, hit, None if worths is None else worths[:hit])
        self.evict(len(chain) - hit)
        fresh = self.pool.allocate(len(chain) - hit)
        assert fresh is not None
        nodes += [Node(holders=1) for _ in fresh]
        self.holders.append(Holder(tokens, chain, nodes, ids + fresh, hit, self.epoch, worths))

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
                twin.raise_worth(holder.worth(position))
                holder.nodes[position] = twin
            else:
                holder.nodes[position].path = path
                holder.nodes[position].worth = holder.worth(position)
                self.resident[path] = holder.nodes[position]
        holder.ids[start:stop] = self.pool.publish(
            holder.ids[start:stop],
            holder.chain[start:stop],
            holder.chain[start - 1] if start else None,
            np.array(holder.tokens[start * SIZE : stop * SIZE], dtype=np.int32),
            None if holder.worths is None else holder.worths[start:stop],
        )
        holder.visible = stop

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.let_go(holder.nodes)
        self.pool.release(holder.ids)

    def let_go(self, nodes: list[Node]) -> None:
        for node in reversed(nodes):
            self.clock += 1
            node.holders -= 1
            node.stamp = self.clock
            node.until_s = self.now_s + node.worth.duration_s

    @rule(
        pieces=st.lists(st.integers(0, 2), min_size=1, max_size=3),
        ttl_s=st.sampled_from([2.0, inf]),
    )
    def pin(self, pieces: list[int], ttl_s: float) -> None:
        _, chain, paths = self.tokens_chain_and_paths(pieces)
        wanted = {path for pin in self.model_pins.values() for path in pin.paths} | set(paths)
        if len(wanted) > PINNED_BLOCKS:
            with pytest.raises(PinRefused, match="pinned-share") as refused:
                self.pins.pin(chain, self.now_s + ttl_s)
            assert refused.value.reason == "pin_share"
            return
        self.pins.pin(chain, self.now_s + ttl_s)
        pin = self.model_pins.setdefault(chain[-1], ModelPin(paths, 0.0, epoch=self.epoch))
        pin.until_s = self.now_s + ttl_s
        self.top_up(pin)

    @precondition(lambda self: self.model_pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model_pins)))
        assert self.pins.unpin(name)
        assert not self.pins.unpin(name)
        self.let_go(self.model_pins.pop(name).nodes)

    @rule(wait_s=st.sampled_from([0.0, 1.0, 2.5]))
    def advance(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.pins.advance(self.now_s)
        for node in self.resident.values():
            if not node.holders and node.until_s <= self.now_s:
                node.worth, node.until_s = DEFAULT_RETENTION, inf
        for name, pin in list(self.model_pins.items()):
            if pin.until_s <= self.now_s:
                self.let_go(self.model_pins.pop(name).nodes)
            else:
                self.top_up(pin)

    def top_up(self, pin: ModelPin) -> None:
        hit = 0
        while hit < len(pin.paths) and pin.paths[hit] in self.resident:
            hit += 1
        if (hit, self.epoch) == (len(pin.nodes), pin.epoch):
            return
        nodes = [self.resident[path] for path in pin.paths[:hit]]
        for node in nodes:
            node.holders += 1
            node.raise_worth(DEFAULT_RETENTION)
        self.let_go(pin.nodes)
        pin.nodes, pin.epoch = nodes, self.epoch

    @rule()
    def clear(self) -> None:
        self.resident.clear()
        self.epoch += 1
        self.pool.clear()

    @invariant()
    def same_contents(self) -> None:
        check_pool(self.pool)
        assert self.pool.used_blocks == len(self.held())
        pinned = {id(node) for pin in self.model_pins.values() for node in pin.nodes}
        assert self.pins.held_blocks == len(pinned) <= PINNED_BLOCKS
        assert [pin.name for pin in self.pins.all] == list(self.model_pins)
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

    def held(self) -> set[int]:
        holders = [*self.holders, *self.model_pins.values()]
        return {id(node) for holder in holders for node in holder.nodes}

    def room(self, exclude: list[Node]) -> int:
        return BLOCKS - len(self.held() | {id(node) for node in exclude})

    def evict(self, count: int) -> None:
        """Make room for `count` blocks: evict, again and again, the leaf of least worth that no
        request holds, and of equal ones the oldest.
        """
        held = self.held() | {id(node) for node in self.resident.values() if node.holders}
        idle = [node for node in self.resident.values() if not node.holders]
        for _ in range(max(0, count - (BLOCKS - len(held) - len(idle)))):
            parents = {path[:-SIZE] for path in self.resident}
            leaves = [node for node in idle if node.path not in parents]
            first = min(leaves, key=lambda node: (node.worth.priority, node.stamp))
            idle.remove(first)
            assert first.path is not None
            del self.resident[first.path]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=examples(400), stateful_step_count=40, deadline=None
)
