"""Highest random weight: which workers a key belongs to, whoever else joins or leaves.

Source: Thaler and Ravishankar, 1998. Mixing: the finalizer of SplitMix64 (Steele, Lea, Flood,
2014), in uint64 arithmetic that wraps, so equal on every machine.
"""

from __future__ import annotations

import numpy as np

from policies.contract import Hashes, Ints

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def weights(key: int, worker_ids: Ints, seed: int) -> Hashes:
    """uint64[rows]: the weight of each worker for `key`; the highest is its home.

    `key` and `seed` are any whole numbers, taken modulo 2^64; another seed gives weights that
    have nothing to do with these. Depends on worker ids alone, not on their rows.
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
