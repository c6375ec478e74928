"""Tests of TensorRT-LLM's ZMQ push (2026-08): vLLM's frames, maps, images, ranks by port or ipc
name.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import zmq

from router.events.sources import ZmqSource, at_rank
from tests.router.events.feed_wire import DEADLINE_S, chain_of, followed_publisher, pack, rig, until

SIZE = 4
TOKENS = list(range(10, 22))
CHAIN = chain_of(TOKENS, SIZE)


def stored(name: int, parent: int | None, tokens: list[Any], **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "locality": None,
    } | fields


async def test_blocks_of_the_largest_window_are_followed() -> None:
    async with followed_publisher(block_size=SIZE) as (one, engine, _):
        first, second = 6052439777046529588, 2**64 - 3
        await engine.send(0, pack(stored(first, None, TOKENS[:4])))
        await engine.send(1, pack(stored(second, first, TOKENS[4:8], kv_cache_spec_kind=None)))
        await one.until_hit(CHAIN, 2)
        removed = {"type": "BlockRemoved", "block_hashes": [second], "medium": "GPU"}
        await engine.send(2, pack(removed))
        await one.until_hit(CHAIN, 1)
        await engine.send(3, pack({"type": "AllBlocksCleared"}))
        await one.until_hit(CHAIN, 0)


async def test_an_image_is_not_taken_for_plain_text() -> None:
    """A prompt with an image is not taken for plain text, although its placeholders are plain ids:
    `mm_keys` reveals the image.
    """
    image = {"type": "mm_key", "hash": "ab" * 32, "start_offset": 2, "uuid": None}
    with_image = stored(1, None, TOKENS[:4], mm_keys=[[image]])
    extra = b"ab" * 32 + struct.pack("<i", 2)
    chain = chain_of(TOKENS[:8], SIZE, extra=extra)
    async with followed_publisher(block_size=SIZE) as (one, engine, feed):
        await engine.send(0, pack(with_image, stored(2, 1, TOKENS[4:8], mm_keys=[[]])))
        await one.until_hit(chain, 2)
        assert one.hit(CHAIN) == 0
        odd = stored(3, None, TOKENS[:4], mm_keys=[[{"start_offset": 2}]])
        await engine.send(1, pack(odd, stored(4, None, [1, 2, 3, 4], mm_keys=None)))
        await one.until_hit(chain_of([1, 2, 3, 4], SIZE), 1)
        assert one.hit(CHAIN) == 0
        assert feed.counters.skipped_events + one.kv().counters.skipped_events == 1


async def test_string_tokens_are_skipped_and_the_stream_continues() -> None:
    """Events with strings as tokens, which are placeholders of images, are skipped, and the stream
    continues.
    """
    image = {"type": "mm_key", "hash": "ab" * 32, "start_offset": 0, "uuid": None}
    odd = stored(2, 1, ["ab" * 32, 5, 6, 7], mm_keys=[[image]])
    async with followed_publisher(block_size=SIZE) as (one, engine, feed):
        await engine.send(0, pack(stored(1, None, TOKENS[:4]), odd, stored(3, 1, TOKENS[4:8])))
        await one.until_hit(CHAIN, 2)
        assert feed.counters.malformed_frames == 0
        assert feed.counters.skipped_events + one.kv().counters.skipped_events == 1


async def test_each_rank_has_its_own_ipc_name(tmp_path: Path) -> None:
    first = ZmqSource(f"ipc://{tmp_path}/kv", topic="kv")
    async with rig() as one:
        pubs = [one.context.socket(zmq.XPUB) for _ in range(2)]
        pubs[0].bind(f"ipc://{tmp_path}/kv")
        pubs[1].bind(f"ipc://{tmp_path}/kv_dp1")
        ranks = [at_rank(first, rank) for rank in range(2)]
        async with (
            one.following(ranks[0], 0, block_size=SIZE),
            one.following(ranks[1], 1, block_size=SIZE),
        ):
            for rank, pub in enumerate(pubs):
                assert await pub.poll(DEADLINE_S * 1000)
                assert await pub.recv() == b"\x01kv"
                tokens = TOKENS[rank * 4 : rank * 4 + 4]
                payload = pack(stored(5, None, tokens), rank=rank)
                await pub.send_multipart([b"kv", struct.pack(">Q", 0), payload])
            for rank in range(2):
                chain = chain_of(TOKENS[rank * 4 : rank * 4 + 4], SIZE)
                await one.until_hit(chain, 1, worker_id=rank)
                assert one.hit(chain, worker_id=1 - rank) == 0
        for pub in pubs:
            pub.close(linger=0)


async def test_a_batch_dropped_by_a_full_queue_is_a_gap() -> None:
    """A batch that TensorRT-LLM's full queue dropped is a gap: batches are numbered before the
    queue, so it is missing in a replay, too.
    """
    async with followed_publisher(block_size=SIZE) as (one, engine, _):
        await engine.send(0, pack(stored(1, None, TOKENS[:4])))
        await one.until_hit(CHAIN, 1)
        await engine.send(2, pack(stored(9, None, [1, 1, 1, 1])))
        await one.until_hit(chain_of([1, 1, 1, 1], SIZE), 1)
        await until(lambda: not one.kv().resyncing, lambda: "the gap to be given up")
        assert len(engine.asked) >= 2
        assert one.hit(CHAIN) == 0  # nobody knows whether it is there still
        assert not one.kv().known
