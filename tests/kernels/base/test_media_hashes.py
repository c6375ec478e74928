"""Tests of the chain hashes of prompts with media, against the definition and against KV events for
the same prompts.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkernels import _native
from tests.oracles import media as twin

IDENTIFIERS = st.text("abé", max_size=4)
Medium = tuple[str, int, int]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], int, list[Medium]]:
    """Draw token ids, a block size, and media, some of which overlap or lie beyond the ids."""
    most = draw(st.sampled_from([5, 2**40]))
    ids = draw(st.lists(st.integers(0, most), max_size=60))
    places = st.tuples(IDENTIFIERS, st.integers(0, 70), st.integers(0, 30))
    media = sorted(draw(st.lists(places, max_size=5)), key=lambda medium: medium[1])
    return ids, draw(st.integers(1, 9)), media


def array_of(ids: list[int]) -> Any:
    return np.array(ids, np.int64 if any(one >= 2**31 for one in ids) else np.int32)


@given(prompts(), st.integers(0, 2**64 - 1))
def test_media_hashes_equal_those_of_the_python_version(
    prompt: tuple[list[int], int, list[Medium]], seed: int
) -> None:
    ids, size, media = prompt
    got = _native.media_chain_hashes(array_of(ids), size, seed, media)
    assert got.dtype == np.uint64
    assert got.tolist() == twin.media_chain_hashes(array_of(ids), size, seed, media).tolist()


@given(prompts())
def test_without_media_the_hashes_equal_the_plain_hashes(
    prompt: tuple[list[int], int, list[Medium]],
) -> None:
    ids, size, _ = prompt
    tokens = array_of(ids)
    plain = _native.chain_hashes if tokens.itemsize == 4 else _native.wide_chain_hashes
    got = _native.media_chain_hashes(tokens, size, 7, [])
    assert got.tolist() == plain(tokens, size, 7).tolist()


@given(prompts())
def test_the_events_of_the_prompt_have_the_same_hashes(
    prompt: tuple[list[int], int, list[Medium]],
) -> None:
    """The chain hashes of a prompt with media equal those of the blocks in an engine's events for
    that prompt.
    """
    ids, size, media = prompt
    blocks = len(ids) // size
    if not blocks:
        return
    event = [
        *("BlockStored", list(range(1, blocks + 1)), None, ids[: blocks * size], size),
        *(None, "GPU", None, keys_of(media, blocks, size)),
    ]
    batch = _native.EventBatch(msgspec.msgpack.encode([0.0, [event], 0]))
    assert not batch.skipped
    index = _native.PrefixIndex(1)
    _native.WorkerBlocks(index, 0, size, "m").apply(batch)
    chain = _native.media_chain_hashes(array_of(ids), size, 0, media)
    assert index.longest_prefix(chain).tolist() == [blocks]


def keys_of(media: list[Medium], blocks: int, size: int) -> list[Any]:
    """Return vLLM's `extra_keys` for each block: its media as [identifier, offset], or None."""
    given = [twin.Medium(name.encode(), offset, length) for name, offset, length in media]
    keys, first = list[Any](), 0
    for start in range(0, blocks * size, size):
        among, first = twin.media_of(given, start, start + size, first)
        keys.append([(name.decode(), at) for name, at in among] or None)
    return keys


IDS = np.arange(8, dtype=np.int32)
CASES: list[tuple[str, Callable[[Any], object], type[Exception], str]] = [
    ("no sequence", lambda m: m(IDS, 2, 0, 5), TypeError, "media must be a sequence, got int"),
    ("two values", lambda m: m(IDS, 2, 0, [("a", 1)]), TypeError, "must have tuples"),
    ("a list", lambda m: m(IDS, 2, 0, [["a", 1, 1]]), TypeError, "must have tuples"),
    ("bytes", lambda m: m(IDS, 2, 0, [(b"a", 1, 1)]), TypeError, "must be a str, got bytes"),
    ("surrogate", lambda m: m(IDS, 2, 0, [("\ud800", 1, 1)]), UnicodeEncodeError, "surrogates"),
    ("before", lambda m: m(IDS, 2, 0, [("a", -1, 1)]), ValueError, "an offset must be 0..2147"),
    ("length", lambda m: m(IDS, 2, 0, [("a", 1, -1)]), ValueError, "a length must be 0..2147"),
    ("far", lambda m: m(IDS, 2, 0, [("a", 2**31, 1)]), ValueError, "got 2147483648"),
    (
        "order",
        lambda m: m(IDS, 2, 0, [("a", 2, 1), ("b", 1, 1)]),
        ValueError,
        "media must be in the order of their offsets",
    ),
    ("size", lambda m: m(IDS, 0, 0, []), ValueError, "block_size must be at least 1, got 0"),
    ("seed", lambda m: m(IDS, 1, -1, []), ValueError, "seed must be a uint64, got -1"),
    ("floats", lambda m: m(IDS.astype(np.float32), 1, 0, []), TypeError, "got format 'f' of 4"),
]


@pytest.mark.parametrize(
    ("call", "kind", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_native_and_python_errors_have_the_same_text(
    call: Callable[[Any], object], kind: type[Exception], words: str
) -> None:
    said = []
    for function in (_native.media_chain_hashes, twin.media_chain_hashes):
        with pytest.raises(kind) as caught:
            call(function)
        assert type(caught.value) is kind
        said.append(str(caught.value))
    assert words in said[0]
    assert said[0] == said[1]
