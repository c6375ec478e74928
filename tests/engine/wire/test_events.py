"""Tests of KV event batches: published test vectors, every accepted form, and garbage."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    Live,
    WireError,
    decode_batch,
    decode_snapshot,
    encode_batch,
    encode_snapshot,
    live_frames,
    name_of,
    parse_live,
    parse_replay,
    parse_replay_request,
    replay_end,
    replay_frames,
    replay_request,
)

# Block size 2, two blocks at the root, the first removed, then a clear; ts 1.5, rank 0.
ARRAY_FORM = bytes.fromhex(
    "93cb3ff8000000000000939aab426c6f636b53746f726564920b0cc0940102030402c0a3475055c0c00094ac42"
    "6c6f636b52656d6f766564910ba34750550091b0416c6c426c6f636b73436c656172656400"
)
MAP_FORM = bytes.fromhex(
    "93cb3ff80000000000009389a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0c"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a65"
    "02a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f6964780084a4"
    "74797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573910ba66d656469756da3475055a967"
    "726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)
VECTOR_EVENTS: tuple[Event, ...] = (
    BlockStored((11, 12), None, (1, 2, 3, 4), 2, medium="GPU", group_idx=0),
    BlockRemoved((11,), "GPU", 0),
    AllBlocksCleared(),
)


def pack(*events: Any, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def stored(**fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [7], "token_ids": [1, 2], "block_size": 2}
    return event | fields


@pytest.mark.parametrize("payload", [ARRAY_FORM, MAP_FORM])
def test_array_and_map_form_are_decoded_equally(payload: bytes) -> None:
    assert decode_batch(payload) == Batch(1.5, VECTOR_EVENTS, rank=0, skipped=0)


def test_our_encoding_is_the_map_form_byte_for_byte() -> None:
    assert encode_batch(1.5, VECTOR_EVENTS, 0) == MAP_FORM


def test_forms_may_be_mixed_within_one_batch() -> None:
    batch = decode_batch(pack(["BlockRemoved", [5]], {"type": "BlockRemoved", "block_hashes": [6]}))
    assert batch.events == (BlockRemoved((5,)), BlockRemoved((6,)))


@pytest.mark.parametrize("fields", range(2, 14))
def test_arrays_may_lack_fields_or_have_more(fields: int) -> None:
    whole = ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, None, 0, None, None, 1, 2]
    batch = decode_batch(pack(whole[:fields]))
    if fields == 4:  # tokens without a block size: two tokens cannot be one block of size 1
        assert batch.skipped == 1
    else:
        assert batch.events[0].hashes == (7,)  # type: ignore[union-attr]


def test_an_envelope_may_have_two_or_more_elements() -> None:
    assert decode_batch(msgspec.msgpack.encode([1, []])).rank == 0
    assert decode_batch(msgspec.msgpack.encode([1, [], None])).rank == 0
    assert decode_batch(msgspec.msgpack.encode([1, [], 3, "new"])).rank == 3


def test_hashes_become_unsigned_ints() -> None:
    digest = bytes(range(32))
    (event,) = decode_batch(
        pack(stored(block_hashes=[-1, digest], parent_block_hash=-2, token_ids=[1, 2, 3, 4]))
    ).events
    assert isinstance(event, BlockStored)
    assert event.hashes == (2**64 - 1, 0x18191A1B1C1D1E1F)
    assert event.parent == 2**64 - 2


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockMoved", "block_hashes": [1]},
        ["BlockMoved", 1],
        stored(token_ids=[[1, 2], [2, 3]]),
        stored(token_ids=["<image>", 2]),
        ["BlockStored", [7], None, [[1, 2], [2, 3]], 2],
        stored(token_ids=[1, 2, 3]),
    ],
)
def test_unusable_events_are_skipped_and_counted(event: Any) -> None:
    batch = decode_batch(pack(event, {"type": "AllBlocksCleared"}))
    assert batch.events == (AllBlocksCleared(),)
    assert batch.skipped == 1


def test_offload_events_have_no_tokens() -> None:
    (event,) = decode_batch(pack(stored(token_ids=[], medium="CPU"))).events
    assert isinstance(event, BlockStored)
    assert event.tokens == ()


@pytest.mark.parametrize(
    ("payload", "where"),
    [
        (b"", "event batch"),
        (b"\xc1", "event batch"),
        (MAP_FORM[:-1], "event batch"),
        (b"\x91" * 100_000, "event batch"),
        (pack(stored(block_hashes=["x"])), "event 0"),
        (pack({"type": "AllBlocksCleared"}, stored(block_hashes=None)), "event 1"),
        (pack(stored(block_size=0)), "event 0"),
        (pack(stored(token_ids=[1, 2**31])), "event 0"),
        (pack(stored(token_ids=[1, -1])), "event 0"),
        (pack(stored(block_hashes=[b"x" * 65])), "event 0"),
        (pack(5), "event 0"),
        (pack([]), "event 0"),
        (pack(["BlockRemoved"]), "event 0"),
    ],
)
def test_the_error_names_the_place_of_garbage(payload: bytes, where: str) -> None:
    with pytest.raises(WireError, match=where):
        decode_batch(payload)


def test_the_salt_is_distinguished_from_adapter_and_images() -> None:
    salted = BlockStored((1,), tokens=(1,), extra_keys=[["lora-a", "tenant"]], lora_name="lora-a")
    assert salted.salt == "tenant"
    assert BlockStored((1,), tokens=(1,), cache_salt="s").salt == "s"
    assert BlockStored((1,), parent=4, tokens=(1,), extra_keys=[["x"]]).salt is None
    image = BlockStored((1,), tokens=(1,), extra_keys=[[["digest", 0]]])
    assert image.salt is None


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_wire_errors(payload: bytes) -> None:
    with contextlib.suppress(WireError):
        decode_batch(payload)


_values = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=4) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
_keys = st.sampled_from(
    ["type", "block_hashes", "token_ids", "parent_block_hash", "block_size", "extra_keys"]
)
_tags = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "New"])


@given(st.lists(st.tuples(_tags, st.dictionaries(_keys, _values)), max_size=3))
def test_random_events_are_read_skipped_or_refused(events: list[tuple[str, Any]]) -> None:
    maps = [fields | {"type": tag} for tag, fields in events]
    with contextlib.suppress(WireError):
        batch = decode_batch(pack(*maps))
        assert len(batch.events) + batch.skipped == len(events)


@given(st.integers(0, len(MAP_FORM) - 1), st.integers(0, 255))
def test_one_wrong_byte_raises_only_wire_errors(position: int, value: int) -> None:
    changed = bytearray(MAP_FORM)
    changed[position] = value
    with contextlib.suppress(WireError):
        decode_batch(bytes(changed))


_hashes = st.integers(0, 2**64 - 1) | st.binary(min_size=1, max_size=32)


@given(st.lists(_hashes, min_size=1, max_size=5), st.none() | _hashes, st.none() | st.text())
def test_written_events_are_read_back(hashes: list[Any], parent: Any, medium: str | None) -> None:
    tokens = tuple(range(3 * len(hashes)))
    event = BlockStored(tuple(hashes), parent, tokens, 3, medium=medium)
    named = tuple(name_of(name) for name in hashes)
    read = BlockStored(named, None if parent is None else name_of(parent), tokens, 3, medium=medium)
    assert decode_batch(encode_batch(2.0, [event], 4)) == Batch(2.0, (read,), rank=4)


def test_live_and_replay_frames_are_parsed() -> None:
    assert parse_live(live_frames("kv", 3, b"x")) == Live("kv", 3, b"x")
    assert parse_replay_request([b"me", *replay_request(9)]) == (b"me", 9)
    new = replay_frames(b"me", "kv", 4, b"y")[1:]
    assert parse_replay(new) == Live("kv", 4, b"y")
    old = [new[0], *new[2:]]
    assert parse_replay(old) == Live("", 4, b"y")
    assert parse_replay(replay_end(b"me")[1:]) is None
    assert parse_replay([b"", b"\xff" * 8, b""]) is None


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"", b"1234567", b""], [b"\xff\xfe", b"12345678", b""], [b"x"] * 5]
)
def test_broken_frames_are_rejected(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        parse_live(frames)
    with pytest.raises(WireError):
        parse_replay(frames)
    with pytest.raises(WireError):
        parse_replay_request([*frames, b"x"])


def test_a_snapshot_survives_encoding_and_decoding() -> None:
    event = BlockStored((1, 2), None, (1, 2, 3, 4), 2, medium="GPU")
    snapshot = decode_snapshot(encode_snapshot(41, 1.0, [event]))
    assert snapshot.seq == 41
    assert [batch.events for batch in snapshot.batches] == [(event,)]
    assert decode_snapshot(encode_snapshot(-1, 1.0, [])).batches == ()


@pytest.mark.parametrize(
    "body", [b"", b"\x80", msgspec.msgpack.encode({"version": 2, "seq": 0, "batches": []})]
)
def test_broken_snapshots_are_rejected(body: bytes) -> None:
    with pytest.raises(WireError, match="snapshot"):
        decode_snapshot(body)
