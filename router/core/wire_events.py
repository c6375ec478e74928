"""KV events as they came from the wire, and as facts for those who want to look at each.

The core hands decoded batches to the native `WorkerBlocks` whole. Facts are made of them only
when somebody goes through them: a policy with memory, the recorder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from kvkernels import EventBatch
from kvkernels.seeds import chain_seed
from policies.facts import Cleared, KvEvent, Removed, Stored, Tier

TIERS: tuple[Tier, ...] = ("gpu", "host", "disk")  # by the index's number of them


class WireEvents(Sequence[KvEvent]):
    """The events of one batch, or of the batches of a snapshot, of a worker serving `model`.

    Events that the batches skipped are not among them. Lifetime: fact.
    """

    __slots__ = ("_facts", "batches", "model", "payload", "size_bytes")

    def __init__(
        self,
        batch: EventBatch | Sequence[EventBatch],
        model: str,
        size_bytes: int = 0,
        payload: bytes | None = None,
    ) -> None:
        """`size_bytes`: on the wire, which is about what they take while they wait; `payload`: as
        it came, of one batch that peers are to be told.
        """
        self.size_bytes = size_bytes
        self.payload = payload
        self.batches = (batch,) if isinstance(batch, EventBatch) else tuple(batch)
        self.model = model
        self._facts: tuple[KvEvent, ...] | None = None

    @property
    def blocks(self) -> int:
        """Blocks stored in all of them."""
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
        case ("stored", names, parent, tokens, size, tier, lora, salt, extras, group, full):
            seed = chain_seed(model, lora, salt)
            told = {"extras": extras, "group": group, "full_attention": full}
            return Stored(names, parent, tokens, size, TIERS[tier], seed, **told)
        case ("removed", names, tier, group):
            return Removed(names, TIERS[tier], group)
        case _:
            return Cleared()
