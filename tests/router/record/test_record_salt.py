"""Tests of the salt of a recording: equal hashes stay equal, and without the salt nobody can test a
guess of a prompt.
"""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.record.salt import SALT_BYTES, Salt, salt_beside, salt_in, siphash_words
from tests.effort import examples

WORD = st.integers(0, (1 << 64) - 1)
FULL = (1 << 64) - 1


def siphash_of_eight(data: bytes, key: bytes) -> int:
    """Return the SipHash-2-4 of eight bytes, computed one byte string at a time as its paper
    describes.
    """
    k0, k1 = (int.from_bytes(key[n : n + 8], "little") for n in (0, 8))
    starts = (b"somepseu", b"dorandom", b"lygenera", b"tedbytes")
    v0, v1, v2, v3 = (
        int.from_bytes(start, "big") ^ k for start, k in zip(starts, (k0, k1, k0, k1), strict=True)
    )

    def turn(word: int, bits: int) -> int:
        return ((word << bits) | (word >> (64 - bits))) & FULL

    def rounds(count: int) -> None:
        nonlocal v0, v1, v2, v3
        for _ in range(count):
            v0, v1 = (v0 + v1) & FULL, turn(v1, 13)
            v1, v0 = v1 ^ v0, turn(v0, 32)
            v2, v3 = (v2 + v3) & FULL, turn(v3, 16)
            v3 ^= v2
            v0, v3 = (v0 + v3) & FULL, turn(v3, 21)
            v3 ^= v0
            v2, v1 = (v2 + v1) & FULL, turn(v1, 17)
            v1, v2 = v1 ^ v2, turn(v2, 32)

    for word in (int.from_bytes(data, "little"), len(data) << 56):
        v3 ^= word
        rounds(2)
        v0 ^= word
    v2 ^= 0xFF
    rounds(4)
    return v0 ^ v1 ^ v2 ^ v3


def test_siphash_equals_the_published_test_vector() -> None:
    """The hash of a published test vector is right: `vectors_sip64[8]` of the reference
    implementation, key 00..0f, input 00..07.
    """
    key = np.frombuffer(bytes(range(16)), "<u8")
    words = np.frombuffer(bytes(range(8)), "<u8")
    assert siphash_words(words, tuple(key.tolist())).astype("<u8").tobytes().hex() == (
        "6224939a79f5f593"
    )


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(WORD, max_size=8), st.binary(min_size=16, max_size=16), st.integers(1, 900))
def test_siphash_is_computed_word_by_word(words: list[int], key: bytes, times: int) -> None:
    halves = tuple(np.frombuffer(key, "<u8").tolist())
    told = siphash_words(np.array(words * times, dtype=np.uint64), halves).tolist()
    assert told == [siphash_of_eight(word.to_bytes(8, "little"), key) for word in words] * times


def test_a_salt_file_is_readable_only_by_its_owner_and_is_reused(tmp_path: Path) -> None:
    made = salt_beside(tmp_path / "log")
    file = tmp_path / "log.salt"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["log.salt"]
    again, other = salt_in(file), salt_in(tmp_path / "other")
    hashes = np.arange(5, dtype=np.uint64)
    assert again.keyed(hashes).tolist() == made.keyed(hashes).tolist()
    assert (again.mark, again.names) == (made.mark, made.names)
    assert other.mark != made.mark
    assert not set(other.keyed(hashes).tolist()) & set(made.keyed(hashes).tolist())
    assert made.mark.encode() not in file.read_bytes()


@pytest.mark.parametrize("held", [b"", b"short", b"x" * (SALT_BYTES + 1)])
def test_a_salt_file_of_wrong_length_is_refused(tmp_path: Path, held: bytes) -> None:
    file = tmp_path / "salt"
    file.write_bytes(held)
    file.chmod(0o600)
    with pytest.raises(OSError, match=r"salt holds \d+ bytes; expected 32: it is no salt"):
        salt_in(file)
    assert file.read_bytes() == held


def test_a_salt_file_readable_by_other_users_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "salt"
    salt_in(file)
    file.chmod(0o640)
    with pytest.raises(OSError, match="may be read by others: chmod 600"):
        salt_in(file)


def test_a_log_that_is_not_a_regular_file_gets_a_temporary_salt() -> None:
    assert salt_beside(Path("/dev/null")).mark != salt_beside(Path("/dev/null")).mark
    with pytest.raises(ValueError, match="holds 3 bytes"):
        Salt(b"abc")
