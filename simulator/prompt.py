"""Turns block ids into prompt tokens: the same id gives the same tokens, every time, everywhere.

A token is a pure function of (seed, id, offset in the block), mixed with SplitMix64's finalizer
(Steele, Lea, Flood, OOPSLA 2014), so no corpus is stored and two processes agree without talking.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Four-digit ids keep bodies small and lie inside the vocabulary of every model in use.
DEFAULT_VOCABULARY = 10_000
FIRST_TOKEN_ID = 1_000  # below lie the special tokens of most vocabularies
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
MASK = (1 << 64) - 1
PRIVATE_IDS_FROM = 1 << 63  # ids of tails that a trace gives no id to; never clash with its own


def prompt_tokens(
    ids: Sequence[int] | npt.NDArray[np.uint64],
    input_tokens: int,
    serial: int,
    block_tokens: int = 512,
    vocabulary: int = DEFAULT_VOCABULARY,
    seed: int = 0,
) -> npt.NDArray[np.int32]:
    """The prompt as int32 token ids, shape [input_tokens], each in FIRST_TOKEN_ID..vocabulary-1.

    The last block is cut to `input_tokens`. Where the ids cover full blocks only, the tail is
    private to the request with this `serial`. Raises ValueError for a vocabulary without room.
    """
    if vocabulary <= FIRST_TOKEN_ID:
        raise ValueError(f"vocabulary {vocabulary}: must be above {FIRST_TOKEN_ID}")
    named = np.asarray(ids, dtype=np.uint64)
    first = PRIVATE_IDS_FROM + (serial << 16) + len(named)
    private = max(0, -(-input_tokens // block_tokens) - len(named))
    tail = np.arange(first, first + private, dtype=np.uint64)
    starts = np.concatenate((named, tail)) * np.uint64(block_tokens)
    offsets = np.arange(block_tokens, dtype=np.uint64) + np.uint64(seed * GOLDEN & MASK)
    lanes: npt.NDArray[np.uint64] = np.add.outer(starts, offsets).ravel()[:input_tokens]
    mixed = _mix(lanes)
    span = np.uint64(vocabulary - FIRST_TOKEN_ID)
    return (mixed % span).astype(np.int32) + np.int32(FIRST_TOKEN_ID)


def _mix(lanes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    lanes = lanes + np.uint64(GOLDEN)
    lanes = (lanes ^ (lanes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    lanes = (lanes ^ (lanes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return lanes ^ (lanes >> np.uint64(31))
