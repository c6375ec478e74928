"""Tests of media in prompts: they are read from a render server's answer and hashed as in KV events
of the same prompt.
"""

from typing import Any

import msgspec
import numpy as np
import pytest

from kvkernels import EventBatch, PrefixIndex, WorkerBlocks, chain_hashes, chain_seed
from router.engines.media import Features, Medium, media_of
from router.tokens.media import NO_MEDIA, MessageMedia, media_chains, media_in, without_media

SIZE = 4
IDS = np.array([1, 9, 9, 9, 9, 9, 9, 2, 3, 9, 9, 4], np.int32)
ANSWER = {
    "mm_hashes": {"image": ["late", "early"], "audio": ["between"]},
    "mm_placeholders": {
        "image": [{"offset": 9, "length": 2}, {"offset": 1, "length": 5}],
        "audio": [{"offset": 6, "length": 1}],
    },
    "kwargs_data": None,
}
MEDIA = [Medium("early", 1, 5), Medium("between", 6, 1), Medium("late", 9, 2)]
KEYS = [[["early", 1]], [["early", -3], ["between", 2]], [["late", 1]]]


def features_of(**changed: Any) -> Features:
    return msgspec.convert({**ANSWER, **changed}, Features)


def hits(keys: list[Any] | None, salt: str | None, adapter: str | None, chain: Any) -> int:
    """Return how many blocks of `chain` a worker holds whose KV event had these extra keys."""
    if salt and keys:
        keys = [[*keys[0], salt], *keys[1:]]
    event = {
        "type": "BlockStored", "block_hashes": [11, 12, 13], "parent_block_hash": None,
        "token_ids": IDS.tolist(), "block_size": SIZE, "medium": "GPU", "lora_name": adapter,
        "extra_keys": keys,
    }  # fmt: skip
    index = PrefixIndex(1)
    batch = EventBatch(msgspec.msgpack.encode([0.0, [event], 0]))
    WorkerBlocks(index, 0, SIZE, "m").apply(batch)
    return int(index.longest_prefix(chain)[0])


def test_media_are_in_the_order_of_their_tokens() -> None:
    assert media_of(features_of(), len(IDS)) == MEDIA


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mm_hashes": {"image": ["a", "b"]}}, "modalities"),
        ({"mm_hashes": {"image": ["a"], "audio": ["b"]}}, "shorter|longer"),
        (
            {
                "mm_hashes": {"image": ["a"]},
                "mm_placeholders": {"image": [{"offset": 9, "length": 4}]},
            },
            "not in its prompt",
        ),
    ],
)
def test_an_inconsistent_render_answer_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        media_of(features_of(**changed), len(IDS))


@pytest.mark.parametrize("salt", [None, "s"])
@pytest.mark.parametrize("adapter", [None, "a"])
def test_media_chains_equal_those_of_kv_events(salt: str | None, adapter: str | None) -> None:
    sizes = (SIZE, 3)
    chains = media_chains(IDS, MEDIA, sizes, model="m", adapter=adapter, salt=salt)
    assert sorted(chains) == [3, SIZE]
    assert hits(KEYS, salt, adapter, chains[SIZE]) == 3
    other = [MEDIA[0], MEDIA[1], Medium("other", 9, 2)]
    changed = media_chains(IDS, other, sizes, model="m", adapter=adapter, salt=salt)
    assert hits(KEYS, salt, adapter, changed[SIZE]) == 2
    plain = chain_hashes(IDS, SIZE, chain_seed("m", adapter, salt))
    assert hits(KEYS, salt, adapter, plain) == 0


URL = {"url": "http://h/a.png"}
WITHIN = MessageMedia(True, False)
OUTSIDE = MessageMedia(True, True)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("an image_url of text", NO_MEDIA),
        (None, NO_MEDIA),
        ([{"type": "text", "text": "http://h"}, {"type": "refusal", "refusal": "no"}], NO_MEDIA),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], NO_MEDIA),
        ([{"type": "image_url", "image_url": URL}], OUTSIDE),
        ([{"type": "image_url", "image_url": {"detail": "low", **URL}}], OUTSIDE),
        ([{"image_url": URL}], OUTSIDE),  # vLLM takes parts without a type
        ([{"image_url": "http://h/a.png"}], OUTSIDE),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}], WITHIN),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}], WITHIN),
        ([{"type": "x", "x": [URL]}], OUTSIDE),
        ([{"type": ["text"]}], WITHIN),
        ([3], OUTSIDE),
    ],
)
def test_media_kinds_of_a_message_are_found(content: Any, found: MessageMedia) -> None:
    message = msgspec.json.encode({"role": "user", "content": content})
    assert media_in(message) == found
    escaped = message.replace(b"url", b"\\u0075rl").replace(b"image", b"im\\u0061ge")
    assert media_in(escaped) == found


@pytest.mark.parametrize("message", [b"3", b"[", b'{"content":[', b'{"content":[{"type":tex}]}'])
def test_an_unreadable_message_counts_as_having_media(message: bytes) -> None:
    assert media_in(message) == OUTSIDE


@pytest.mark.parametrize("depth", [10, 900])
def test_media_may_be_nested_at_any_depth(depth: int) -> None:
    value: Any = "x" * 100
    for _ in range(depth):
        value = [value]
    (shown,) = without_media([{"role": "user", "content": [{"type": "image_url", "x": value}]}])
    assert len(msgspec.json.encode(shown)) < 500
