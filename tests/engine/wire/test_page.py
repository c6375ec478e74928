"""Tests that docs/reference/wire.md agrees with the code in every value, name and bound on the
page.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import xxhash

from engine.server import events as event_log
from engine.wire import events, kv_transfer, metrics
from engine.wire import events as snapshot
from engine.wire.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    decode_snapshot,
    encode_batch,
    encode_snapshot,
    replay_end,
    replay_frames,
    replay_request,
)
from kvkernels import chain_hashes, chain_seed, media_chain_hashes
from router.engines import adapter as cards
from router.engines import adapter as interview
from router.events import trtllm
from tests.oracles import event_batch as batch_twin
from tests.oracles import event_batch as fields

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")
TOKENS = np.arange(1, 10, dtype=np.int32)
BLOCK = 4
BASE, SALTED = 0, chain_seed("tiny", None, "blue")


@pytest.mark.parametrize(("title", "seed"), [("base model", BASE), ("salt `blue`", SALTED)])
def test_the_chain_hashes_in_the_docs_are_right(title: str, seed: int) -> None:
    (row,) = re.findall(rf"^\|[^|]*{re.escape(title)} \|(.*)\|$", PAGE, re.MULTILINE)
    hashes = chain_hashes(TOKENS, BLOCK, seed).tolist()
    assert re.findall(r"`([0-9a-f]{16})`", row) == [f"{h:016x}" for h in (seed, *hashes)]
    # Computed by the page's rule, with another implementation of the hash.
    previous = seed
    for block, expected in enumerate(hashes):
        tokens = TOKENS[block * BLOCK : (block + 1) * BLOCK].tolist()
        previous = xxhash.xxh3_64_intdigest(struct.pack("<Q4i", previous, *tokens))
        assert previous == expected


def test_the_chain_hashes_with_an_image_in_the_docs_are_right() -> None:
    (row,) = re.findall(r"^\|[^|]*image `cat` \|(.*)\|$", PAGE, re.MULTILINE)
    hashes = media_chain_hashes(TOKENS, BLOCK, BASE, [("cat", 2, 4)]).tolist()
    assert re.findall(r"`([0-9a-f]{16})`", row) == [f"{h:016x}" for h in (BASE, *hashes)]
    previous = BASE
    for block, offset in enumerate((2, -2)):
        tokens = TOKENS[block * BLOCK : (block + 1) * BLOCK].tolist()
        data = struct.pack("<Q4i", previous, *tokens) + b"cat" + struct.pack("<i", offset)
        previous = xxhash.xxh3_64_intdigest(data)
        assert previous == hashes[block]


def test_the_hashed_bytes_in_the_docs_are_right() -> None:
    assert f"`{struct.pack('<Q4i', 0, 1, 2, 3, 4).hex()}`" in PAGE
    named = msgspec.msgpack.encode(["tiny", None, "blue"])
    assert f"`{named.hex()}`" in PAGE
    assert xxhash.xxh3_64_intdigest(named) == SALTED


def test_the_event_batch_in_the_docs_is_right() -> None:
    shown = bytes.fromhex("".join(re.findall(r"^    ([0-9a-f]+)$", PAGE, re.MULTILINE)))
    name = chain_hashes(TOKENS, BLOCK, BASE).tolist()[0]
    stored = BlockStored(hashes=(name,), tokens=(1, 2, 3, 4), block_size=BLOCK, medium="GPU")
    assert encode_batch(1.5, [stored]) == shown
    assert decode_batch(shown).events == (stored,)


def test_the_event_keys_in_the_docs_are_right() -> None:
    salted = BlockStored(hashes=(1,), tokens=(1,), medium="GPU", extra_keys=[["blue"]])
    for event in (salted, BlockRemoved(hashes=(1,), medium="GPU"), AllBlocksCleared()):
        row = re.search(rf"^\| `{type(event).__name__}` \|(.*)\|$", PAGE, re.MULTILINE)
        assert row is not None
        assert re.findall(r"`(\w+)`", row[1]) == list(events.event_map(event))[1:]


def test_the_replay_frames_in_the_docs_are_right() -> None:
    assert replay_request(7) == [b"", (7).to_bytes(8, "big")]
    assert len(replay_frames(b"me", "", 7, b"payload")[1:]) == 4
    assert replay_end(b"me")[-2:] == [b"\xff" * 8, b""]
    assert "eight bytes `ff`" in PAGE
    assert f"{event_log.BUFFER_BATCHES:,} batches" in PAGE
    assert f"{event_log.BUFFER_BYTES >> 20} MiB" in PAGE


def test_the_snapshot_fields_in_the_docs_are_right() -> None:
    body = encode_snapshot(-1, 1.5, [BlockStored(hashes=(1,), tokens=(1,))])
    fields = msgspec.msgpack.decode(body)
    sentence = PAGE.partition("**Snapshot**")[2].partition(".")[0]
    assert re.findall(r"`(version|seq|batches)`", sentence) == list(fields)
    assert (fields["version"], fields["seq"]) == (snapshot.VERSION, -1)
    assert decode_snapshot(body).seq == -1


def test_the_bounds_in_the_docs_are_right() -> None:
    for name, value in (
        ("payload of a batch", f"{events.MAX_PAYLOAD_BYTES >> 20} MiB"),
        ("events of a batch", f"{events.MAX_EVENTS:,}"),
        ("blocks, tokens of a batch", f"{fields.MAX_BLOCKS:,} and {fields.MAX_TOKENS:,}"),
        ("`extra_keys` of a batch", f"{fields.MAX_EXTRA_BYTES >> 20} MiB"),
        ("rank, cache group", f"{batch_twin.MAX_RANK:,}"),
        ("block size", f"{events.MAX_BLOCK_SIZE:,} tokens"),
        ("raw block hash", f"{events.MAX_HASH_BYTES} bytes"),
        (
            "answer to a poll",
            f"{events.MAX_PAYLOAD_BYTES >> 20} MiB and {trtllm.MAX_POLLED:,} events",
        ),
        ("snapshot", f"{snapshot.MAX_SNAPSHOT_BYTES >> 20} MiB"),
        ("metrics text", f"{interview.MAX_METRICS_BYTES >> 20} MiB"),
        ("any other answer of a worker", f"{interview.MAX_REPLY_BYTES >> 20} MiB"),
    ):
        assert f"| {name} | {value} |" in PAGE
    assert f"1 to {cards.MAX_MODELS:,} models" in PAGE


def test_the_load_metrics_in_the_docs_are_right() -> None:
    section = PAGE.partition("## Load")[2].partition("## ")[0]
    needed = {metrics.RUNNING, metrics.WAITING}
    others = {metrics.KV_USAGE, metrics.KV_USAGE_OLD, metrics.CACHE_CONFIG, metrics.SLEEP_STATE}
    assert set(re.findall(r"`(vllm:\w+)`", section)) == needed | others
    yes = {row for row in section.splitlines() if row.endswith("| yes |")}
    assert {re.findall(r"`(vllm:\w+)`", row)[0] for row in yes} == needed
    load = metrics.parse_load(f"{metrics.RUNNING} 1\n{metrics.WAITING} 2\n")
    assert (load.running, load.waiting, load.block_size) == (1, 2, None)


def test_unknown_events_are_skipped_and_malformed_batches_refused() -> None:
    envelope = msgspec.msgpack.encode
    odd = {"type": "BlockStored", "block_hashes": [1], "token_ids": [[1, 2]], "block_size": 1}
    short = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": [1], "block_size": 1}
    batch = decode_batch(envelope([1.5, [{"type": "Novel"}, ["Novel", 1], odd, short], 0]))
    assert (batch.events, batch.skipped) == ((), 4)
    signed = decode_batch(envelope([1.5, [["BlockRemoved", [-1, b"raw"]]], 0]))
    assert signed.events == (BlockRemoved(hashes=(2**64 - 1, 0x726177)),)


def test_the_kv_transfer_messages_in_the_docs_are_right() -> None:
    section = PAGE.partition("## KV between our engines")[2].partition("## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", section, re.MULTILINE))
    messages = {one.__struct_config__.tag: one for one in get_args(kv_transfer.Message)}
    assert rows.keys() == messages.keys()
    for name in ("hello", "read", "done"):
        told = set(re.findall(r"`(\w+)`", rows[name]))
        assert told - {"pools"} == set(messages[name].__struct_fields__)
    form = section.rpartition("`form` is")[2]
    assert set(re.findall(r"`(\w+)`", form)) == set(kv_transfer.Form.__struct_fields__)
    assert kv_transfer.MAX_FRAME_BYTES == 16 << 20
    needed = set(re.findall(r"`(remote_\w+)`", section))
    whole = kv_transfer.TransferParams(transfer_mode=kv_transfer.MODE, **dict.fromkeys(needed, "1"))
    assert whole.lacks is None
    for name in needed:
        assert msgspec.structs.replace(whole, **{name: None}).lacks == "incomplete"
