"""Tests of one worker's blocks, native and in plain Python, case by case; `test_history.py` has
random histories of both.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvkernels import PrefixIndex, WorkerBlocks, chain_seed, wide_chain_hashes
from tests.kernels.events.event_pool import BLOCK_SIZE, KINDS, Pool, array, tokens
from tests.oracles import index as twins


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_late_parent_makes_its_descendants_known(kind: str) -> None:
    pool = Pool(kind)
    blocks = pool.blocks
    whole = twins.chain_hashes(tokens(1, 2, 3, 4, 5, 6), BLOCK_SIZE)
    blocks.store_tokens(array([13]), 12, tokens(5, 6), 0)
    blocks.store_tokens(array([12]), 11, tokens(3, 4), 0)
    assert (blocks.parked, blocks.orphans, len(blocks)) == (2, 2, 0)
    blocks.remove(array([13]))
    blocks.store_tokens(array([11]), None, tokens(1, 2), 0)
    assert pool.hits(whole)[0] == 2  # 13 left while it was parked
    assert (blocks.parked, len(blocks)) == (0, 2)
    blocks.store_tokens(array([13]), 12, tokens(5, 6), 0)
    assert pool.hits(whole)[0] == 3


def test_tiers_are_independent(kind: str) -> None:
    pool = Pool(kind)
    blocks = pool.blocks
    chain = twins.chain_hashes(tokens(1, 2, 3, 4), BLOCK_SIZE)
    blocks.store_tokens(array([11, 12]), None, tokens(1, 2, 3, 4), 0)
    blocks.store_tokens(array([11, 12]), None, tokens(), 0, tier=1)  # named only, known from tier 0
    blocks.remove(array([11, 12]))
    assert pool.hits(chain) == [0, 2, 2]
    assert blocks.chains(1).tolist() == sorted(chain.tolist())
    blocks.remove(array([12]), tier=1)
    assert (len(blocks), blocks.stored_blocks, blocks.removed_blocks) == (1, 2, 2)
    blocks.store_tokens(array([11, 99]), None, tokens(), 0, tier=2)
    assert blocks.skipped_events == 1  # the name 99 is unknown
    assert pool.hits(chain) == [0, 1, 1]


def test_a_name_stored_with_another_chain_replaces_the_old_chain(kind: str) -> None:
    pool = Pool(kind)
    blocks = pool.blocks
    old, new = array([1]), array([2])
    blocks.store(array([7]), None, old)
    blocks.store(array([7]), None, old, tier=1)
    blocks.store(array([7]), None, new)
    assert pool.hits(old) == [0, 0, 0]
    assert pool.hits(new)[0] == 1
    assert blocks.removed_blocks == 1


def test_blocks_of_adapters_and_salts_have_their_own_hash_seed(kind: str) -> None:
    pool = Pool(kind)
    salt = "tenant" * 60  # as long as a string of two length bytes
    event = {"type": "BlockStored", "block_hashes": [7], "token_ids": [1, 2], "block_size": 2}
    batch = [
        event | {"lora_name": "fr", "extra_keys": [["fr", salt]]},
        event | {"block_hashes": [8], "cache_salt": "blue"},
    ]
    pool.apply(msgspec.msgpack.encode([0, batch]))
    for seed in (chain_seed("m", "fr", salt), chain_seed("m", None, "blue")):
        chain = twins.chain_hashes(tokens(1, 2), BLOCK_SIZE, seed)
        assert pool.hits(chain)[0] == 1


def test_ids_beyond_int32_are_hashed_as_eight_bytes(kind: str) -> None:
    """Token ids beyond int32 are hashed as eight bytes; blocks without such ids have the same
    hashes as before.
    """
    pool = Pool(kind)
    ids, image = [1, 2, 3, 2**62 + 5, 6, 7], [["img", 1]]
    event = {"type": "BlockStored", "block_size": 2, "token_ids": ids, "block_hashes": [1, 2, 3]}
    late = {"token_ids": [8, 2**31], "block_hashes": [4], "parent_block_hash": 9}
    keyed = {"extra_keys": [None, image, None], "block_hashes": [5, 6, 7], "cache_salt": "s"}
    pool.apply(msgspec.msgpack.encode([0, [event, event | late, event | keyed]]))

    def link(parent: int, *ids: int, width: int = 4, extra: bytes = b"") -> int:
        words = b"".join(id.to_bytes(width, "little") for id in ids)
        return xxh3_64_intdigest(parent.to_bytes(8, "little") + words + extra)

    first = link(0, 1, 2)
    second = link(first, 3, 2**62 + 5, width=8)
    chain = array([first, second, link(second, 6, 7)])
    assert pool.hits(chain)[0] == 3
    assert twins.wide_chain_hashes(np.array(ids), 2).tolist() == chain.tolist()
    assert wide_chain_hashes(np.array(ids), 2).tolist() == chain.tolist()
    first = link(chain_seed("m", None, "s"), 1, 2)
    second = link(first, 3, 2**62 + 5, width=8, extra=b"img" + (1).to_bytes(4, "little"))
    assert pool.hits(array([first, second, link(second, 6, 7)]))[0] == 3
    pool.blocks.load(pool.blocks.dump())
    pool.blocks.store_tokens(array([9]), 1, tokens(3, 3), 0)
    third = link(int(chain[0]), 3, 3)
    assert pool.hits(array([int(chain[0]), third, link(third, 8, 2**31, width=8)]))[0] == 3


def test_blocks_of_other_sizes_are_skipped_and_counted(kind: str) -> None:
    pool = Pool(kind)

    def stored(size: int, blocks: int = 1, medium: str = "GPU", group: int | None = None) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": list(range(blocks)),
            "token_ids": [1] * (size * blocks),
            "block_size": size,
            "medium": medium,
            "group_idx": group,
        }
        pool.apply(msgspec.msgpack.encode([0, [event]]))

    stored(2)
    stored(1)  # perhaps the unfinished end of a prompt
    stored(1, blocks=2)
    stored(768)
    stored(256, medium="CPU")  # a tier of its own size
    stored(64, group=1)
    assert pool.blocks.own_size == 1
    assert pool.blocks.other_sizes() == [(1, 1, 1), (768, 1, 0)]
    assert pool.blocks.skips() == {"other_block_size": 3, "other_group": 1}
    for size in range(10, 20):
        stored(size)
    assert pool.blocks.other_sizes()[2:] == [*((n, 1, 0) for n in range(10, 15)), (0, 5, 0)]


def test_parked_blocks_beyond_the_limit_are_skipped(kind: str) -> None:
    blocks = Pool(kind, max_parked=8).blocks
    for name in range(0, 16, 2):
        blocks.store(array([name, name + 1]), 99, array([name, name + 1]))
    assert (blocks.parked, blocks.skipped_events) == (8, 4)
    blocks.remove(array([0, 1, 2]))
    blocks.store(array([50, 51]), 99, array([50, 51]))  # the evicted run made room for it
    assert (blocks.parked, blocks.skipped_events) == (8, 4)
    big = np.zeros(1 << 17, dtype=np.int32)
    blocks = Pool(kind, max_parked=1 << 30).blocks
    for start in range(0, 1 << 26, 1 << 16):  # tokens are what fills the memory
        blocks.store_tokens(np.arange(start, start + (1 << 16), dtype=np.uint64), 2**64 - 1, big, 0)
        if blocks.skipped_events:
            break
    assert blocks.skipped_events == 1
    assert 60 << 16 < blocks.parked < 70 << 16


def test_invalid_arguments_are_refused(kind: str) -> None:
    pool = Pool(kind)
    blocks, make = pool.blocks, type(pool.blocks)
    with pytest.raises(IndexError, match=r"worker must be 0\.\.1, got 2"):
        make(pool.index, 2, 16, "m")
    with pytest.raises(ValueError, match=r"block_size must be 1\.\.65536, got 0"):
        make(pool.index, 0, 0, "m")
    with pytest.raises(ValueError, match=r"max_parked must be 0\.\..*, got -1"):
        make(pool.index, 0, 16, "m", -1)
    with pytest.raises(ValueError, match=r"tier must be 0\.\.2, got 3"):
        blocks.remove(array([1]), 3)
    with pytest.raises(ValueError, match="chain must be 1 hashes, one a name, not 2"):
        blocks.store(array([1]), None, array([1, 2]))
    with pytest.raises(ValueError, match="tokens must be 2 or none at all, not 3"):
        blocks.store_tokens(array([1]), None, tokens(1, 2, 3), 0)
    with pytest.raises(ValueError, match="extras must be 1 or none at all, not 2"):
        blocks.store_tokens(array([1]), None, tokens(1, 2), 0, 0, [b"", b""])
    with pytest.raises(ValueError, match="parent must be a uint64, got -1"):
        blocks.store(array([1]), -1, array([1]))
    with pytest.raises(TypeError, match="names must be a buffer of uint64, got list"):
        blocks.remove([1])


def test_memory_of_names() -> None:
    """A name takes at most 32 bytes of memory while the table grows, while it shrinks, and
    afterwards.
    """
    index = PrefixIndex(1, max_entries=1)
    blocks = WorkerBlocks(index, 0, 16, "m")
    empty = blocks.memory_bytes
    everything = np.random.default_rng(5).integers(0, 2**63, 300_000).astype(np.uint64)
    steps = range(0, len(everything), 1000)
    for start in steps:
        blocks.store(everything[start : start + 1000], None, everything[start : start + 1000])
        assert blocks.memory_bytes - empty <= 32 * len(blocks) + 80_000
    for start in steps:
        blocks.remove(everything[start : start + 1000])
        assert blocks.memory_bytes - empty <= 32 * len(blocks) + 80_000
    assert len(blocks) == 0


def test_a_block_with_copies_is_there_until_the_last_is_removed(kind: str) -> None:
    pool = Pool(kind, counts_copies=True)
    run, chain = array([7]), array([107])
    for _ in range(3):
        pool.blocks.store(run, None, chain)
    pool.blocks.remove(run)
    other = Pool(kind, counts_copies=True)
    other.blocks.load(pool.blocks.dump())  # the dump has the copies, too
    for each in (pool, other):
        each.blocks.remove(run)
        assert each.hits(chain)[0] == 1
        each.blocks.remove(run)
        assert each.hits(chain)[0] == 0
        assert len(each.blocks) == 0
    assert pool.blocks.stored_blocks == pool.blocks.removed_blocks == 3


def test_a_block_stored_twice_counts_once_without_copy_counting(kind: str) -> None:
    pool = Pool(kind)
    for _ in range(3):
        pool.blocks.store(array([7]), None, array([107]))
    pool.blocks.remove(array([7]))
    assert pool.hits(array([107]))[0] == 0


class LateSubscriber:
    """An engine's blocks, each with at most `copies` copies, whose events are received only from
    the middle on. Lifetime: test.
    """

    def __init__(self, kind: str, copies: int, draw: Random) -> None:
        self.pool = Pool(kind, counts_copies=True)
        self.held: Counter[int] = Counter()
        self._copies, self._draw = copies, draw
        self._heard = False

    def go_on(self, calls: int) -> None:
        """Store and remove random blocks; a block's parent has half its number."""
        for _ in range(calls):
            name = self._draw.randrange(1, 16)
            if self._draw.random() < 0.5 and self.held[name]:
                self.held[name] -= 1
                if self._heard:
                    self.pool.blocks.remove(array([name]))
            elif self.held[name] < self._copies and (name == 1 or self.held[name // 2]):
                self.held[name] += 1
                if self._heard:
                    parent = name // 2 or None
                    self.pool.blocks.store(array([name]), parent, array([name]))

    def begin(self) -> None:
        self._heard = True

    def falsely_claimed(self) -> set[int]:
        """Return the blocks that the pool believes in and that the engine does not hold."""
        return set(self.pool.blocks.chains().tolist()) - set(+self.held)


@pytest.mark.parametrize("copies", [1, 3])
def test_a_late_subscriber_claims_no_block_that_the_engine_lacks(kind: str, copies: int) -> None:
    for seed in range(60):
        engine = LateSubscriber(kind, copies, Random(seed))
        engine.go_on(60)
        engine.begin()
        for _ in range(60):
            engine.go_on(5)
            assert not engine.falsely_claimed(), seed
