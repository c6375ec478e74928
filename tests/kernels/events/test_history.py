"""Tests that the native code and its Python version agree on one worker's blocks over random
histories.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.effort import examples
from tests.kernels.events.event_pool import BLOCK_SIZE, Pool, array

COUNTERS = (
    "stored_blocks",
    "removed_blocks",
    "clears",
    "orphans",
    "skipped_events",
    "own_size",
    "other_size",
)
MEDIA = (None, "GPU", "CPU", "DISK")

# Few names, so that parents, evictions and returns meet; some of them differ in the high bits only.
names = st.integers(0, 11).map(lambda i: i % 6 if i < 9 else 2**63 + i % 6)
runs = st.lists(names, min_size=0, max_size=4)
parents = st.none() | names
tiers = st.sampled_from([0, 0, 0, 1, 2])


def token_ids(run: list[int], parent: int | None) -> list[int]:
    """Return token ids that mostly are those for which the block names stood before; they also
    depend on whether there is a parent.
    """
    return [token for name in run for token in (name % 6, 7 if parent is None else 8)]


class NativeAndPythonMachine(RuleBasedStateMachine):
    """Checks that every answer of the native blocks and index equals that of the Python version."""

    @initialize(max_parked=st.sampled_from([0, 3, 6, 65536]), counts_copies=st.booleans())
    def start(self, max_parked: int, counts_copies: bool) -> None:
        self.max_parked, self.counts_copies = max_parked, counts_copies
        self.pools = self.made()

    def made(self) -> tuple[Pool, Pool]:
        given = (self.max_parked, self.counts_copies)
        return Pool("native", *given), Pool("twin", *given)

    @rule(
        batch=st.lists(
            st.fixed_dictionaries(
                {
                    "run": runs,
                    "parent": parents,
                    "what": st.sampled_from(["stored"] * 6 + ["removed"] * 3 + ["cleared"]),
                    "medium": st.sampled_from(MEDIA),
                    "tokens": st.sampled_from([True, True, True, False]),
                    "size": st.sampled_from([BLOCK_SIZE] * 8 + [1, 4, 4, 6, 0]),
                    "wide": st.integers(0, 5).map(lambda chance: chance == 0),
                    "group": st.sampled_from([None] * 4 + [0, 0, 0, 1]),
                    "kind": st.sampled_from(
                        [None] * 9 + ["full_attention", "sliding_window", "mamba"]
                    ),
                    "window": st.sampled_from([None, 0, 1, 3, 4, 9]),
                    "cut": st.integers(0, 3),
                    "lora": st.sampled_from([None] * 4 + ["fr"]),
                    "keys": st.none() | st.lists(st.sampled_from([None, [["img", 3]], ["s"]])),
                }
            ),
            max_size=5,
        ),
        placed=st.none() | runs,
    )
    def apply(self, batch: list[dict[str, Any]], placed: list[int] | None) -> None:
        payload = msgspec.msgpack.encode([0, [wire(event) for event in batch], 0])
        places = () if placed is None else (array(placed), array([100 + n % 6 for n in placed]))
        left = [pool.apply(payload, places) for pool in self.pools]
        np.testing.assert_array_equal(*left)

    @rule(run=runs, parent=parents, tier=tiers, by_name=st.booleans())
    def store(self, run: list[int], parent: int | None, tier: int, by_name: bool) -> None:
        chain = array(run) if by_name else array([100 + name % 6 for name in run])
        for pool in self.pools:
            pool.blocks.store(array(run), parent, chain, tier)

    @rule(run=runs, parent=parents, tier=tiers, extra=st.booleans(), wide=st.booleans())
    def store_tokens(
        self, run: list[int], parent: int | None, tier: int, extra: bool, wide: bool
    ) -> None:
        ids = np.array(token_ids(run, parent), dtype=np.int32)
        if wide:
            ids = ids.astype(np.int64) << 31
        extras = [b"x" * i for i in range(len(run))] if extra else []
        for pool in self.pools:
            pool.blocks.store_tokens(array(run), parent, ids, 9, tier, extras)

    @rule(run=runs, parent=parents, tier=st.sampled_from([1, 2]), unit=st.integers(2, 3))
    def store_chunks(self, run: list[int], parent: int | None, tier: int, unit: int) -> None:
        alike = (0 if parent is None else 1) * unit * BLOCK_SIZE  # all begin with the same block
        ids = [token for name in run for token in [alike, alike, *[name % 6] * (2 * unit - 2)]]
        for pool in self.pools:
            tokens = np.array(ids, dtype=np.int32)
            pool.blocks.store_tokens(array(run), parent, tokens, 9, tier)

    @rule(run=runs, tier=tiers)
    def remove(self, run: list[int], tier: int) -> None:
        left = [pool.blocks.remove(array(run), tier) for pool in self.pools]
        np.testing.assert_array_equal(*left)

    @rule(chance=st.integers(0, 5))
    def clear(self, chance: int) -> None:
        for pool in self.pools if chance == 0 else ():
            pool.blocks.clear()

    @rule()
    def dump_and_load(self) -> None:
        dumps = [pool.blocks.dump() for pool in self.pools]
        assert dumps[0] == dumps[1]
        before, after = self.pools, self.made()
        for old, new in zip(before, after, strict=True):
            new.blocks.load(dumps[0])
            assert new.blocks.dump() == dumps[0]
            for counter in COUNTERS:
                assert getattr(new.blocks, counter) == 0
            assert new.index.held(1) >= old.index.held(1)  # what two names shared came back
            old.blocks.load(dumps[0])  # over the present contents

    @precondition(lambda self: hasattr(self, "pools"))
    @invariant()
    def same_state(self) -> None:
        native, twin = (pool.blocks for pool in self.pools)
        assert (len(native), native.parked) == (len(twin), twin.parked)
        for counter in COUNTERS:
            assert getattr(native, counter) == getattr(twin, counter), counter
        assert (native.skips(), native.other_sizes()) == (twin.skips(), twin.other_sizes())
        assert (native.is_hybrid, native.groups()) == (twin.is_hybrid, twin.groups())
        assert native.has_full_attention == twin.has_full_attention
        chain = native.chains()
        for blocks in range(len(chain) + 1):
            limit = twin.limit(chain, blocks)
            assert native.limit(chain, blocks) == limit
            assert [pool.reused(chain, blocks) for pool in self.pools] == [limit, limit]
        for tier in range(3):
            chains = native.chains(tier)
            np.testing.assert_array_equal(chains, twin.chains(tier))
            for pool in self.pools:  # the index claims nothing else, and the same in both
                held = pool.index.held(1, tier)
                assert held == pool.index.contains(1, chains, tier) <= len(chains)
                assert held == self.pools[0].index.held(1, tier)


def wire(event: dict[str, Any]) -> Any:
    if event["what"] == "cleared":
        return ["AllBlocksCleared"]
    if event["what"] == "removed":
        return ["BlockRemoved", event["run"], event["medium"], event["group"]]
    ids = token_ids(event["run"], event["parent"])
    if event["wide"]:
        ids = [ids[0] + 2**62, *ids[1:]] if ids else []
    size = event["size"]
    ids = (ids * size)[: max(0, len(event["run"]) * size - (event["cut"] == 3))]
    return [
        *("BlockStored", event["run"], event["parent"], ids if event["tokens"] else []),
        *(size, None, event["medium"], event["lora"], event["keys"]),
        *(event["group"], event["kind"], event["window"]),
    ]


NativeAndPythonMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestNativeAndPythonMachine = NativeAndPythonMachine.TestCase
