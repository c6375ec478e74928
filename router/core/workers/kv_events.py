"""Applies KV events, as they come from the wire, to the native record of a worker's blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvkernels import EventBatch, WorkerBlocks, chain_hashes, chain_seed, wide_chain_hashes
from policies.contract import Hashes
from policies.facts import BlockNames, Cleared, KvEvent, Removed, Stored, Tier
from router.core.workers.engine_names import EngineNames

TIERS: tuple[Tier, ...] = ("gpu", "host", "disk")  # by the index's number of them


class WireEvents(Sequence[KvEvent]):
    """The KV events of one batch, or of the batches of a snapshot, of a worker that serves `model`.
    Events that the batches skipped are left out. Lifetime: fact.
    """

    __slots__ = ("_facts", "batches", "model", "payload", "size_bytes")

    def __init__(
        self,
        batch: EventBatch | Sequence[EventBatch],
        model: str,
        size_bytes: int = 0,
        payload: bytes | None = None,
    ) -> None:
        """Keep one or more batches of KV events, without decoding their events yet. `size_bytes` is
        the size of the batches on the wire, which is about their size in memory. `payload` is the
        bytes of a single batch, if they must be passed on to other routers.
        """
        self.size_bytes = size_bytes
        self.payload = payload
        self.batches = (batch,) if isinstance(batch, EventBatch) else tuple(batch)
        self.model = model
        self._facts: tuple[KvEvent, ...] | None = None

    def skips(self) -> Counter[str]:
        """Return how many events the router cannot use, for each reason."""
        found: Counter[str] = Counter()
        for batch in self.batches:
            if batch.skipped:
                found.update(batch.skips())
        return found

    @property
    def blocks(self) -> int:
        """The number of blocks that these events report as stored, in all tiers."""
        return sum(batch.blocks for batch in self.batches)

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)

    @overload
    def __getitem__(self, at: int) -> KvEvent: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[KvEvent]: ...
    def __getitem__(self, at: int | slice) -> KvEvent | Sequence[KvEvent]:
        if self._facts is None:
            listed = (event for batch in self.batches for event in batch.listed())
            self._facts = tuple(_fact(event, self.model) for event in listed)
        return self._facts[at]

    def __repr__(self) -> str:
        return f"WireEvents({len(self)} events, {self.blocks} blocks, model {self.model!r})"


def _fact(event: tuple[Any, ...], model: str) -> KvEvent:
    match event:
        case ("stored", *told):
            names, parent, tokens, size, tier, lora, salt, extras, group, cache, _, masked = told
            if masked:  # they are the tokens of more blocks than those named
                tokens = tokens[:0]
            seed = chain_seed(model, lora, salt)
            other = {"extras": extras, "group": group, "full_attention": cache == "full"}
            return Stored(names, parent, tokens, size, TIERS[tier], seed, **other)
        case ("removed", names, tier, group):
            return Removed(names, TIERS[tier], group)
        case _:
            return Cleared()


def gpu_blocks_in(events: Sequence[KvEvent], enough: int) -> int:
    """Return how many blocks the events report as stored on the GPU. If events from the wire store
    at most `enough` blocks in all tiers together, the number for all tiers is returned instead,
    because counting only GPU blocks takes longer.
    """
    if type(events) is not WireEvents:  # isinstance is slow for subclasses of an ABC
        stored = (e for e in events if isinstance(e, Stored) and e.tier == TIERS[0])
        return sum(len(event.hashes) for event in stored if event.window is None)
    if events.blocks <= enough:
        return events.blocks
    listed = (event for batch in events.batches for event in batch.listed())
    return sum(len(e[1]) for e in listed if e[0] == "stored" and e[5] == 0)


_INT32_BYTES = 4
_TIER = {name: number for number, name in enumerate(TIERS)}


@dataclass(slots=True)
class Applied:
    """The effects of a batch of KV events that are not stored in the record of the worker's blocks.
    Lifetime: call.
    """

    clears: int = 0
    skips: dict[str, int] = field(default_factory=dict)  # facts that cannot be used, by why
    left: list[Hashes] = field(default_factory=list)  # chain hashes that left the GPU
    unreadable: int = field(default=0, compare=False)  # events that batches left out
    # Counts of events about the GPU's blocks: of this size, and (size, whole, perhaps unfinished)
    # of other sizes.
    own_size: int = field(default=0, compare=False)
    other_sizes: list[tuple[int, int, int]] = field(default_factory=list, compare=False)

    def add_left(self, chain: Hashes | None) -> None:
        """Add the chain hashes of blocks that left the GPU. None adds nothing."""
        if chain is not None:
            self.left.append(chain)


def apply_events(
    events: Sequence[KvEvent], blocks: WorkerBlocks, block_size: int, names: EngineNames
) -> Applied:
    """Apply the KV events of a batch to `blocks`, the record of a worker's cached blocks.

    `block_size` is the worker's block size in tokens. `names` computes which blocks of a model
    without full attention are meant. Return the effects that `blocks` itself does not record.
    """
    applied = Applied()
    if type(events) is WireEvents:
        clears = blocks.clears
        for batch in events.batches:
            if batch.windows_alone and not blocks.has_full_attention:
                applied.add_left(blocks.apply(batch, *names.places(batch)))
            else:
                applied.add_left(blocks.apply(batch))
            applied.unreadable += batch.skipped
        applied.clears = blocks.clears - clears
        return applied
    for event in events:
        if isinstance(event, Stored):
            if event.group is not None and not blocks.is_hybrid:
                blocks.apply(_group_event(event, named=False))
            if event.window is not None:
                blocks.apply(_group_event(event))
                continue
            _note_size(event, block_size, applied)
            if why := _store(event, blocks, block_size):
                applied.skips[why] = applied.skips.get(why, 0) + 1
        elif isinstance(event, Removed):
            if event.group:
                blocks.apply(_group_event(event))
                continue
            applied.add_left(blocks.remove(block_names(event.hashes), _TIER[event.tier]))
        else:
            applied.clears += 1
            blocks.clear()
    return applied


def _group_event(event: Stored | Removed, named: bool = True) -> EventBatch:
    """Return an event of a cache group in the form that it has on the wire, without tokens. If
    `named` is False, leave out the names of blocks, so that the event only says that there is a
    group of this kind.
    """
    told: dict[str, Any] = {
        "block_hashes": block_names(event.hashes).tolist() if named else [],
        "medium": "GPU",
        "group_idx": event.group,
    }
    if isinstance(event, Stored):
        kind = "full_attention" if event.full_attention else "mamba"
        told |= {"parent_block_hash": None, "token_ids": [], "block_size": event.block_size}
        if event.window:
            kind = "sliding_window"
            told["kv_cache_spec_sliding_window"] = event.window
        told["kv_cache_spec_kind"] = kind
    told["type"] = "BlockStored" if isinstance(event, Stored) else "BlockRemoved"
    return EventBatch(msgspec.msgpack.encode([0.0, [told]]))


def _note_size(event: Stored, block_size: int, applied: Applied) -> None:
    """Count the block size that an event shows, in `applied`.

    For events from the wire, `WorkerBlocks` does the same itself.
    """
    if event.tier != TIERS[0] or not (len(event.tokens) or event.chain is not None):
        return
    if event.block_size == block_size:
        applied.own_size += 1
    else:
        partial = len(event.hashes) == 1 and event.block_size < block_size
        applied.other_sizes.append((event.block_size, not partial, partial))


def _store(event: Stored, blocks: WorkerBlocks, block_size: int) -> str:
    """Add the blocks of an event to `blocks`, the record of a worker's cached blocks.

    Return "" on success, or else the reason why the event cannot be used.
    """
    names, tier = block_names(event.hashes), _TIER[event.tier]
    parent = None if event.parent is None else block_name(event.parent)
    if event.chain is not None:
        if event.block_size != block_size:
            return OTHER_SIZE
        if len(event.chain) != len(names):
            return "token_count"
        blocks.store(names, parent, event.chain, tier)
        return ""
    if len(event.tokens) and event.block_size != block_size:
        if not tier:
            return OTHER_SIZE
        if event.block_size % block_size or event.extras:
            return "chunk_size"
    if len(event.tokens) not in (0, len(names) * event.block_size):
        return "token_count"
    if len(event.extras) not in (0, len(names)):
        return "bad_extra_keys"
    blocks.store_tokens(names, parent, ids_of(event), event.seed, tier, event.extras)
    return ""


OTHER_SIZE = "other_block_size"  # why an event is skipped, as `WorkerBlocks` says it


def ids_of(event: Stored) -> npt.NDArray[Any]:
    """Return the token ids of an event as an int32 array, or int64 if an id exceeds int32."""
    if isinstance(event.tokens, np.ndarray):
        tokens: npt.NDArray[Any] = event.tokens
        return tokens
    is_wide = any(token >= 2**31 for token in event.tokens)
    return np.array(event.tokens, dtype=np.int64 if is_wide else np.int32)


def chain_of(event: Stored, seed: int) -> Hashes:
    """Compute the chain hashes of an event's blocks from their token ids, uint64[blocks].

    `seed` is the chain hash before the first block.
    """
    tokens = ids_of(event)
    if not event.extras:
        return hashes_of(tokens, event.block_size, seed)
    chain = []
    for at, extra in enumerate(event.extras):
        block = tokens[at * event.block_size : (at + 1) * event.block_size]
        narrow = block.astype(np.int32)
        data = narrow.tobytes() if (narrow == block).all() else block.tobytes()
        seed = xxh3_64_intdigest(seed.to_bytes(8, "little") + data + extra)
        chain.append(seed)
    return np.array(chain, dtype=np.uint64)


def hashes_of(tokens: npt.NDArray[Any], block_size: int, seed: int) -> Hashes:
    """Return the chain hashes of all full blocks of `tokens`, an int32 or int64 array of token ids.

    `seed` is the chain hash before the first block.
    """
    hashes = chain_hashes if tokens.itemsize == _INT32_BYTES else wide_chain_hashes
    return hashes(tokens, block_size, seed)


def block_name(name: int | bytes) -> int:
    """Return an engine's name of a block as a number of 64 bits.

    Of a longer digest the last 8 bytes are used, as vLLM does.
    """
    return name % 2**64 if isinstance(name, int) else int.from_bytes(name[-8:], "big")


def block_names(hashes: BlockNames) -> Hashes:
    """Return an engine's names of blocks as numbers of 64 bits, uint64[blocks].

    `WorkerBlocks` identifies blocks by these numbers.
    """
    if isinstance(hashes, np.ndarray):
        return hashes
    return np.array([block_name(name) for name in hashes], dtype=np.uint64)
