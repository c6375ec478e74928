"""Computes vLLM's names of blocks, to find the blocks of models without full attention. All layers
of such a model have sliding windows or states. The model's KV events name only the blocks that the
cache keeps, together with the tokens of a whole prompt, and do not say which of the prompt's blocks
these are. vLLM names a block by a hash of the block before it and of the block's own tokens
(`v1/core/kv_cache_utils.py`, 2026). The same hashes, computed here, show which block a name means.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from kvkernels import EventBatch, chain_hashes, chain_seed
from policies.contract import Hashes

_BYTES, _TEXT, _ARRAY = 2, 3, 4  # major types of CBOR (RFC 8949)
_NULL = b"\xf6"
_TWO, _FOUR, _EIGHT = (Struct(code).pack for code in (">BH", ">BI", ">BQ"))


def _head(kind: int, value: int) -> bytes:
    """Return the head of a CBOR item: its major type, and its length or value, 0..2^64-1."""
    major = kind << 5
    if value >= 2**32:
        return _EIGHT(major | 27, value)
    if value >= 2**16:
        return _FOUR(major | 26, value)
    if value >= 2**8:
        return _TWO(major | 25, value)
    return bytes((major | value,) if value < 24 else (major | 24, value))


def _cbor(block: tuple[bytes, Sequence[int], None] | str) -> bytes:
    """Return the value that vLLM hashes for a block, encoded as canonical CBOR."""
    if isinstance(block, str):
        text = block.encode()
        return _head(_TEXT, len(text)) + text
    parent, tokens, _ = block
    ids = b"".join([_head(0, token) for token in tokens])
    parts = _head(_BYTES, len(parent)), parent, _head(_ARRAY, len(tokens)), ids
    return _head(_ARRAY, 3) + b"".join(parts) + _NULL


def _pickled(block: tuple[bytes, Sequence[int], None] | str) -> bytes:
    return pickle.dumps(block, protocol=5)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class NamingRule:
    """A rule by which vLLM names blocks. `algorithm` is the value of vLLM's flag
    `--prefix-caching-hash-algo`. `seed` is the value of its environment variable PYTHONHASHSEED, or
    vLLM's own constant if the variable is not set.
    """

    algorithm: str
    seed: str
    hash: Callable[[bytes], bytes]
    encode: Callable[[Any], bytes]

    @property
    def root(self) -> bytes:
        """The digest that takes the place of the previous block's digest for the first block of a
        prompt.
        """
        return self.hash(self.encode(self.seed))

    def digests(self, before: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
        """Return the digests of all full blocks of the token ids in `tokens`. `before` is the
        digest of the block before the first of them.
        """
        found = []
        for at in range(0, len(tokens) - block_size + 1, block_size):
            before = self.hash(self.encode((before, tuple(tokens[at : at + block_size]), None)))
            found.append(before)
        return found


UNSEEDED = "vllm-none-hash"  # vLLM's constant since 0.29
_ALGORITHMS = {
    "sha256": (_sha256, _pickled),
    "sha256_cbor": (_sha256, _cbor),
    "xxhash": (xxh3_128_digest, _pickled),
    "xxhash_cbor": (xxh3_128_digest, _cbor),
}
RULES = tuple(
    NamingRule(algorithm, seed, *how)
    for algorithm, how in _ALGORITHMS.items()
    for seed in (UNSEEDED, "0")
)
_MOST_HASHES = 1 << 16  # in one batch: 0.2 s of work
_TRIES = 64  # events whose names no rule explains, before no more are expected
_MOST_KNOWN = 1 << 16  # blocks


@dataclass(frozen=True, slots=True)
class _NamedBlock:
    """A block that other blocks may follow, with its chain hash and its digest by one
    naming rule.
    """

    rule: NamingRule
    digest: bytes
    chain: int


class EngineNames:
    """Finds out which blocks of prompts the KV events of a model without full attention name. The
    first events show which naming rule the engine follows. A name is used only if it equals a
    computed one. Lifetime: worker.
    """

    def __init__(self, model: str) -> None:
        self._seed = chain_seed(model, None, None)
        self.on_engine_restart()

    def on_engine_restart(self) -> None:
        """Forget the engine's rule and its blocks, because the engine restarted."""
        self._rules = RULES
        self._tries = self._hashes_left = 0
        self._known: dict[int, _NamedBlock] = {}  # by name, the oldest first

    @property
    def unknown(self) -> bool:
        """True if the names that the engine gives to blocks follow none of the known rules."""
        return not self._rules

    def places(self, batch: EventBatch) -> tuple[Hashes, Hashes]:
        """Return the block names in a batch that can be explained, and the chain hashes of the
        named blocks. Both are uint64 arrays of equal length. The names of blocks of adapters,
        salted prompts and images cannot be explained, and are left out.
        """
        found: dict[int, int] = {}
        self._hashes_left = _MOST_HASHES
        for event in batch.listed() if self._rules else ():
            if event[0] == "stored":
                found.update(self._explained(*event[1:6]))
        names = np.fromiter(found.keys(), np.uint64, len(found))
        return names, np.fromiter(found.values(), np.uint64, len(found))

    def _explained(
        self, names: Hashes, parent: int | None, tokens: Any, block_size: int, tier: int
    ) -> dict[int, int]:
        """Return the chain hash of each block whose name equals a computed name, by name."""
        if tier or len(tokens) < block_size or tokens.itemsize != np.int32().itemsize:
            return {}
        wanted = names.tolist()
        for start in self._starts(parent):
            self._hashes_left -= len(tokens) // block_size
            if self._hashes_left < 0:
                return {}
            chain = chain_hashes(tokens, block_size, start.chain).tolist()
            digests = start.rule.digests(start.digest, tokens.tolist(), block_size)
            blocks = {
                int.from_bytes(digest[-8:], "big"): _NamedBlock(start.rule, digest, place)
                for digest, place in zip(digests, chain, strict=True)
            }
            explained = {name: blocks[name] for name in wanted if name in blocks}
            if explained:
                self._rules = (start.rule,)
            elif wanted:
                continue
            last = int.from_bytes(digests[-1][-8:], "big")
            self._remember({**explained, last: blocks[last]})
            if explained:
                return {name: block.chain for name, block in explained.items()}
        self._note_failure(bool(wanted))
        return {}

    def _starts(self, parent: int | None) -> list[_NamedBlock]:
        """Return the blocks that may come before an event's first block, one for each possible
        naming rule.
        """
        if parent is None:
            return [_NamedBlock(rule, rule.root, self._seed) for rule in self._rules]
        known = self._known.get(parent)
        return [] if known is None or known.rule not in self._rules else [known]

    def _note_failure(self, names_blocks: bool) -> None:
        """Count an event whose names could not be explained. After many such events, stop trying to
        explain names.
        """
        if names_blocks and len(self._rules) > 1:
            self._tries += 1
            if self._tries >= _TRIES:
                self._rules = ()

    def _remember(self, blocks: dict[int, _NamedBlock]) -> None:
        """Remember blocks that later events may name as parents of their blocks."""
        for name, block in blocks.items():
            self._known.pop(name, None)
            self._known[name] = block
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
