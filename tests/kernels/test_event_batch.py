"""Batches of KV events, decoded by the native code and by its twin."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvkernels import EventBatch
from tests.kernels.event_vectors import DECODERS, plain, vectors

VECTORS = vectors()


@pytest.fixture(params=sorted(DECODERS))
def decode(request: pytest.FixtureRequest) -> type[EventBatch]:
    return DECODERS[request.param]


def pack(*events: Any, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def stored(**fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [7], "token_ids": [1, 2], "block_size": 2}
    return event | fields


@pytest.mark.parametrize("name", sorted(VECTORS))
def test_what_engines_send(decode: type[EventBatch], name: str) -> None:
    vector = VECTORS[name]
    batch = decode(vector.payload)
    assert plain(batch.listed()) == vector.listed
    assert batch.skipped == vector.skipped
    assert len(batch) == len(vector.listed)
    assert batch.blocks == sum(len(e[1]) for e in vector.listed if e[0] == "stored")


def test_time_and_rank(decode: type[EventBatch]) -> None:
    batch = decode(VECTORS["vllm_0_29_hybrid"].payload)
    assert (batch.ts_s, batch.rank) == (2.0, 1)
    batch = decode(msgspec.msgpack.encode([1, []]))
    assert (batch.ts_s, batch.rank, len(batch)) == (1.0, 0, 0)
    assert decode(bytes.fromhex("92ca3fc0000090")).ts_s == 1.5  # a float of 4 bytes


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_any_buffer_will_do(decode: type[EventBatch], kind: Any) -> None:
    assert len(decode(kind(pack(stored())))) == 1


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "it ends within a value"),
        (b"\xc1", "byte 0xc1 begins no msgpack value"),
        (VECTORS["vllm_0_24_map"].payload[:-1], "it ends within a value"),
        (VECTORS["vllm_0_24_map"].payload + b"\0", "more bytes follow it"),
        (b"\x91" * 100_000, r"must be an array \[time, events, rank\]"),
        (b"\x93\x01" + b"\x91" * 100_000, "event 0: must be an array or a map with its type"),
        (b"\x93\x01\xdd\x00\x00\xff\xff", "it ends within a value"),
        (b"\x92\xa1x\x90", "the time must be a number"),
        (b"\x92\x01\x80", "the events must be an array of at most 65536"),
        (b"\x93\x01\x90\xff", "the rank must be 0..65535 or nil"),
        (pack(5), "event 0: must be an array or a map with its type"),
        (pack([]), "event 0: must be an array or a map with its type"),
        (pack({"type": 1}), "event 0: must be an array or a map with its type"),
        (pack(["BlockRemoved"]), "event 0: block_hashes must be an array of hashes"),
        (pack(stored(), stored(block_hashes=None)), "event 1: block_hashes must be an array"),
        (pack(stored(block_hashes=["x"])), "block_hashes: a hash must be an int or 1..64 bytes"),
        (pack(stored(block_hashes=[b"x" * 65])), "a hash must be an int or 1..64 bytes"),
        (pack(stored(parent_block_hash=b"")), "parent_block_hash: a hash must be an int"),
        (pack(stored(block_size=0)), r"block_size must be 1..65536 or nil"),
        (pack(stored(token_ids=5)), "token_ids must be an array of ints"),
        (pack(stored(token_ids=[1, 2**31])), "a token must be an int in 0..2147483647"),
        (pack(stored(token_ids=[1, -1])), "a token must be an int in 0..2147483647"),
        (pack(stored(token_ids=[1, 2.0])), "a token must be an int in 0..2147483647"),
        (pack(stored(lora_id="a")), "lora_id must be an int or nil"),
        (pack(stored(medium=1)), "medium must be a string or nil"),
        (pack(stored(group_idx=-1)), r"group_idx must be 0..65535 or nil"),
        (pack(stored(extra_keys=1)), "extra_keys must be an array or nil"),
        (pack(stored(mm_keys="x")), "mm_keys must be an array or nil"),
        (pack(stored(mm_keys=[[{"hash": "x" * (1 << 22)}]])), "extra_keys: more than"),
        (pack(["BlockRemoved", [1] * (1 << 20)], stored()), "event 1: block_hashes: more than"),
        (pack(stored()).replace(b"\x01\x02", b"\xa1\xff"), "ends within|more bytes|must be"),
    ],
)
def test_what_is_malformed_says_where(
    decode: type[EventBatch], payload: bytes, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"event batch: .*({reason})"):
        decode(payload)


def test_a_payload_too_large(decode: type[EventBatch]) -> None:
    with pytest.raises(ValueError, match="event batch: 33554433 bytes, at most 33554432"):
        decode(bytes((32 << 20) + 1))
    with pytest.raises(TypeError, match="payload must be a buffer of bytes, got str"):
        decode("text")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"]
)
def test_names_must_be_utf8(decode: type[EventBatch], text: bytes) -> None:
    good = pack(stored(lora_name="x" * len(text)))
    assert decode(good).listed()[0][6] == "x" * len(text)
    with pytest.raises(ValueError, match="event 0: lora_name must be UTF-8"):
        decode(good.replace(b"x" * len(text), text))


def test_an_adapter_without_a_name_is_not_the_base_model(decode: type[EventBatch]) -> None:
    (event,) = decode(pack(stored(lora_id=3))).listed()
    assert event[6] == "lora_id:3"
    (event,) = decode(pack(stored(lora_id=0))).listed()
    assert event[6] is None


@pytest.mark.parametrize("field", ["parent_block_hash", "token_ids", "block_size", "rank"])
def test_nil_means_absent(decode: type[EventBatch], field: str) -> None:
    without = {k: v for k, v in stored(block_size=1, token_ids=[1]).items() if k != field}
    (got,) = decode(pack({**without, field: None}, rank=None)).listed()
    assert plain([got]) == plain(decode(pack(without, rank=0)).listed())


def test_of_a_key_given_twice_the_last_counts(decode: type[EventBatch]) -> None:
    event = pack({"type": "BlockRemoved", "block_hashes": [7], "block_hashe2": [8]})
    (removed,) = decode(event.replace(b"block_hashe2", b"block_hashes")).listed()
    assert removed[1].tolist() == [8]
