"""Tests of reading a dump of the index: either all of it is read or nothing, and native and Python
form behave alike.
"""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels import _native
from tests.effort import examples
from tests.oracles import index as twins

HEADER = struct.Struct("<4sI4Q3Q")


def sealed(body: bytes) -> bytes:
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def dump_of(
    entries: bytes = b"",
    *,
    magic: bytes = b"KVPI",
    version: int = 1,
    workers: int = 4,
    max_entries: int = 100,
    max_bytes: int = 1 << 20,
    counts: tuple[int, int, int] = (0, 0, 0),
) -> bytes:
    return sealed(
        HEADER.pack(magic, version, workers, max_entries, max_bytes, 0, *counts) + entries
    )


def entry(block: int, *holders: int, count: int | None = None) -> bytes:
    width = len(holders) if count is None else count
    return struct.pack(f"<QH{len(holders)}H", block, width, *holders)


REFUSED = {
    "nothing": (b"", "0 bytes are too few"),
    "another file": (dump_of(magic=b"PK\3\4"), "does not start with KVPI"),
    "a later version": (dump_of(version=2), "version 2, this program reads 1"),
    "a flipped bit": (dump_of()[:-9] + b"\1" + dump_of()[-8:], "its checksum is wrong"),
    "no workers": (dump_of(workers=0), "workers out of range"),
    "too many workers": (dump_of(workers=4097), "workers out of range"),
    "no bound": (dump_of(max_entries=0), "a bound out of range"),
    "a bound past int64": (dump_of(max_bytes=1 << 63), "a bound out of range"),
    "entries past the bound": (dump_of(counts=(60, 41, 0)), "more entries than max_entries"),
    "counts that wrap": (
        dump_of(counts=((1 << 64) - 1, 2, 0)),
        "more entries than max_entries",
    ),
    "entries that do not come": (
        dump_of(max_entries=1 << 62, counts=(1 << 61, 0, 0)),
        "entries are missing",
    ),
    "half an entry": (dump_of(entry(1, 0) + entry(2, 0)[:9], counts=(2, 0, 0)), "are missing"),
    "holders that do not come": (dump_of(entry(1, 0, count=3), counts=(1, 0, 0)), "are missing"),
    "an entry of nobody": (dump_of(entry(1, count=0) + b"\0\0", counts=(1, 0, 0)), "fit number"),
    "more holders than workers": (dump_of(entry(1, *range(5)), counts=(1, 0, 0)), "fit number"),
    "a worker that is not": (dump_of(entry(1, 4), counts=(1, 0, 0)), "not ascending workers"),
    "a holder twice": (dump_of(entry(1, 2, 2), counts=(1, 0, 0)), "not ascending workers"),
    "an entry twice": (dump_of(entry(1, 2) + entry(1, 3), counts=(2, 0, 0)), "an entry twice"),
    "bytes at the end": (dump_of(b"more", counts=(0, 0, 0)), "4 bytes too many"),
}


@pytest.mark.parametrize(("data", "words"), REFUSED.values(), ids=REFUSED)
def test_native_and_python_errors_have_the_same_text(data: bytes, words: str) -> None:
    with pytest.raises(ValueError) as native:
        _native.PrefixIndex.load(data)
    with pytest.raises(ValueError) as twin:
        twins.PrefixIndex.load(data)
    assert words in str(native.value)
    assert str(native.value) == str(twin.value)


def test_a_dump_that_is_not_bytes_is_refused() -> None:
    for module in (_native, twins):
        with pytest.raises(TypeError, match="data must be a buffer of uint8, got str"):
            module.PrefixIndex.load("KVPI")


def filled() -> _native.PrefixIndex:
    index = _native.PrefixIndex(300, max_entries=5000)
    blocks = np.random.default_rng(5).integers(0, 2**63, 400).astype(np.uint64)
    for worker in range(0, 300, 2):
        index.store(worker, blocks[: worker + 1], worker // 2 % 3)
    index.clear_worker(8)
    return index


DUMP = filled().dump()


@given(cut=st.integers(0, len(DUMP) - 1))
@settings(max_examples=examples(50), deadline=None)
def test_a_torn_dump_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="not a dump of a prefix index"):
        _native.PrefixIndex.load(DUMP[:cut])


@given(at=st.integers(0, len(DUMP) - 9), value=st.integers(0, 255))
@settings(max_examples=examples(200), deadline=None)
def test_a_changed_dump_is_refused_or_loaded_as_an_index(at: int, value: int) -> None:
    """A dump with one changed byte and a right checksum is refused by the native and the Python
    form, or read alike by both.
    """
    body = bytearray(DUMP[:-8])
    body[at] = value
    answers = []
    for module in (_native, twins):
        try:
            index = module.PrefixIndex.load(sealed(bytes(body)))
        except ValueError as refusal:
            answers.append(str(refusal))
        else:
            answers.append((index.workers, index.max_entries))
    assert answers[0] == answers[1]


def test_a_dump_of_a_loaded_dump_is_the_same_index() -> None:
    index = filled()
    again = _native.PrefixIndex.load(DUMP)
    assert len(again) == len(index) == len(twins.PrefixIndex.load(DUMP))
    assert len(again.dump()) == len(DUMP)
    blocks = np.random.default_rng(5).integers(0, 2**63, 400).astype(np.uint64)
    np.testing.assert_array_equal(
        again.longest_prefix_tiers(blocks), index.longest_prefix_tiers(blocks)
    )


def test_the_order_of_use_survives_a_restart() -> None:
    """Blocks that were used before a restart are evicted later than those that were not, because
    the dump keeps the order of use.
    """
    index = _native.PrefixIndex(1, max_entries=1000)
    trunk = np.arange(50, dtype=np.uint64)
    index.store(0, np.arange(1000, 1950, dtype=np.uint64))
    index.store(0, trunk)
    index.longest_prefix(trunk)
    index.longest_prefix(trunk)
    index = _native.PrefixIndex.load(index.dump())
    index.store(0, np.arange(5000, 5400, dtype=np.uint64))
    assert index.longest_prefix(trunk).tolist() == [50]
