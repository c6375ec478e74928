"""Tests of blocks in host memory and on disk, as vLLM's connectors report them, native and in plain
Python.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest

from kvkernels import chain_seed
from tests.effort import examples
from tests.kernels.events.event_pool import BLOCK_SIZE, KINDS, Pool, tokens
from tests.oracles import index as twins

Event = dict[str, Any]


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def apply(pool: Pool, *events: Event) -> None:
    pool.apply(msgspec.msgpack.encode([0, list(events), 0]))


def stored(names: list[int], ids: list[int], parent: int | None = None, **more: Any) -> Event:
    told = {"block_hashes": names, "parent_block_hash": parent, "token_ids": ids}
    return {"type": "BlockStored", "block_size": BLOCK_SIZE, "medium": "GPU", **told, **more}


def placeholder(name: int, group: int = 0, medium: str = "CPU") -> Event:
    """Return a store event without tokens, as vLLM's OffloadingConnector sends by default, and
    always for windows and states.
    """
    return stored([name], [], block_size=0, medium=medium, group_idx=group)


def removed(names: list[int], medium: str, group: int | None = None) -> Event:
    event = {"type": "BlockRemoved", "block_hashes": names, "medium": medium}
    return event if group is None else event | {"group_idx": group}


def test_placeholders_refer_to_blocks_by_their_known_names(kind: str) -> None:
    pool = Pool(kind, counts_copies=True)
    chain = twins.chain_hashes(tokens(1, 2, 3, 4), BLOCK_SIZE)
    apply(pool, stored([11, 12], [1, 2, 3, 4]), placeholder(11), placeholder(12), placeholder(99))
    assert pool.blocks.skips() == {"unknown_names": 1}
    apply(pool, removed([11, 12], "GPU"))
    assert pool.hits(chain) == [0, 2, 2]
    apply(pool, placeholder(12, medium="STORAGE"), removed([12, 99], "CPU", group=0))
    assert pool.hits(chain) == [0, 1, 2]
    assert pool.blocks.orphans == 0, "a parent of nil puts nothing at the root"


def test_placeholders_of_other_groups_are_not_full_attention(kind: str) -> None:
    pool = Pool(kind, counts_copies=True)
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}
    apply(pool, stored([11, 12], [1, 2, 3, 4], **full))
    apply(pool, stored([11, 12], [1, 2, 3, 4], group_idx=0, **window))
    apply(pool, placeholder(11, group=0), placeholder(12, group=0), placeholder(11, group=2))
    assert pool.blocks.chains(1).size == 0
    assert pool.blocks.skips() == {"other_group": 3}
    apply(pool, placeholder(11, group=1), removed([11], "CPU", group=0))
    assert pool.blocks.chains(1).size == 1
    assert pool.blocks.groups()[0][4] == 2, "host memory's removal says nothing of the GPU's"
    tail = {"group_idx": 2, "kv_cache_spec_kind": "mamba", "medium": "CPU"}
    apply(pool, stored([12], [3, 4], 11, **tail))  # a state's partial tail describes itself
    assert pool.blocks.chains(1).size == 1


def test_a_known_name_is_used_if_a_connector_omits_salts_and_images(kind: str) -> None:
    """A connector leaves out salts and images, so a block's known name is used before its tokens:
    the name differs where the salt does.
    """
    pool = Pool(kind, counts_copies=True)
    salted = twins.chain_hashes(tokens(1, 2, 3, 4, 5, 6), BLOCK_SIZE, chain_seed("m", None, "s"))
    plain = twins.chain_hashes(tokens(1, 2, 3, 4, 5, 6), BLOCK_SIZE)
    keys = {"extra_keys": [["s"], None]}
    apply(pool, stored([11, 12], [1, 2, 3, 4], **keys))
    apply(pool, stored([11, 12, 13], [1, 2, 3, 4, 5, 6], medium="CPU"))  # 13 is new
    assert pool.hits(salted) == [2, 3, 3]
    assert pool.hits(plain) == [0, 0, 0]
    apply(pool, removed([11, 12], "GPU"))
    assert pool.hits(salted) == [0, 3, 3]


def test_blocks_that_chunks_share_are_counted(kind: str) -> None:
    """Blocks that several chunks share are counted: with `blocks_per_chunk`, vLLM reports all
    blocks of a chunk, and the chunk's removal takes them away once.
    """
    pool = Pool(kind, counts_copies=True)
    one = stored([11, 12], [1, 2, 3, 4], medium="CPU")
    other = stored([11, 13], [1, 2, 5, 6], medium="CPU")
    apply(pool, one, other)
    pool.blocks.load(pool.blocks.dump())
    apply(pool, removed([11, 12], "CPU"))
    assert pool.hits(twins.chain_hashes(tokens(1, 2, 5, 6), BLOCK_SIZE)) == [0, 2, 2]
    apply(pool, removed([11, 13], "CPU"))
    assert (len(pool.blocks), pool.blocks.removed_blocks) == (0, 0)


def test_a_block_on_two_media_is_counted_on_each(kind: str) -> None:
    pool = Pool(kind, counts_copies=True)
    everywhere = [stored([11], [1, 2], medium=medium) for medium in ("GPU", "CPU", "FS")]
    chain = twins.chain_hashes(tokens(1, 2), BLOCK_SIZE)
    apply(pool, *everywhere, *everywhere)
    for hits, medium in (([1, 1, 1], "GPU"), ([0, 1, 1], "CPU"), ([0, 0, 1], "FS")):
        apply(pool, removed([11], medium))
        assert pool.hits(chain) == hits or medium != "GPU"
        apply(pool, removed([11], medium))
    assert len(pool.blocks) == 0


class Offloading:
    """A vLLM with an OffloadingConnector that reports its blocks: the events it sends, and what it
    really holds.
    """

    def __init__(self, random: Random, blocks_per_chunk: int) -> None:
        self.random, self.per_chunk = random, blocks_per_chunk
        self.gpu: dict[int, int] = {}  # our chain hash by its name
        self.host: dict[int, list[int]] = {}  # names of a chunk's blocks, by its last block's name
        self.meant: dict[int, int] = {}

    def step(self) -> list[Event]:
        """Return the events of the next random action."""
        if self.gpu and self.random.random() < 0.4:
            return [self._evicted(self.random.choice(list(self.gpu)))]
        if self.host and self.random.random() < 0.3:
            return [removed(self.host.pop(self.random.choice(list(self.host))), "CPU", group=0)]
        return self._prompt()

    def expected(self) -> tuple[set[int], set[int]]:
        """Return the chain hashes of the blocks on the GPU and of those in host memory."""
        held = {name for names in self.host.values() for name in names}
        return set(self.gpu.values()), {self.meant[name] for name in held}

    def _evicted(self, name: int) -> Event:
        del self.gpu[name]
        return removed([name], "GPU", group=0)

    def _prompt(self) -> list[Event]:
        salt = self.random.choice([None, None, "s"])
        ids = [self.random.randint(0, 1) for _ in range(BLOCK_SIZE * self.random.randint(1, 9))]
        chain = twins.chain_hashes(tokens(*ids), BLOCK_SIZE, chain_seed("m", None, salt)).tolist()
        names = [block ^ 0x5555 for block in chain]
        self.meant.update(zip(names, chain, strict=True))
        return [*self._computed(names, ids, salt), *self._offloaded(names, ids)]

    def _computed(self, names: list[int], ids: list[int], salt: str | None) -> list[Event]:
        events = []
        for i, name in enumerate(names):
            if name in self.gpu:
                continue
            self.gpu[name] = self.meant[name]
            keys = [[salt]] if salt and not i else None
            block = ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            parent = names[i - 1] if i else None
            events.append(stored([name], block, parent, extra_keys=keys, group_idx=0))
        return events

    def _offloaded(self, names: list[int], ids: list[int]) -> list[Event]:
        events = []
        for start in range(0, len(names) - self.per_chunk + 1, self.per_chunk):
            chunk = names[start : start + self.per_chunk]
            if chunk[-1] in self.host or self.random.random() < 0.3:
                continue
            self.host[chunk[-1]] = chunk
            told = ids[start * BLOCK_SIZE : (start + self.per_chunk) * BLOCK_SIZE]
            parent = names[start - 1] if start else None
            where = {"medium": "CPU", "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
            events.append(stored(chunk, told, parent, **where))
        return events


@pytest.mark.parametrize("seed", range(examples(200)))
def test_random_histories_of_chunks_keep_the_expected_blocks(kind: str, seed: int) -> None:
    random = Random(seed)
    pool, engine = Pool(kind, counts_copies=True), Offloading(random, random.randint(1, 4))
    for _ in range(40):
        apply(pool, *engine.step())
        held = tuple(set(pool.blocks.chains(tier).tolist()) for tier in (0, 1))
        assert held == engine.expected()
        assert pool.index.held(1, 0) == len(held[0])
        if random.random() < 0.05:
            pool.blocks.load(pool.blocks.dump())
    assert Counter(pool.blocks.skips()) == Counter()


def chunk(names: list[int], ids: list[int], parent: int | None = None, size: int = 8) -> Event:
    """Return a store event as LMCache's multi-process connector sends it: with names of its own,
    without group and kind.
    """
    return stored(names, ids, parent, block_size=size, medium="CPU")


IDS = [*range(1, 17)]
CHAIN = twins.chain_hashes(tokens(*IDS), BLOCK_SIZE)


def test_a_chunk_of_several_blocks_stores_each_block(kind: str) -> None:
    """Chunks of four of our blocks each are stored, under names that the GPU's blocks do
    not have.
    """
    pool = Pool(kind, counts_copies=True)
    apply(pool, stored([11, 12], IDS[:4]), chunk([91], IDS[:8]), chunk([92], IDS[8:], 91))
    assert pool.hits(CHAIN) == [2, 8, 8]
    assert pool.blocks.chains(1).tolist() == sorted(CHAIN.tolist())
    pool.blocks.load(pool.blocks.dump())
    apply(pool, removed([92], "CPU"), removed([7], "CPU"))
    assert pool.hits(CHAIN) == [2, 4, 4]
    apply(pool, chunk([92], IDS[8:], 91), removed([91], "CPU"), removed([11, 12], "GPU"))
    assert pool.hits(CHAIN) == [0, 0, 0]
    apply(pool, chunk([91], IDS[:8]))
    assert pool.hits(CHAIN) == [0, 8, 8]
    assert pool.blocks.other_sizes() == []
    apply(pool, removed([91, 92], "CPU"))
    assert len(pool.blocks) == 0
    assert pool.blocks.skips() == {}


def test_chunks_with_a_common_beginning_share_blocks(kind: str) -> None:
    pool = Pool(kind, counts_copies=True)
    other = [*IDS[:6], 99, 99]
    apply(pool, chunk([91], IDS[:8]), chunk([93], other), removed([91], "CPU"))
    assert pool.hits(CHAIN) == [0, 3, 3]
    assert pool.hits(twins.chain_hashes(tokens(*other), BLOCK_SIZE)) == [0, 4, 4]
    apply(pool, removed([93], "CPU"))
    assert (pool.hits(CHAIN), len(pool.blocks)) == ([0, 0, 0], 0)


def test_a_chunk_may_be_stored_twice_and_wait_for_its_parent(kind: str) -> None:
    pool = Pool(kind, counts_copies=True)
    apply(pool, chunk([92], IDS[8:], 91), chunk([93], [5] * 8, 91), removed([93], "CPU"))
    assert (pool.blocks.parked, len(pool.blocks)) == (2, 0)
    pool.blocks.load(pool.blocks.dump())
    apply(pool, chunk([91], IDS[:8]), chunk([91], IDS[:8]))
    assert pool.hits(CHAIN) == [0, 8, 8]
    apply(pool, removed([91], "CPU"))
    assert pool.hits(CHAIN) == [0, 8, 8]
    apply(pool, removed([91, 92], "CPU"))
    assert (len(pool.blocks), pool.blocks.parked) == (0, 0)


def test_stores_without_removal_events_do_not_count(kind: str) -> None:
    """Stores whose removals no event reports do not count. LMCache in vLLM's own process sends such
    events; Mooncake's store, which names the group, counts as an upper bound.
    """
    pool = Pool(kind, counts_copies=True)
    lmcache = chunk([91], IDS[:8]) | {"medium": "cpu"}
    assert pool.decode(msgspec.msgpack.encode([0, [lmcache]])).skips() == {"never_removed": 1}
    apply(pool, lmcache)
    assert len(pool.blocks) == 0
    apply(pool, stored([11], IDS[:2], medium="cpu", group_idx=0))
    assert pool.hits(CHAIN) == [0, 1, 1]


def test_unusable_chunks_are_counted(kind: str) -> None:
    pool = Pool(kind, counts_copies=True)
    apply(
        pool,
        chunk([91], IDS[:3], size=3),  # no multiple
        chunk([91], IDS[:1], size=1),  # smaller
        chunk([91], []),  # without tokens
        chunk([91], IDS[:8]) | {"extra_keys": [["s", ["img", 1]]]},
        chunk([91], IDS[:8]) | {"medium": "GPU"},
    )
    assert pool.blocks.skips() == {"chunk_size": 3, "unknown_names": 1, "other_block_size": 1}
    assert len(pool.blocks) == 0
    apply(pool, chunk([91], IDS[:8]))
    state = {"kv_cache_spec_kind": "mamba", "group_idx": 1}
    apply(pool, stored([11], IDS[:2], group_idx=0, kv_cache_spec_kind="full_attention"))
    apply(pool, stored([11], IDS[:2], **state), chunk([92], IDS[8:], 91))
    assert pool.blocks.is_hybrid
    assert pool.blocks.skips()["other_group"] == 1
    assert pool.blocks.chains(1).size == 0, "the groups cannot judge what is in it"
    apply(pool, stored([91], IDS[:2], medium="CPU"), removed([91], "CPU"))
    pool.blocks.load(pool.blocks.dump())


def of_mooncake(event_type: str, hashes: list[int], compatible: bool, medium: str) -> Event:
    """Return an event as Mooncake's master writes it; newer masters leave the hashes out."""
    legacy = {"stored": "BlockStored", "removed": "BlockRemoved"}[event_type]
    event: Event = {"event_id": 7, "timestamp": 1_790_000_000_123, "event_type": event_type}
    event |= {"type": legacy} if compatible else {}
    event |= dict.fromkeys(("model_name", "block_size", "additional_salt", "lora_name"))
    event |= {"tenant_id": "default", "backend_id": "m", "medium": medium, "dp_rank": 0}
    event |= {"group_id": None, "object_key": "m@4093", "seq_hashes": hashes}
    event |= {"block_hashes": hashes} if compatible else {}
    stored_only = dict.fromkeys(("parent_hash", "token_ids", "parent_block_hash"))
    return event | {"base_block_idx": None} | (stored_only if event_type == "stored" else {})


def test_mooncake_events_never_store_a_block_at_the_root(kind: str) -> None:
    """Mooncake's events never store a block at the root: their parents are nil and mean nothing, so
    only names that the GPU's blocks have count.
    """
    pool = Pool(kind, counts_copies=True)
    apply(pool, stored([11, 2**64 - 12], IDS[:4]))
    plain = [of_mooncake(what, [11], False, "cpu") for what in ("stored", "removed")]
    pool.apply(msgspec.msgpack.encode([1_790_000_000_123, plain, 0]))
    assert pool.decode(msgspec.msgpack.encode([1, plain, 0])).skips() == {"unknown_type": 2}
    apply(pool, *(of_mooncake(what, [], True, "disk") for what in ("stored", "removed")))
    assert (pool.hits(CHAIN), len(pool.blocks)) == ([2, 2, 2], 2)
    apply(pool, of_mooncake("stored", [11, -12, 99], True, "disk"), removed([11, -12], "GPU"))
    assert (pool.hits(CHAIN), len(pool.blocks)) == ([0, 0, 2], 2)
    assert pool.blocks.skips() == {"unknown_names": 1}
    apply(pool, of_mooncake("removed", [-12, 99], True, "disk"))
    assert pool.hits(CHAIN) == [0, 0, 1]


class LmCache:
    """An LMCache server with chunks of `unit` blocks: the events it sends, and what it really
    holds.
    """

    def __init__(self, random: Random, unit: int) -> None:
        self.random, self.unit = random, unit
        self.held: dict[int, list[int]] = {}  # chain hashes of a chunk's blocks, by its name

    def step(self) -> list[Event]:
        """Return the events of the next random action."""
        if self.held and self.random.random() < 0.5:
            few = self.random.sample(list(self.held), min(len(self.held), 2))
            for name in few:
                del self.held[name]
            return [removed(few, "CPU")]
        size = self.unit * BLOCK_SIZE
        ids = [self.random.randint(0, 1) for _ in range(size * self.random.randint(1, 3))]
        chain = twins.chain_hashes(tokens(*ids), BLOCK_SIZE).tolist()
        names = [block ^ 0x77 for block in chain[self.unit - 1 :: self.unit]]
        events = []
        for i, name in enumerate(names):
            if name in self.held:
                continue
            self.held[name] = chain[i * self.unit : (i + 1) * self.unit]
            parent = names[i - 1] if i else None
            events.append(chunk([name], ids[i * size : (i + 1) * size], parent, size))
        return events


@pytest.mark.parametrize("seed", range(examples(200)))
def test_random_histories_of_lmcache_keep_the_expected_blocks(kind: str, seed: int) -> None:
    random = Random(seed)
    pool, server = (
        Pool(kind, counts_copies=random.random() < 0.7),
        LmCache(random, random.randint(2, 4)),
    )
    for _ in range(40):
        apply(pool, *server.step())
        held = {block for chain in server.held.values() for block in chain}
        assert set(pool.blocks.chains(1).tolist()) == held
        assert pool.index.held(1, 1) == len(held)
        if random.random() < 0.05:
            pool.blocks.load(pool.blocks.dump())
    assert (pool.blocks.skips(), pool.blocks.parked) == ({}, 0)
