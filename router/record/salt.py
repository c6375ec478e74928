"""Keys chain hashes and names with a secret before they are written to a log.

Without the salt, nobody can use a log to check guessed prompts, or compare it with another log.
With the salt, a log can be used as if its hashes were plain. So the salt is in a file of its own,
with mode 0600.
"""

from __future__ import annotations

import os
import secrets
import stat
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

import numpy as np

from policies.contract import Hashes

SALT_BYTES = 32
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_ROUNDS = (2, 4)  # of SipHash-2-4: for each word, and at the end
_START = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_TURNS = MappingProxyType({n: (np.uint64(n), np.uint64(64 - n)) for n in (13, 16, 17, 21, 32)})
_AT_ONCE = 8_192  # words: what a core has near
_LENGTH = np.uint64(8 << 56)  # the last word of an input of eight bytes


class Salt:
    """A secret for one or more logs, and the keys derived from it. Lifetime: as long as
    its file.
    """

    def __init__(self, secret: bytes) -> None:
        """Derive the keys from a secret of 32 bytes. Raises ValueError if it has another length."""
        if len(secret) != SALT_BYTES:
            raise ValueError(f"holds {len(secret)} bytes; expected {SALT_BYTES}")
        sip = blake2b(key=secret, digest_size=16, person=b"chain hashes").digest()
        self._sip = tuple(int(half) for half in np.frombuffer(sip, "<u8"))
        self.names = blake2b(key=secret, digest_size=32, person=b"names").digest()
        self.mark = blake2b(key=secret, digest_size=8, person=b"mark").hexdigest()
        """Tells salts apart, and nothing of them: 16 hexadecimal digits."""

    def keyed(self, hashes: Hashes) -> Hashes:
        """Return SipHash-2-4 of each hash's eight bytes, little endian: uint64[n] -> uint64[n].
        Equal hashes give equal results.

        SipHash: Aumasson and Bernstein, 2012.
        """
        return siphash_words(hashes, self._sip)


def siphash_words(words: Hashes, key: tuple[int, ...]) -> Hashes:
    """Return SipHash-2-4 of inputs of eight bytes each. `key` has the two halves of the key, little
    endian.
    """
    words = words.astype(np.uint64, copy=False)
    keyed = np.empty_like(words)
    with np.errstate(over="ignore"):
        for at in range(0, len(words), _AT_ONCE):
            _Sip(words[at : at + _AT_ONCE], key).into(keyed[at : at + _AT_ONCE])
    return keyed


class _Sip:
    """The SipHash states of all words, which are computed together and changed in place. Lifetime:
    a call.
    """

    def __init__(self, words: Hashes, key: tuple[int, ...]) -> None:
        self._words = words
        self._spare = np.empty_like(words)
        self._state = [
            np.full(len(words), start ^ key[n % 2], np.uint64) for n, start in enumerate(_START)
        ]

    def into(self, out: Hashes) -> None:
        v0, v1, v2, v3 = self._state
        for word in (self._words, _LENGTH):
            v3 ^= word
            for _ in range(_ROUNDS[0]):
                self._round()
            v0 ^= word
        v2 ^= np.uint64(0xFF)
        for _ in range(_ROUNDS[1]):
            self._round()
        np.bitwise_xor(v0, v1, out=out)
        out ^= v2
        out ^= v3

    def _round(self) -> None:
        v0, v1, v2, v3 = self._state
        self._mix(v0, v1, 13)
        self._mix(v2, v3, 16)
        self._turn(v0, 32)
        self._mix(v2, v1, 17)
        self._mix(v0, v3, 21)
        self._turn(v2, 32)

    def _mix(self, one: Hashes, other: Hashes, bits: int) -> None:
        one += other
        self._turn(other, bits)
        other ^= one

    def _turn(self, word: Hashes, bits: int) -> None:
        left, right = _TURNS[bits]
        np.left_shift(word, left, out=self._spare)
        np.right_shift(word, right, out=word)
        word |= self._spare


def salt_in(path: Path) -> Salt:
    """Return the salt in a file; create the file with a new salt if it is missing. Raises OSError
    that says what is wrong.
    """
    try:
        return Salt(_read(path))
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise OSError(f"{path} {error}: it is no salt; move it away") from error
    secret = secrets.token_bytes(SALT_BYTES)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(fresh, _FLAGS, 0o600), "wb") as file:
            file.write(secret)
        os.link(fresh, path)  # whole or not at all, and never over another router's
    except FileExistsError:
        return Salt(_read(path))
    finally:
        fresh.unlink(missing_ok=True)
    return Salt(secret)


def salt_beside(path: Path) -> Salt:
    """Return the salt of a log, which is in `FILE.salt`; if the log is not a regular file, return a
    new salt for this process only. Raises OSError if the salt's file is unusable.
    """
    if path.exists() and not path.is_file():
        return Salt(secrets.token_bytes(SALT_BYTES))
    return salt_in(path.with_name(path.name + ".salt"))


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        held = os.fstat(file.fileno())
        if stat.S_IMODE(held.st_mode) & 0o077:
            raise PermissionError(f"{path} may be read by others: chmod 600 it, or move it away")
        return file.read(SALT_BYTES + 1)
