"""Tests of KV events that carry our own chain hashes: they follow the same rules as events with
tokens.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, encode_batch
from kvkernels import EventBatch, PrefixIndex, WorkerBlocks, chain_hashes, chain_seed
from policies.facts import Cleared, Removed, ReplayEnd, Stored
from router.core.contract.actions import Resync
from router.core.workers.engine_names import EngineNames
from router.core.workers.kv_events import Applied, WireEvents, apply_events, block_names
from router.core.workers.kv_events import chain_of as chain_of_event
from tests.effort import examples
from tests.router.core.core_world import BLOCK, World, chain_of, removed, stored


def by_chain(event: object) -> object:
    """Return the same event as replays have it: names are chain hashes in arrays, without
    tokens.
    """
    if isinstance(event, Cleared):
        return event
    ours = np.array([CHAIN_OF_NAME[name] for name in event.hashes], dtype=np.uint64)
    if isinstance(event, Removed):
        return Removed(ours, event.tier)
    parent = None if event.parent is None else CHAIN_OF_NAME[event.parent]
    return Stored(ours, parent, (), event.block_size, event.tier, chain=ours)


def by_name(event: object) -> object:
    """Return the same event with the engine's own names, and with chain hashes instead of
    tokens.
    """
    if not isinstance(event, Stored):
        return event
    chain = np.array([CHAIN_OF_NAME[name] for name in event.hashes], dtype=np.uint64)
    return Stored(event.hashes, event.parent, (), event.block_size, event.tier, chain=chain)


# Prompts are made of three families of five blocks; every prefix of one has a name and a chain.
NAMES = EngineNames("m")  # nobody asks it here
FAMILIES = [[family * 10 + i for i in range(5)] for family in range(3)]
CHAIN_OF_NAME = {
    name: chain
    for blocks in FAMILIES
    for name, chain in zip(stored(blocks).hashes, chain_of(blocks).tolist(), strict=True)
}


def seen(world: World) -> tuple[object, ...]:
    """Return everything that the core shows of a worker's KV state."""
    kv = world.core.workers.get(0).kv
    hits = [world.hits(blocks) for blocks in FAMILIES]
    return hits, kv.known, kv.resyncing, kv.resident_blocks, kv.parked_blocks, kv.counters


_event = st.one_of(
    st.builds(
        lambda family, after, more: stored(FAMILIES[family][: after + more], after=after),
        st.integers(0, 2),
        st.integers(0, 4),
        st.integers(1, 5),
    ).filter(lambda event: len(event.hashes) > 0),
    st.builds(
        lambda family, depth, last: removed(FAMILIES[family][:depth], last=min(last, depth)),
        st.integers(0, 2),
        st.integers(1, 5),
        st.integers(1, 3),
    ),
    st.just(Cleared()),
)
_batch = st.tuples(
    st.integers(-2, 3),  # how far the number is from the next one: gaps, restarts, duplicates
    st.sampled_from(["live", "live", "live", "replay", "snapshot"]),
    st.lists(_event, max_size=3),
    st.sampled_from([None, None, None, True, False]),  # the end of a replay
)


@pytest.mark.parametrize("twin", [by_chain, by_name])
@settings(max_examples=examples(150), deadline=None)
@given(batches=st.lists(_batch, max_size=25), parked_blocks=st.integers(2, 12))
def test_a_stream_of_chain_hashes_gives_the_same_state_as_one_of_tokens(
    twin, batches, parked_blocks
) -> None:
    """A stream of events gives the same state with chain hashes as with tokens: children before
    parents, evicted orphans, gaps, restarts and snapshots.
    """
    bounds = {"parked_blocks": parked_blocks, "backlog_batches": 3, "index_entries": 1024}
    tokens, chains = (World(workers=0, **bounds) for _ in range(2))
    for world in (tokens, chains):
        world.join(0, kv_capacity_tokens=8.0 * BLOCK)
    seq = 0
    for step, source, events, ended in batches:
        seq = max(seq + step, 0)
        actions = tokens.events(0, seq, *events, source=source)
        assert chains.events(0, seq, *map(twin, events), source=source) == actions
        if ended is not None:
            for world in (tokens, chains):
                world.core.on_replay_end(ReplayEnd(0.0, 0, answered=ended))
        assert seen(chains) == seen(tokens)
        seq += 1


def test_an_orphan_with_a_chain_hash_also_waits_for_its_parent() -> None:
    """A block whose parent is unknown waits for its parent with chain hashes, too: its hash is
    known, but not whether the blocks before it are cached.
    """
    world = World(workers=1)
    world.events(0, 0, by_chain(stored([0, 1, 2], after=1)))
    assert world.core.workers.get(0).kv.parked_blocks == 2
    world.events(0, 1, by_chain(removed([0, 1, 2])))
    world.events(0, 2, by_chain(stored([0])))
    assert world.hits([0, 1, 2]) == [2]


def test_a_chain_of_another_length_than_its_names_is_skipped_and_counted() -> None:
    world = World(workers=1)
    chain = chain_of([0, 1])
    world.events(0, 0, Stored(chain, None, (), BLOCK, chain=chain[:1]))
    kv = world.core.workers.get(0).kv
    assert (world.hits([0, 1]), kv.resident_blocks, kv.counters.skipped_events) == ([0], 0, 1)


def test_a_gap_in_a_stream_of_chains_is_filled_by_its_replay() -> None:
    world = World(workers=1)
    world.events(0, 0, by_chain(stored([0])))
    late = by_chain(stored([0, 1, 2], after=2))
    assert world.events(0, 2, late) == [Resync(0, 1)]
    world.events(0, 1, by_chain(stored([0, 1], after=1)), source="replay")
    assert world.core.workers.get(0).kv.known
    assert world.hits([0, 1, 2]) == [3]


def test_decoded_events_equal_those_that_the_engine_published() -> None:
    names, tokens = (7, b"\x01" * 31 + b"\x08"), (1, 2, 3, 4)
    batch = [
        BlockStored(names, 6, tokens, 2, lora_name="tuned"),
        BlockRemoved((7,)),
        AllBlocksCleared(),
    ]
    events = WireEvents(EventBatch(encode_batch(0.0, batch)), "m")
    assert repr(events) == "WireEvents(3 events, 2 blocks, model 'm')"
    one, gone, cleared = events
    assert isinstance(one, Stored)
    assert block_names(one.hashes).tolist() == [7, int.from_bytes(b"\x01" * 7 + b"\x08", "big")]
    assert (one.parent, list(one.tokens), one.block_size, one.tier) == (6, list(tokens), 2, "gpu")
    assert one.seed == chain_seed("m", "tuned")
    assert isinstance(gone, Removed)
    assert (block_names(gone.hashes).tolist(), gone.tier) == ([7], "gpu")
    assert cleared == events[-1] == Cleared()
    assert list(events[:2]) == [one, gone]


@pytest.mark.parametrize("extras", [(), (b"", b"image", b"")])
def test_chain_hashes_of_an_event_equal_those_of_the_native_record(
    extras: tuple[bytes, ...],
) -> None:
    event = Stored((1, 2, 3), None, tuple(range(6)), 2, extras=extras)
    blocks = WorkerBlocks(PrefixIndex(1), 0, 2, "m")
    assert apply_events([event], blocks, 2, NAMES) == Applied()
    chain = chain_of_event(event, 0)
    assert sorted(blocks.chains().tolist()) == sorted(chain.tolist())
    plain = chain_hashes(np.arange(6, dtype=np.int32), 2, 0)
    assert (chain == plain).tolist() == [True, not extras, not extras]


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Stored((1, 2), None, (), 2, chain=np.zeros(1, dtype=np.uint64)), "token_count"),
        (Stored((1,), None, (1, 2, 3), 2), "token_count"),
        (Stored((1,), None, (1, 2), 3), "other_block_size"),
        (Stored((1, 2), None, (1, 2, 3, 4), 2, extras=(b"x",)), "bad_extra_keys"),
    ],
)
def test_events_with_too_little_data_are_skipped_and_counted(event: Stored, why: str) -> None:
    blocks = WorkerBlocks(PrefixIndex(1), 0, 2, "m")
    assert apply_events([event, Removed((9,)), Cleared()], blocks, 2, NAMES) == Applied(1, {why: 1})
    assert not len(blocks.chains())
