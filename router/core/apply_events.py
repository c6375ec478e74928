"""KV events, whatever they came as, told to the native record of a worker's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from kvkernels import WorkerBlocks, chain_hashes
from policies.contract import Hashes
from policies.facts import BlockNames, KvEvent, Removed, Stored
from router.core.wire_events import TIERS, WireEvents

_TIER = {name: number for number, name in enumerate(TIERS)}


@dataclass(slots=True)
class Applied:
    """What `WorkerBlocks` does not count itself. Lifetime: call."""

    clears: int = 0
    skipped: int = 0  # facts of foreign block sizes, or that tell too little


def apply_events(events: Sequence[KvEvent], blocks: WorkerBlocks, block_size: int) -> Applied:
    """Tell `blocks`, which are of `block_size` tokens, one batch of events in order."""
    applied = Applied()
    if isinstance(events, WireEvents):
        clears = blocks.clears
        for batch in events.batches:
            blocks.apply(batch)
        applied.clears = blocks.clears - clears
        return applied
    for event in events:
        if isinstance(event, Stored):
            applied.skipped += not _store(event, blocks, block_size)
        elif isinstance(event, Removed):
            blocks.remove(block_names(event.hashes), _TIER[event.tier])
        else:
            applied.clears += 1
            blocks.clear()
    return applied


def _store(event: Stored, blocks: WorkerBlocks, block_size: int) -> bool:
    """False where it cannot be used."""
    names, tier = block_names(event.hashes), _TIER[event.tier]
    parent = None if event.parent is None else block_name(event.parent)
    if event.chain is not None:
        if len(event.chain) != len(names) or event.block_size != block_size:
            return False
        blocks.store(names, parent, event.chain, tier)
        return True
    if len(event.tokens) not in (0, len(names) * block_size):
        return False
    if len(event.tokens) and event.block_size != block_size:
        return False
    if len(event.extras) not in (0, len(names)):
        return False
    tokens = np.asarray(event.tokens, dtype=np.int32)
    blocks.store_tokens(names, parent, tokens, event.seed, tier, event.extras)
    return True


def chain_of(event: Stored, seed: int) -> Hashes:
    """uint64[blocks]: chain hashes of the blocks of an event that brings their tokens."""
    tokens = np.asarray(event.tokens, dtype=np.int32)
    if not event.extras:
        return chain_hashes(tokens, event.block_size, seed)
    chain = []
    for at, extra in enumerate(event.extras):
        block = tokens[at * event.block_size : (at + 1) * event.block_size]
        seed = xxh3_64_intdigest(seed.to_bytes(8, "little") + block.tobytes() + extra)
        chain.append(seed)
    return np.array(chain, dtype=np.uint64)


def block_name(name: int | bytes) -> int:
    """An engine's name of a block as uint64: a digest's last 8 bytes, as vLLM shortens it."""
    return name % 2**64 if isinstance(name, int) else int.from_bytes(name[-8:], "big")


def block_names(hashes: BlockNames) -> Hashes:
    """uint64[blocks]: names of blocks as the index's record of them knows them."""
    if isinstance(hashes, np.ndarray):
        return hashes
    return np.array([block_name(name) for name in hashes], dtype=np.uint64)
