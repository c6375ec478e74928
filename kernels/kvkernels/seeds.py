"""The seed that starts a chain: requests of different adapters or salts share no block."""

from __future__ import annotations

import msgspec
import xxhash


def chain_seed(model: str, lora: str | None = None, salt: str | None = None) -> int:
    """uint64 seed of `kvkernels.chain_hashes` for a request.

    0 for a base model without salt, else XXH3-64 of the msgpack array [model, lora or nil,
    salt or nil] in its shortest encoding (docs/structure.md, block identity).
    """
    if not lora and not salt:
        return 0
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([model, lora or None, salt or None]))
