"""The cost of recording which session uses which block, compared with plain Python.

    python -m tests.bench.owners [--json] [--runs N]

Chains have 2,048 blocks after a prefix of 300 blocks that all share. Figures are medians of the
thread's own CPU time, so other load on the machine does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvkernels import PrefixOwners
from tests.bench.beside_twin import Hashes, Row, main, median_us
from tests.oracles import prefix_owners as prefix_owners_twin

CHAIN_BLOCKS, TRUNK_BLOCKS, NEW_BLOCKS = 2_048, 300, 48
ENTRIES = 1 << 20


def figures(make: Callable[[int], Any], runs: int) -> dict[str, float]:
    """Return the microseconds of each operation on an empty table of owners, and then on a full
    one.
    """
    random = np.random.default_rng(7)
    chains = list(random.integers(0, 2**64, (runs, CHAIN_BLOCKS), np.uint64))
    for chain in chains:
        chain[:TRUNK_BLOCKS] = chains[0][:TRUNK_BLOCKS]
    strangers = list(random.integers(0, 2**64, (runs, CHAIN_BLOCKS), np.uint64))
    room, crowd = make(ENTRIES), make(ENTRIES // 16)
    for number, chain in enumerate(random.integers(0, 2**64, (32, CHAIN_BLOCKS), np.uint64)):
        crowd.claim(chain, 10**6 + number)

    def known(owner: int, chain: Hashes) -> object:
        return room.claim(chain[:-NEW_BLOCKS], owner)

    return {
        "claim, all new behind the trunk": median_us(known, chains),
        "claim, the same again: all of it is warmed": median_us(known, chains),
        "claim, all known": median_us(known, chains),
        "claim, all known but 48": median_us(lambda o, c: room.claim(c, o), chains),
        "shared": median_us(lambda o, c: room.shared(c), chains),
        "owner, all known": median_us(lambda o, c: room.owner(c), chains),
        "owner, nothing known": median_us(lambda o, c: room.owner(c), strangers),
        "claim, all new, as many evicted": median_us(lambda o, c: crowd.claim(c, o), strangers),
    }


def memory() -> Row:
    """Return the row for the memory of a table of owners that has room for all blocks."""
    return Row(
        "memory, a block there is room for", PrefixOwners(ENTRIES).memory_bytes / ENTRIES, "B"
    )


if __name__ == "__main__":
    main(
        __doc__,
        partial(figures, PrefixOwners),
        partial(figures, prefix_owners_twin.PrefixOwners),
        memory,
    )
