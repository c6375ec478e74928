"""A request without tokens, as virtual workers take it: only its blocks have names."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.request import Request, Tokens

NO_TOKENS: Tokens = np.zeros(0, dtype=np.int32)
_MASK = (1 << 64) - 1


def own_hash(request_id: int, depth: int) -> int:
    """Name of a full block that no chain was given for: nobody else's, the same in both twins.

    The finalizer of splitmix64 (Steele, Lea, Flood, 2014) over request and depth.
    """
    mixed = (request_id * 0x9E3779B97F4A7C15 + depth + 1) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


@dataclass(slots=True, eq=False)
class VirtualRequest(Request):
    """Lifetime: request. `names`: chain hashes it came with, the answer's blocks perhaps too."""

    names: list[int] = field(default_factory=list)
    zeros: Tokens = field(default_factory=lambda: NO_TOKENS)  # as long as any request may be

    def tokens(self, start: int, stop: int) -> Tokens:
        """int32[stop - start] of zeros."""
        return self.zeros[: stop - start]

    def extend_chain(self, full_blocks: int, block_size: int) -> None:
        """Name on until `chain` covers `full_blocks` blocks of prompt and output."""
        self.chain += self.names[len(self.chain) : full_blocks]
        self.chain += [own_hash(self.request_id, at) for at in range(len(self.chain), full_blocks)]
