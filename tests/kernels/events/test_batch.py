"""Tests of decoding batches of KV events, by the native code and by its Python version."""

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
def test_events_recorded_from_engines_are_decoded(decode: type[EventBatch], name: str) -> None:
    vector = VECTORS[name]
    batch = decode(vector.payload)
    assert plain(batch.listed()) == vector.listed
    assert batch.skipped == vector.skipped
    assert len(batch) == len(vector.listed)
    assert batch.blocks == sum(len(e[1]) for e in vector.listed if e[0] == "stored")


def test_time_and_rank_of_a_batch_are_decoded(decode: type[EventBatch]) -> None:
    batch = decode(VECTORS["vllm_0_29_hybrid"].payload)
    assert (batch.ts_s, batch.rank) == (2.0, 1)
    batch = decode(msgspec.msgpack.encode([1, []]))
    assert (batch.ts_s, batch.rank, len(batch)) == (1.0, 0, 0)
    assert decode(bytes.fromhex("92ca3fc0000090")).ts_s == 1.5  # a float of 4 bytes


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_any_buffer_is_accepted(decode: type[EventBatch], kind: Any) -> None:
    assert len(decode(kind(pack(stored())))) == 1


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "it ends within a value"),
        (b"\xc1", "byte 0xc1 begins no msgpack value"),
        (VECTORS["vllm_0_24_map"].payload[:-1], "it ends within a value"),
        (VECTORS["vllm_0_24_map"].payload + b"\0", "more bytes follow it"),
        (b"\x91" * 100_000, r"must be an array \[time, events, rank\]"),
        (b"\x93\x01" + b"\x91" * 100_000, "it ends within a value"),
        (b"\x93\x01\xdd\x00\x00\xff\xff", "it ends within a value"),
        (b"\x92\xa1x\x90", "the time must be a number"),
        (b"\x92\x01\x80", "the events must be an array of at most 65536"),
        (b"\x93\x01\x90\xff", "the rank must be 0..65535 or nil"),
        (pack(stored()).replace(b"\x01\x02", b"\xa1\xff"), "ends within|more bytes|must be"),
    ],
)
def test_the_error_names_the_place_of_a_malformed_field(
    decode: type[EventBatch], payload: bytes, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"event batch: .*({reason})"):
        decode(payload)


def test_a_payload_that_is_too_large_is_refused(decode: type[EventBatch]) -> None:
    with pytest.raises(ValueError, match="event batch: 33554433 bytes, at most 33554432"):
        decode(bytes((32 << 20) + 1))
    with pytest.raises(TypeError, match="payload must be a buffer of bytes, got str"):
        decode("text")  # type: ignore[arg-type]


UNUSABLE: list[tuple[Any, str]] = [
    (5, "unknown_type"),
    ([], "unknown_type"),
    ("BlockStored", "unknown_type"),
    ([[[[]]], {"BlockStored": 1}], "unknown_type"),
    ({"type": 1}, "unknown_type"),
    ({"block_hashes": [7]}, "unknown_type"),
    ({"type": "BlockMoved", "block_hashes": [7]}, "unknown_type"),
    ({"event_type": "stored", "block_hashes": [7]}, "unknown_type"),
    (["BlockRemoved"], "bad_hashes"),
    (["BlockStored", {"type": "BlockStored"}], "bad_hashes"),
    (stored(block_hashes=None), "bad_hashes"),
    (stored(block_hashes=[[7]]), "bad_hashes"),
    (stored(block_hashes=["x"]), "bad_hashes"),
    (stored(block_hashes=[b"x" * 65]), "bad_hashes"),
    (stored(parent_block_hash=b""), "bad_hashes"),
    (stored(token_ids=5), "bad_tokens"),
    (stored(token_ids=[1, -1]), "bad_tokens"),
    (stored(token_ids=[1, 2**63]), "bad_tokens"),
    (stored(token_ids=[1, 2.0]), "bad_tokens"),
    (stored(token_ids=[1, None]), "bad_tokens"),
    (stored(token_ids=[1, "2"]), "bad_tokens"),
    (stored(token_ids=[[1, 2], [2, 3]]), "bad_tokens"),
    (stored(token_ids=[1, 2, 3]), "token_count"),
    (stored(block_hashes=[7, 8]), "token_count"),
    (stored(block_hashes=[]), "token_count"),
    (stored(block_size=None), "token_count"),
    (stored(block_size=0), "bad_block_size"),
    (stored(block_size=65_537), "bad_block_size"),
    (stored(block_size=-2), "bad_block_size"),
    (stored(block_size="2"), "bad_block_size"),
    (stored(block_size=-2, token_ids=[]), "bad_block_size"),
    (stored(medium=1), "unknown_medium"),
    (stored(medium="MOON"), "unknown_medium"),
    (["BlockRemoved", [7], "TAPE"], "unknown_medium"),
    (stored(medium="cpu"), "never_removed"),
    (["BlockStored", [7], 5, [1, 2], 2, None, "cpu", None], "never_removed"),
    (stored(locality="REMOTE"), "unknown_medium"),
    (stored(locality="RACK", medium="gpu"), "unknown_medium"),
    (stored(locality=3, medium="CPU"), "bad_field"),
    ({"type": "BlockRemoved", "block_hashes": [7], "locality": "remote"}, "unknown_medium"),
    (stored(lora_id="a"), "bad_field"),
    (stored(lora_name=["a"]), "bad_field"),
    (stored(group_idx=-1), "bad_field"),
    (["BlockRemoved", [7], None, {}], "bad_field"),
    (stored(extra_keys=1), "bad_extra_keys"),
    (stored(extra_keys=[[{"image": 1}]]), "bad_extra_keys"),
    (stored(extra_keys=[[["img", None]]]), "bad_extra_keys"),
    (stored(mm_keys="x"), "bad_extra_keys"),
    (stored(mm_keys=[[{"start_offset": 1}]]), "bad_extra_keys"),
    (stored(mm_keys=[[{"hash": "x" * (1 << 22)}]]), "over_limit"),
    (["BlockRemoved", [1] * (1 << 20)], "over_limit"),
]


@pytest.mark.parametrize(("event", "why"), UNUSABLE)
def test_an_unusable_event_is_skipped_without_losing_other_events(
    decode: type[EventBatch], event: Any, why: str
) -> None:
    around = pack(stored(lora_name="a"), stored(extra_keys=[["s"]]))
    batch = decode(pack(stored(lora_name="a"), event, stored(extra_keys=[["s"]])))
    assert batch.skips() == {why: 1}
    assert plain(batch.listed()) == plain(decode(around).listed())
    assert (batch.skipped, batch.blocks) == (1, 2)


@pytest.mark.parametrize(
    "text", [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"]
)
@pytest.mark.parametrize(
    ("field", "why"), [("lora_name", "bad_field"), ("medium", "unknown_medium")]
)
def test_names_must_be_utf8(decode: type[EventBatch], field: str, why: str, text: bytes) -> None:
    good = pack(stored(), stored(**{field: "x" * len(text)}))
    batch = decode(good.replace(b"x" * len(text), text))
    assert (batch.skips(), len(batch)) == ({why: 1}, 1)


@pytest.mark.parametrize(
    ("media", "tier"),
    [
        (["GPU", "gpu", "Gpu", "device"], 0),
        (["CPU", "cpu", "CPU_PINNED", "cpu_pinned", "CPU_TIER1", "host", "HOST", "host_pinned"], 1),
        (["DISK", "disk", "STORAGE", "Storage", "EXTERNAL", "fs", "OBJ", "nvme", "CPU_TIER2"], 2),
    ],
)
def test_media_are_recognized_in_any_case(
    decode: type[EventBatch], media: list[str], tier: int
) -> None:
    listed = decode(pack(*(stored(medium=medium, group_idx=0) for medium in media))).listed()
    assert [event[5] for event in listed] == [tier] * len(media)
    listed = decode(pack(*(["BlockRemoved", [7], medium] for medium in media))).listed()
    assert [event[2] for event in listed] == [tier] * len(media)


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        ("GPU", "LOCAL", 0),
        (None, "local", 0),
        ("CPU", "LOCAL", 1),
        ("CPU", "REMOTE", 2),
        ("Cpu", "RACK", 2),
        ("STORAGE", "REMOTE", 2),
        ("STORAGE", "LOCAL", 2),
    ],
)
def test_remote_media_belong_to_the_lowest_tier(
    decode: type[EventBatch], medium: str | None, locality: str, tier: int
) -> None:
    where = {"medium": medium, "locality": locality}
    removed = {"type": "BlockRemoved", "block_hashes": [7], **where}
    listed = decode(pack(stored(**where), removed)).listed()
    assert (listed[0][5], listed[1][2]) == (tier, tier)


def test_unknown_media_are_listed(decode: type[EventBatch]) -> None:
    removed = ["BlockRemoved", [7], "TAPE"]
    batch = decode(pack(stored(medium="TAPE"), stored(locality="REMOTE"), removed, stored()))
    assert (batch.unknown_media(), len(batch)) == ({"TAPE": 2, "GPU REMOTE": 1}, 1)
    assert batch.skips() == {"unknown_medium": 3}
    batch = decode(pack(stored(medium=7), stored(medium="é" * 40), stored(medium="CPU")))
    assert batch.unknown_media() == {"é" * 24: 1}  # a medium that is no text is left out
    batch = decode(pack(stored(medium="x" + "€" * 40)))
    assert list(batch.unknown_media()) == ["x" + "€" * 15]


def test_at_most_eight_unknown_media_are_listed(decode: type[EventBatch]) -> None:
    media = [f"tier{i % 12}" for i in range(24)]
    batch = decode(pack(*(stored(medium=medium) for medium in media)))
    assert batch.unknown_media() == {**dict.fromkeys(media[:8], 2), "": 8}


def test_ids_beyond_int32(decode: type[EventBatch]) -> None:
    """Token ids beyond int32 are decoded, such as SGLang's stand-ins for images, which go up to
    2^62 plus a million.
    """
    wide = [1, 2**62 + 10**6]
    narrow, widest = stored(), stored(token_ids=[2**63 - 1, 0])
    batch = decode(pack(narrow, stored(token_ids=wide), widest, stored(token_ids=[3, 2**31 - 1])))
    assert [event[3].tolist() for event in batch.listed()] == [
        [1, 2],
        wide,
        [2**63 - 1, 0],
        [3, 2**31 - 1],
    ]
    assert [event[3].dtype.itemsize for event in batch.listed()] == [4, 8, 8, 4]
    assert batch.skips() == {}


def test_blocks_without_tokens_may_have_size_0(decode: type[EventBatch]) -> None:
    """A block size of 0 is accepted for blocks that have only a name, as vLLM's OffloadingConnector
    sends by default.
    """
    (event,) = decode(pack(stored(token_ids=[], block_size=0, medium="CPU"))).listed()
    assert event[3].tolist() == []
    assert (event[4], event[5]) == (0, 1)


def test_an_unnamed_adapter_is_not_treated_as_the_base_model(decode: type[EventBatch]) -> None:
    (event,) = decode(pack(stored(lora_id=3))).listed()
    assert event[6] == "lora_id:3"
    (event,) = decode(pack(stored(lora_id=0))).listed()
    assert event[6] is None


@pytest.mark.parametrize("field", ["parent_block_hash", "token_ids", "block_size", "rank"])
def test_nil_means_absent(decode: type[EventBatch], field: str) -> None:
    without = {k: v for k, v in stored(block_size=1, token_ids=[1]).items() if k != field}
    (got,) = decode(pack({**without, field: None}, rank=None)).listed()
    assert plain([got]) == plain(decode(pack(without, rank=0)).listed())


def test_the_last_value_of_a_repeated_key_counts(decode: type[EventBatch]) -> None:
    event = pack({"type": "BlockRemoved", "block_hashes": [7], "block_hashe2": [8]})
    (removed,) = decode(event.replace(b"block_hashe2", b"block_hashes")).listed()
    assert removed[1].tolist() == [8]
