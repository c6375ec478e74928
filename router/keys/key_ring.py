"""Looks up the API keys of clients, and reads the key file again when it changes."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path

from router.keys.key_file import KeyFileError, KeyLine, KeyTerms, hash_of, read_keys
from router.keys.quota import Allowance, SharedUse

log = logging.getLogger(__name__)

_WATCH_S = 2.0


class Key:
    """An API key, or a tenant that trusted peers name, with its terms and its usage. Lifetime: as
    long as the file has it.
    """

    __slots__ = ("allowance", "terms")

    def __init__(self, terms: KeyTerms, allowance: Allowance | None) -> None:
        self.terms = terms
        self.allowance = allowance  # None: it has no limits


class KeyRing:
    """All API keys of the key file. Lifetime: process.

    Keys are stored and looked up as keyed digests of their hashes, so that neither the memory nor
    the time of a look-up reveals them.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Read the keys in the file `path`. Raises KeyFileError."""
        self._path = path
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._keys: dict[bytes, Key] = {}
        self._tenants: dict[str, Key] = {}
        self._allowances: dict[str, Allowance] = {}
        self.shared_use = SharedUse(lambda: self._allowances)
        self._stamp = self._stamped()
        self._take(read_keys(path))

    def __len__(self) -> int:
        return len(self._keys)

    def of_key(self, key: str) -> Key | None:
        """Return the key that a client presents; None if it is unknown."""
        return self._keys.get(self._digest(hash_of(key)))

    def of_tenant(self, tenant: str) -> Key | None:
        """Return the terms of a tenant that a trusted peer names; None if the file does not have
        it.
        """
        return self._tenants.get(tenant)

    def reload(self) -> None:
        """Read the key file again. If it is unusable, raise KeyFileError and keep the old keys."""
        stamp = self._stamped()
        self._take(read_keys(self._path))
        self._stamp = stamp

    async def watch(self) -> None:
        """Read the file again whenever it changes, until cancelled. A bad file is logged once."""
        while True:
            await asyncio.sleep(_WATCH_S)
            stamp = self._stamped()
            if stamp == self._stamp:
                continue
            self._stamp = stamp
            try:
                lines = await asyncio.to_thread(read_keys, self._path)
            except KeyFileError as error:
                log.error("keys not read anew, the old ones stay: %s", error)
                continue
            self._take(lines)

    def _take(self, lines: tuple[KeyLine, ...]) -> None:
        now_s = self._clock()
        keys: dict[bytes, Key] = {}
        tenants: dict[str, Key] = {}
        allowances: dict[str, Allowance] = {}
        for line in lines:
            if line.hashed is None:
                assert line.terms.tenant is not None, "a line without a tenant"
                name = line.terms.tenant
                key = tenants[name] = self._key(self._tenants.get(name), line.terms, now_s)
            else:
                digest = self._digest(line.hashed)
                key = keys[digest] = self._key(self._keys.get(digest), line.terms, now_s)
            if key.allowance is not None:
                shared = _shared_name(line)
                allowances[shared] = key.allowance
                key.allowance.on_use = partial(self.shared_use.touched, shared)
        self._keys, self._tenants = keys, tenants
        self._allowances = allowances
        log.info("%s: %d keys", self._path, len(keys))
        if plain := sum(line.plain for line in lines):
            log.warning(
                "%s: %d keys stand there as they are; put `sha256:...` in their place, which "
                "`warmroute keys hash` prints",
                self._path,
                plain,
            )

    def _stamped(self) -> tuple[int, int, int] | None:
        """Return numbers that change whenever the key file is changed; None if the file cannot be
        read.
        """
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _digest(self, hashed: bytes) -> bytes:
        return hmac.digest(self._secret, hashed, "sha256")

    def _key(self, old: Key | None, terms: KeyTerms, now_s: float) -> Key:
        """Return a key with new terms that keeps the usage and the running requests of `old`, if
        there was one.
        """
        if terms.unlimited:
            return Key(terms, None)
        allowance = None if old is None else old.allowance
        if allowance is None:
            return Key(terms, Allowance(terms, now_s))
        allowance.change(terms, now_s)
        return Key(terms, allowance)


def _shared_name(line: KeyLine) -> str:
    """Return the name under which all replicas share the usage of this key; the key cannot be
    computed from it.
    """
    whose = (line.terms.tenant or "").encode() if line.hashed is None else line.hashed
    kind = b"tenant" if line.hashed is None else b"key"
    return blake2b(whose, digest_size=16, person=kind).hexdigest()
