"""What a worker's KV events were, counted."""

from __future__ import annotations

from dataclasses import dataclass

from kvkernels import WorkerBlocks


@dataclass(slots=True)
class KvCounters:
    """What happened to a worker's events, for metrics. Lifetime: worker."""

    batches: int = 0
    stored_blocks: int = 0  # on the GPU
    removed_blocks: int = 0
    clears: int = 0
    gaps: int = 0
    restarts: int = 0
    duplicates: int = 0
    orphans: int = 0  # stored blocks that waited for their parent
    dropped_batches: int = 0  # beyond the backlog while a gap was open
    overflows: int = 0  # more blocks stored than any cache holds: evictions must have been missed
    refused_copies: int = 0  # of a peer's account of the cache: damaged, or of another model
    skipped_events: int = 0  # partial blocks, foreign block sizes, other groups, parked too long

    def with_blocks(self, blocks: WorkerBlocks, skipped_facts: int) -> KvCounters:
        """These, with what the record of the worker's blocks counts itself."""
        self.stored_blocks = blocks.stored_blocks
        self.removed_blocks = blocks.removed_blocks
        self.orphans = blocks.orphans
        self.skipped_events = skipped_facts + blocks.skipped_events
        return self
