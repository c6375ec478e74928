"""What workers hold of a prompt below the GPU: in host memory, on disk."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvkernels import PrefixIndex
from policies.contract import Hashes, Ints
from router.core.eligible import Rows


def tier_hits(
    index: PrefixIndex,
    rows: Rows,
    chains: Mapping[int, Hashes],
    prompt_tokens: int,
    hit_tokens: Ints,
) -> tuple[Ints, Ints]:
    """(host, disk), each int64[rows]: further leading prompt tokens, beyond `hit_tokens`.

    A block counts in the highest tier that holds all before it too: host tokens go on where the
    GPU's end, disk tokens where those end. At least one token of the prompt is left to compute.
    """
    reach = np.zeros((2, len(rows)), dtype=np.int64)  # up to where host, and disk, would do
    own_sizes = np.array(rows.block_sizes)
    for size in rows.distinct_block_sizes:
        blocks = index.longest_prefix_tiers(chains[size])[1:, rows.slots]
        np.multiply(blocks, size, out=reach, where=own_sizes == size, dtype=np.int64)
    np.minimum(reach, max(prompt_tokens - 1, 0), out=reach)
    host = np.maximum(reach[0] - hit_tokens, 0)
    disk = np.maximum(reach[1] - np.maximum(reach[0], hit_tokens), 0)
    return host, disk
