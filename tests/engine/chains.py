"""Makes prompts and the chain hashes of their blocks, for tests."""

from __future__ import annotations

import numpy as np

from kvkernels import chain_hashes

SIZE = 4


def chain_of(tokens: list[int]) -> list[int]:
    return [int(h) for h in chain_hashes(np.array(tokens, dtype=np.int32), SIZE)]


def prompt(prefix: int, blocks: int) -> list[int]:
    return [prefix] * SIZE * blocks
