"""A worker's stream as of a moment, to be saved or told to a peer."""

from __future__ import annotations

from typing import NamedTuple

from kvkernels import FrozenBlocks
from policies.facts import SavedStream


class FrozenStream(NamedTuple):
    """All that the next router needs to go on from here. Lifetime: until it is saved."""

    next_seq: int  # number of the first batch that is not in `blocks`
    digest: int  # of the batch before it
    known: bool
    blocks: FrozenBlocks

    def saved(self) -> SavedStream:
        """With its blocks as bytes. For a thread: it takes a while."""
        return SavedStream(self.next_seq, self.digest, self.known, self.blocks.dump())


class CopiedStream(NamedTuple):
    """All that a peer needs to go on from here. Lifetime: until it is told."""

    next_seq: int
    live_seq: int
    digest: int
    exact: bool
    turned_over: bool
    blocks: FrozenBlocks
