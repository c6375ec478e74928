"""Tests of workers with hybrid models, whose hits need all cache groups, next to workers of dense
models.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvkernels import EventBatch
from policies.facts import KvEvents, WorkerChange
from router.core.placement.eligible import Rows
from router.core.workers.kv_events import WireEvents
from tests.router.core.core_world import BLOCK, World, chain_of, names_of, tokens_of

WINDOW = 2 * BLOCK + 1  # tokens: the two blocks before the next one
PROMPT = [1, 2, 3, 4, 5, 6]


def full(blocks: list[int], first: int = 0) -> dict[str, Any]:
    """Return the store event of a prompt's full-attention blocks, from block `first` on."""
    names = names_of(blocks)
    return {
        "type": "BlockStored", "block_hashes": names[first:], "block_size": BLOCK,
        "token_ids": tokens_of(blocks[first:]).tolist(), "group_idx": 1,
        "parent_block_hash": names[first - 1] if first else None,
        "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip


def window(blocks: list[int], last: int = 2) -> dict[str, Any]:
    """Return the store event of the last blocks of a prompt that a sliding window keeps, with the
    tokens of the whole prompt.
    """
    return {
        **full(blocks), "block_hashes": names_of(blocks)[len(blocks) - last :], "group_idx": 0,
        "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": WINDOW,
    }  # fmt: skip


def tell(world: World, worker_id: int, seq: int, *events: dict[str, Any]) -> None:
    batch = EventBatch(msgspec.msgpack.encode([0.0, events, 0]))
    fact = KvEvents(world.now_s, worker_id, seq, WireEvents(batch, "m"), "live")
    world.core.on_kv_events(fact)


def hits(world: World, blocks: list[int], prompt_tokens: int) -> list[int]:
    """Return for each worker the cached tokens that the core expects for the prompt."""
    rows = Rows.of(world.core.workers)
    found = world.core.caches.hit_tokens(rows, {BLOCK: chain_of(blocks)}, prompt_tokens)
    return [int(hit) for hit in found]


def test_a_hybrid_worker_hits_only_where_its_window_is_resident() -> None:
    world = World(workers=3)
    tell(world, 0, 0, window(PROMPT), full(PROMPT))
    tell(world, 1, 0, full(PROMPT))
    longer = [*PROMPT, 7]
    assert hits(world, longer, 7 * BLOCK + 1) == [6 * BLOCK, 6 * BLOCK, 0]
    assert hits(world, PROMPT[:4], 4 * BLOCK + 1) == [0, 4 * BLOCK, 0]
    # A token of each prompt is computed: one block less, where the window has none.
    assert hits(world, PROMPT, 6 * BLOCK) == [0, 6 * BLOCK - 1, 0]


def test_a_decision_counts_only_reusable_tokens() -> None:
    world = World(workers=2, policy="kv_prefix")
    tell(world, 0, 0, window(PROMPT), full(PROMPT))
    tell(world, 1, 0, full(PROMPT[:3]))
    (sent, *_) = world.core.on_arrival(world.arrival(PROMPT[:4]))
    assert sent.worker_id == 1


def test_a_dispatched_prompt_is_no_hybrid_hit_before_its_events() -> None:
    world = World(workers=1)
    tell(world, 0, 0, window(PROMPT), full(PROMPT))
    other = [11, 12, 13, 14]
    world.core.on_arrival(world.arrival(other))
    assert hits(world, other, 4 * BLOCK + 1) == [0]
    tell(world, 0, 1, window(other), full(other))
    assert hits(world, other, 4 * BLOCK + 1) == [4 * BLOCK]


def test_the_first_hybrid_events_end_the_expected_hits_of_a_dense_model() -> None:
    """The first events of a hybrid model end the expectations that were made as for a dense model,
    since nobody knew before that the model is hybrid.
    """
    world = World(workers=1)
    world.core.on_arrival(world.arrival(PROMPT))
    assert hits(world, PROMPT, 6 * BLOCK + 1) == [6 * BLOCK]
    tell(world, 0, 0, window(PROMPT, last=1), full(PROMPT))
    assert hits(world, PROMPT, 6 * BLOCK + 1) == [0]


def test_window_limits_end_when_the_worker_leaves_or_changes_its_model() -> None:
    world = World(workers=1)
    tell(world, 0, 0, window(PROMPT, last=1), full(PROMPT))
    assert hits(world, PROMPT, 6 * BLOCK + 1) == [0]
    world.join(0, models=("other",))
    tell(world, 0, 0, full(PROMPT))
    assert hits(world, PROMPT, 6 * BLOCK + 1) == [6 * BLOCK]
    tell(world, 0, 1, window(PROMPT, last=1))
    assert hits(world, PROMPT, 6 * BLOCK + 1) == [0]
    world.core.on_worker(WorkerChange(world.now_s, 0, "gone"))
    world.join(1)
    tell(world, 1, 0, full(PROMPT))
    assert hits(world, PROMPT, 6 * BLOCK + 1) == [6 * BLOCK]


def test_a_new_block_size_resets_the_cache_groups() -> None:
    """When an event shows another block size, the worker's cache groups are forgotten and the event
    is applied again with that size.
    """
    world = World(workers=1)
    doubled = {"block_size": 2 * BLOCK, "block_hashes": names_of(PROMPT)[1::2]}
    tell(world, 0, 0, {**window(PROMPT), **doubled}, {**full(PROMPT), **doubled})
    worker = world.core.workers.get(0)
    assert worker is not None
    assert worker.facts.block_size == 2 * BLOCK
    assert worker.kv.blocks.groups() == [(0, "window", WINDOW, 2 * BLOCK, 3)]
