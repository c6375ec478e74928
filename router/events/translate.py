"""Wire batches of KV events as the facts that the decision core takes."""

from __future__ import annotations

from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event
from engine.wire.seeds import chain_seed
from policies.facts import Cleared, KvEvent, Removed, Stored, Tier

_TIERS: dict[str | None, Tier] = {
    None: "gpu",
    "GPU": "gpu",
    "CPU": "host",
    "CPU_PINNED": "host",
    "DISK": "disk",
    "STORAGE": "disk",
    "EXTERNAL": "disk",
}


def facts_of(events: tuple[Event, ...], model: str) -> tuple[tuple[KvEvent, ...], int]:
    """(facts, skipped): the events of one batch for a worker serving `model`.

    Skipped: unknown media, further cache groups of hybrid models (each announces the same
    blocks), and blocks whose identity holds more than tokens (images), which cannot be rehashed.
    """
    facts: list[KvEvent] = []
    for event in events:
        fact = _fact_of(event, model)
        if fact is not None:
            facts.append(fact)
    return tuple(facts), len(events) - len(facts)


def _fact_of(event: Event, model: str) -> KvEvent | None:
    if isinstance(event, AllBlocksCleared):
        return Cleared()
    tier = _TIERS.get(event.medium)
    if tier is None or event.group_idx:
        return None
    if isinstance(event, BlockRemoved):
        return Removed(event.hashes, tier)
    return _stored(event, tier, model)


def _stored(event: BlockStored, tier: Tier, model: str) -> Stored | None:
    if event.beyond_tokens:
        return None
    return Stored(
        hashes=event.hashes,
        parent=event.parent,
        tokens=event.tokens,
        block_size=event.block_size,
        tier=tier,
        seed=chain_seed(model, event.lora_name, event.salt),
    )
