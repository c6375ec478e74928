"""Orders workers by a hash: by highest random weight, or by distance on a hash ring."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from policies.contract import FleetView, Floats, Hashes, Ints, RequestView

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def weights(key: int, worker_ids: Ints, seed: int) -> Hashes:
    """Return the weight of each worker for `key`, uint64[rows]; the highest is the key's home.

    `key` and `seed` are any whole numbers, taken modulo 2^64; another seed gives independent
    weights. The weights depend on worker ids alone, not on their rows.
    """
    mixed = worker_ids.astype(np.uint64) + np.uint64(_scrambled(key ^ _scrambled(seed)))
    mixed *= np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> _30)) * _FIRST
    mixed = (mixed ^ (mixed >> _27)) * _SECOND
    result: Hashes = mixed ^ (mixed >> _31)
    return result


def _scrambled(value: int) -> int:
    mixed = (value + _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


RINGS = 8  # kept: sets of eligible workers change when one joins, leaves or is retried without
FULL_TURN = 2.0**32
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: spreads hashes that are no good ones


def distances(request: RequestView, fleet: FleetView, prefix_tokens: int, nodes: int) -> Floats:
    """Return the distance on the ring from the key to each worker's nearest node, float64[rows].

    Distances are 0..1 of a full turn. In order of distance the workers come as on a walk along the
    ring (Karger and others, "Consistent Hashing and Random Trees", 1997), each at its first node;
    no ring need be sorted or walked.

    The key is the chain hash of the last full block within the first `prefix_tokens` tokens, or of
    the first block if that is longer. The prompt must have a full block. A worker's nodes depend on
    its id alone: if a worker leaves, only its keys move. Nodes have 32 bits; among a thousand
    workers two nodes are sometimes equal, and such a tie is broken at random.
    """
    last = min(max(prefix_tokens // request.block_size, 1), request.prompt_blocks) - 1
    key = np.uint32((int(request.chain[last]) * GOLDEN >> 32) & 0xFFFFFFFF)
    way = _nodes(fleet.worker_id.tobytes(), nodes) - key  # wraps round, as a ring does
    nearest: Floats = way.min(axis=0) / FULL_TURN
    return nearest


@lru_cache(maxsize=RINGS)
def _nodes(worker_ids: bytes, nodes: int) -> npt.NDArray[np.uint32]:
    """Return the positions of each worker's nodes on the hash ring, uint32[nodes, workers]."""
    ids = np.frombuffer(worker_ids, dtype=np.int64).astype(np.uint64)
    numbers = np.arange(nodes, dtype=np.uint64)[:, None] + (ids << np.uint64(20))
    return (_mixed(numbers) >> np.uint64(32)).astype(np.uint32)


def _mixed(values: Hashes) -> Hashes:
    """Return the values after the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).

    Every bit of the result depends on all bits of the value.
    """
    values = values + np.uint64(GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
