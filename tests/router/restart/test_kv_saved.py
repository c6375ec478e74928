"""Tests of the file of saved event streams: what was written is read back, and a damaged file gives
a cold start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.facts import CacheSnapshot
from router.core.workers.snapshot import decode_snapshot, encode_snapshot
from router.restart.saved_caches import SavedFile, SavedFileError, read_saved
from tests.effort import EFFORT
from tests.router.restart.saved_support import saved_of, write


@given(
    snapshot=st.builds(
        CacheSnapshot,
        st.integers(0, 2**62),
        st.integers(-1, 2**62),
        st.integers(0, 2**64 - 1),
        st.booleans(),
        st.booleans(),
        st.binary(),
    )
)
def test_a_snapshot_survives_encoding_and_decoding(snapshot: CacheSnapshot) -> None:
    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


@given(data=st.binary(max_size=60))
def test_any_bytes_are_decoded_as_a_snapshot_or_refused(data: bytes) -> None:
    try:
        snapshot = decode_snapshot(data)
    except ValueError:
        return
    assert encode_snapshot(snapshot) == data


@settings(max_examples=50 * EFFORT, deadline=None)
@given(bodies=st.lists(st.binary(min_size=1, max_size=200), max_size=5))
def test_saved_workers_are_read_back(tmp_path_factory: Any, bodies: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("saved") / "kv"
    workers = [saved_of(n, body) for n, body in enumerate(bodies)]
    assert write(path, workers) == path.stat().st_size
    assert read_saved(path) == workers
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["kv"]


@settings(max_examples=300 * EFFORT, deadline=None)
@given(
    at=st.integers(0, 10**6), flip=st.integers(1, 255), cut=st.integers(0, 10**6), tail=st.binary()
)
def test_a_damaged_file_is_refused(
    tmp_path_factory: Any, at: int, flip: int, cut: int, tail: bytes
) -> None:
    path = tmp_path_factory.mktemp("saved") / "kv"
    write(path, [saved_of(0), saved_of(1)])
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[at % len(whole)] ^= flip
    damaged = [bytes(flipped), whole[: cut % len(whole)]]
    if tail:
        damaged.append(whole + tail)
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(SavedFileError):
            read_saved(path)


def test_lengths_beyond_the_file_are_refused_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write(path, [])
    head = path.read_bytes()[:16]
    for lengths in (b"\0\0\0\1" + b"\x7f" + b"\xff" * 7, b"\xff" * 12):
        path.write_bytes(head + lengths + b"\0" * 64)
        with pytest.raises(SavedFileError, match="more bytes than the file"):
            read_saved(path)


def test_an_abandoned_file_leaves_the_previous_one(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write(path, [saved_of(3)])
    file = SavedFile(path)
    file.add(saved_of(4))
    file.abandon()
    assert read_saved(path) == [saved_of(3)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["kv"]
