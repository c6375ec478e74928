"""Tests of engines' own block hashes by their published rules; the recorded batches hold real ones.

The rules are those of vLLM `v1/core/kv_cache_utils.py` 0.13 to 0.29 (`sha256_cbor`, `xxhash_cbor`),
SGLang `mem_cache/radix_cache.py` from 0.5.9 on, and TensorRT-LLM `runtime/kv_cache_hash.py`
(`v1_block_key`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import xxhash

from kvkernels import EventBatch
from tests.kernels.event_vectors import vectors

PAGE = 16
TOKENS = range(1, 33)
BLOCKS = (TOKENS[:PAGE], TOKENS[PAGE:])


def cbor_head(kind: int, size: int) -> bytes:
    """Return the head of a CBOR item, major type and length, in the shortest form (RFC 8949)."""
    if size < 24:
        return bytes([kind << 5 | size])
    return bytes([kind << 5 | 24, size])


def vllm_cbor(parent: bytes, tokens: range) -> bytes:
    ids = b"".join(cbor_head(0, token) for token in tokens)
    key = cbor_head(2, len(parent)) + parent + cbor_head(4, len(tokens)) + ids
    return cbor_head(4, 3) + key + b"\xf6"


def vllm(digest: Callable[[bytes], bytes], seed: str) -> list[int]:
    text = seed.encode()
    parent = digest(cbor_head(3, len(text)) + text)
    names = []
    for tokens in BLOCKS:
        parent = digest(vllm_cbor(parent, tokens))
        names.append(int.from_bytes(parent[-8:], "big"))
    return names


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def sglang() -> list[int]:
    """Return the names that SGLang gives to the blocks, as signed integers, as they are on the
    wire.
    """
    digest, names = b"", []
    for tokens in BLOCKS:
        digest = sha256(digest + b"".join(token.to_bytes(4, "little") for token in tokens))
        names.append(int.from_bytes(digest[:8], "big", signed=True))
    return names


def mix32(value: int, seed: int) -> int:
    for _ in range(2):
        value = ((value >> 16) ^ value) * 0x45D9F3B % 2**32
    value = ((value >> 16) ^ value) + 0x9E3779B9
    return seed ^ (value % 2**32 + (seed << 6) + (seed >> 2)) % 2**64


def trtllm() -> list[int]:
    parent, names = 0, []
    for tokens in BLOCKS:
        key = len(tokens) ^ parent * 0xBF58476D1CE4E5B9 % 2**64
        for token in tokens:
            key = mix32(token, key)
        parent = key
        names.append(key)
    return names


@pytest.mark.parametrize(
    ("name", "hashes"),
    [
        ("vllm_0_10_digests", vllm(sha256, "0")),
        ("vllm_0_13_xxhash", vllm(lambda data: xxhash.xxh3_128(data).digest(), "0")),
        ("vllm_0_18_offload", vllm(sha256, "vllm-none-hash")),
        ("sglang_0_5_9_array", sglang()),
        ("sglang_0_5_20_map", sglang()),
        ("trtllm_push_map", trtllm()),
    ],
)
def test_block_names_equal_the_engines_hashes(name: str, hashes: list[int]) -> None:
    stored = [
        event for event in EventBatch(vectors()[name].payload).listed() if event[0] == "stored"
    ]
    names = [int(name) for event in stored for name in event[1]]
    wanted = [each % 2**64 for each in hashes]
    assert names[:2] == wanted[: len(names)]


def test_hash_rules_give_their_published_values() -> None:
    """Each hash rule gives the values that its description publishes."""
    assert vllm(sha256, "0") == [3236607068019569386, 2758186210834249151]
    assert sglang() == [8635429971592222890, 1256577331724852459]
    assert trtllm() == [6052439777046529588, 757415256212586101]
