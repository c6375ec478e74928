"""Names blocks as vLLM does by default, and makes its events, without any of our code."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any


class Engine:
    """An engine whose model's layers all have sliding windows, or states if the window is 0.
    Lifetime: test.
    """

    def __init__(self, size: int, window: int, seed: Any = "vllm-none-hash") -> None:
        self.size, self.window, self.seed = size, window, seed

    def names(self, tokens: list[int]) -> list[int]:
        """Return the names that vLLM gives to the prompt's full blocks."""
        before, found = _digest(self.seed), []
        for at in range(0, len(tokens) - self.size + 1, self.size):
            before = _digest((before, tuple(tokens[at : at + self.size]), None))
            found.append(int.from_bytes(before[-8:], "big"))
        return found

    def store_event(self, tokens: list[int], first: int, kept: list[int]) -> dict[str, Any]:
        """Return the store event for a prompt's blocks from block `first` on, of which the indexes
        `kept` are kept.
        """
        names = self.names(tokens)
        return {
            "type": "BlockStored", "block_hashes": [names[at] for at in kept],
            "parent_block_hash": names[first - 1] if first else None,
            "token_ids": tokens[first * self.size : len(tokens) // self.size * self.size],
            "block_size": self.size, "medium": "GPU", "group_idx": 0,
            "kv_cache_spec_kind": "sliding_window" if self.window else "mamba",
            "kv_cache_spec_sliding_window": self.window or None,
        }  # fmt: skip


def _digest(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()
