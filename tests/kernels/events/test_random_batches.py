"""Tests of batches that no engine would send: the native decoder and its Python version read, skip
and refuse them alike.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.events import decode_batch
from kvkernels import EventBatch
from tests.effort import examples
from tests.kernels.event_vectors import plain, vectors
from tests.oracles import worker_blocks as event_twins

PAYLOADS = [vector.payload for vector in vectors().values()]

settings.register_profile("events", max_examples=examples(200), deadline=None)
MANY = settings.get_profile("events")


def outcome(decode: type[EventBatch], payload: bytes) -> Any:
    """Return everything that a decoded batch shows, or the message with which it is refused."""
    try:
        batch = decode(payload)
    except ValueError as error:
        return str(error)
    seen = (batch.rank, batch.skipped, batch.skips(), batch.blocks, len(batch), repr(batch.ts_s))
    return (*seen, list(batch.unknown_media().items()), plain(batch.listed()))


def same(payload: bytes) -> Any:
    native = outcome(EventBatch, payload)
    assert native == outcome(event_twins.EventBatch, payload)
    return native


@MANY
@given(st.binary(max_size=120))
def test_random_bytes_are_decoded_equally(payload: bytes) -> None:
    same(payload)


@MANY
@given(st.sampled_from(PAYLOADS), st.data())
def test_batches_with_changed_bytes_are_decoded_equally(
    payload: bytes, data: st.DataObject
) -> None:
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    same(bytes(changed))


@MANY
@given(st.sampled_from(PAYLOADS), st.data())
def test_batches_with_removed_and_added_bytes_are_decoded_equally(
    payload: bytes, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(payload)))
    end = data.draw(st.integers(start, min(len(payload), start + 8)))
    new = data.draw(st.binary(max_size=6))
    same(payload[:start] + new + payload[end:])


def test_every_truncated_batch_is_refused_equally() -> None:
    for payload in PAYLOADS:
        for size in range(len(payload)):
            assert isinstance(same(payload[:size]), str)


_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-2, 3)
    | st.floats()
    | st.binary(max_size=70)
    | st.sampled_from(["GPU", "CPU", "DISK", "fr", "mla_attention", "€", ""])
)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=2)
    ),
    max_leaves=10,
)
_hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=64)
_keys = st.lists(
    st.sampled_from(["fr", "salt", b"\1\2", ["img", 3], ["img"], ["img", None], [b"x", -1], 7]),
    max_size=4,
)
_images = st.lists(
    st.sampled_from(
        [
            {"type": "mm_key", "hash": "ab12", "start_offset": 3},
            {"hash": b"\1", "start_offset": -1, "uuid": None},
            {"hash": "cd"},
            {"start_offset": 1},
            {"hash": "ef", "start_offset": 2**31},
            {"hash": 5, 7: [1]},
            "ab",
        ]
    ),
    max_size=3,
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "block_hashes": st.lists(_hashes, max_size=3),
    "parent_block_hash": st.none() | _hashes,
    "token_ids": st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 2**63), max_size=6),
    "block_size": st.integers(0, 3),
    "lora_id": st.none() | st.integers(-3, 2**64 - 1),
    "medium": st.sampled_from([None, "GPU", "CPU", "CPU_PINNED", "STORAGE", "cpu", "gPu"])
    | st.sampled_from(["MOON", "", "x" * 47 + "€", *(f"tier{i}" for i in range(9))]),
    "lora_name": st.sampled_from([None, "fr", ""]),
    "extra_keys": st.none() | st.lists(st.none() | _keys, max_size=3),
    "group_idx": st.none() | st.integers(0, 70000),
    "kv_cache_spec_kind": st.sampled_from([None, "full_attention", "mamba"]),
    "locality": st.sampled_from([None, None, "LOCAL", "local", "REMOTE", "RACK", ""]),
    "cache_salt": st.none() | st.text(max_size=3),
    "mm_keys": st.none() | st.lists(st.none() | _images, max_size=3),
    "unknown": _values,
}
_tags = st.sampled_from(["BlockStored"] * 3 + ["BlockRemoved", "AllBlocksCleared", "Other"])


@st.composite
def events(draw: st.DrawFn) -> Any:
    """Draw an event that is mostly valid; one field in six may have any value."""
    tag = draw(_tags)
    fields = {
        name: draw(_values if draw(st.integers(0, 5)) == 5 else likely)
        for name, likely in LIKELY.items()
        if name == "block_hashes" or draw(st.booleans())
    }
    if draw(st.booleans()) and isinstance(hashes := fields["block_hashes"], list):
        size = fields.setdefault("block_size", 2)
        fields["token_ids"] = [5] * (len(hashes) * (size if isinstance(size, int) else 1) % 99)
    if draw(st.booleans()):
        return {"type": tag, **fields}
    order = list(LIKELY)[:10]
    if tag == "BlockRemoved":
        order = ["block_hashes", "medium", "group_idx"]
    return [tag, *(fields.get(name) for name in order), *draw(st.lists(_values, max_size=1))]


@MANY
@given(st.lists(events(), max_size=4), st.none() | st.integers(-1, 70000))
def test_mostly_valid_events_are_decoded_equally(batch: list[Any], rank: int | None) -> None:
    same(msgspec.msgpack.encode([1.5, batch, rank]))


@pytest.mark.parametrize("name", sorted(set(vectors()) - {"future"}))
def test_our_engines_decoder_gives_blocks_the_same_names(name: str) -> None:
    """The decoder of our engine gives blocks the same names, except masked blocks, because our
    engine's events never leave a block out.
    """
    payload = vectors()[name].payload
    read = [getattr(event, "hashes", ()) for event in decode_batch(payload).events]
    listed = [e for e in EventBatch(payload).listed() if e[0] != "stored" or not e[-1]]
    assert read == [tuple(e[1].tolist()) if len(e) > 1 else () for e in listed]
