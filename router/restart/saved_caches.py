"""Saves the router's knowledge of each worker's cache to a file, for the next start.

    "warmroute-kv", version (4 bytes, big-endian), records, the last one without a body
    record: bytes of the head (4), of the body (8), head, body, XXH3-64 of head and body (8)
    head: a msgpack map of `SnapshotHead`; of the last record, of `End`
    body: a snapshot (`router.core.workers.snapshot`)

The file is written under another name, and renamed when it is complete. So a router that dies while
writing leaves the old file intact.

The router freezes one worker's cache after another, which blocks the event loop for 1 ms per
100,000 blocks. A thread encodes and writes each frozen cache. A router that ends saves once more.

A saved cache is used only for a worker of the same address, kind, models and block size. The core
must also have seen proof that the publisher of the worker's KV events has not restarted
(`router.core.workers.kv_state`).

The file keeps the caches of absent workers, which have not joined yet or are down, for a day and up
to 1 GiB in all. The cache of a worker that was removed is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from xxhash import xxh3_64

from policies.facts import CacheSnapshot, WorkerChange, WorkerFacts
from router.core.core import RouterCore
from router.core.workers.snapshot import FrozenCache, decode_snapshot, encode_snapshot
from router.core.workers.table import Worker
from router.fleet.member import Member

MAGIC = b"warmroute-kv"
VERSION = 2
MAX_FILE_BYTES = 8 << 30  # about 300 million blocks
MAX_HEAD_BYTES = 1 << 20
MAX_WORKERS = 4_096

_VERSION = struct.Struct(">I")
_LENGTHS = struct.Struct(">IQ")
_SUM = struct.Struct(">Q")


class SavedFileError(ValueError):
    """Raised when a file was not saved by a router, or is damaged; the text says where."""


class Owner(msgspec.Struct, frozen=True):
    """The worker to which a saved cache belongs. It is the same worker if all fields are equal."""

    url: str
    rank: int | None  # the engine's number of its data-parallel rank
    kind: str
    models: tuple[str, ...]
    block_size: int


class SnapshotHead(msgspec.Struct, frozen=True):
    """The record in the file that describes the snapshot after it."""

    owner: Owner
    saved_at: float = 0.0  # seconds since the epoch


class End(msgspec.Struct, frozen=True):
    """The last record of the file: how many workers the file must contain."""

    workers: int


class Saved(NamedTuple):
    """The saved cache of one worker in the file."""

    head: SnapshotHead
    snapshot: CacheSnapshot


class SavedFile:
    """A new file of saved caches that is being written; one thread at a time uses it. Lifetime: one
    save.
    """

    def __init__(self, path: Path) -> None:
        """Open a new file in the same folder as `path`. Raises OSError if that fails."""
        self._path = path
        self._new = path.with_name(path.name + ".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._new, flags, 0o600), "wb")
        self._workers = 0
        self._file.write(MAGIC + _VERSION.pack(VERSION))

    def add(self, saved: Saved) -> None:
        """Write one worker's cache. Raises OSError if that fails."""
        self._workers += 1
        self._record(msgspec.msgpack.encode(saved.head), encode_snapshot(saved.snapshot))

    def finish(self) -> int:
        """Replace the previous file by the new one. Return its size in bytes. Raises OSError if
        that fails.
        """
        self._record(msgspec.msgpack.encode(End(self._workers)), b"")
        self._file.flush()
        os.fsync(self._file.fileno())
        size_bytes = self._file.tell()
        self._file.close()
        os.replace(self._new, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return size_bytes

    def abandon(self) -> None:
        """Delete the new file, and keep the previous one."""
        with suppress(OSError):  # data that could not be written cannot be flushed either
            self._file.close()
        self._new.unlink(missing_ok=True)

    def _record(self, head: bytes, body: bytes) -> None:
        digest = xxh3_64(head)
        digest.update(body)
        self._file.write(_LENGTHS.pack(len(head), len(body)) + head)
        self._file.write(body)
        self._file.write(_SUM.pack(digest.intdigest()))


def read_saved(path: Path) -> list[Saved]:
    """Return the saved caches of all workers in a file. Raises OSError if it cannot be read, and
    SavedFileError if no router saved it.
    """
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        if left > MAX_FILE_BYTES:
            raise SavedFileError(f"it has {left} bytes; at most {MAX_FILE_BYTES}")
        if file.read(len(MAGIC)) != MAGIC:
            raise SavedFileError("it does not begin as one")
        (version,) = _VERSION.unpack(_exactly(file, _VERSION.size))
        if version != VERSION:
            raise SavedFileError(f"it is of version {version}; expected {VERSION}")
        return _records(file)


def _records(file: BinaryIO) -> list[Saved]:
    found: list[Saved] = []
    try:
        while (record := _record(file, len(found))) is not None:
            found.append(record)
            if len(found) > MAX_WORKERS:
                raise SavedFileError(f"it has more than {MAX_WORKERS} workers")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SavedFileError(f"worker {len(found)}: {error}") from error
    return found


def _record(file: BinaryIO, number: int) -> Saved | None:
    """Return the next worker's saved cache in the file; None at the end."""
    head_bytes, body_bytes = _LENGTHS.unpack(_exactly(file, _LENGTHS.size))
    left = os.fstat(file.fileno()).st_size - file.tell()
    if head_bytes > MAX_HEAD_BYTES or head_bytes + body_bytes > left:
        raise SavedFileError(f"worker {number} has more bytes than the file")
    head, body = _exactly(file, head_bytes), _exactly(file, body_bytes)
    digest = xxh3_64(head)
    digest.update(body)
    if digest.digest() != _exactly(file, _SUM.size):
        raise SavedFileError(f"worker {number}: the checksum is another one")
    if not body:
        end = msgspec.msgpack.decode(head, type=End)
        if end.workers != number or file.read(1):
            raise SavedFileError(f"it ends after {number} workers; expected {end.workers}")
        return None
    try:
        saved = Saved(msgspec.msgpack.decode(head, type=SnapshotHead), decode_snapshot(body))
    except ValueError as error:
        raise SavedFileError(f"worker {number}: {error}") from error
    if saved.snapshot.next_seq < 1 or not saved.snapshot.digest:
        raise SavedFileError(f"worker {number}: goes on from batch {saved.snapshot.next_seq}")
    return saved


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise SavedFileError("it is cut off")
    return data


log = logging.getLogger(__name__)

AWAY_S = 86_400.0
AWAY_BYTES = 1 << 30

_Address = tuple[str, int | None]  # URL and rank


class StateKeeper:
    """Saves and loads the router's knowledge of workers' caches. A worker's saved cache stays in
    the file until there is a newer one of the same worker. Lifetime: process.
    """

    def __init__(
        self,
        path: Path,
        core: RouterCore,
        members: Callable[[], Mapping[int, Member]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Load and save nothing yet. `wall` returns the Unix time in seconds."""
        self.saves = 0
        self.failed_saves = 0
        self.size_bytes = 0  # of the file
        self._path = path
        self._core = core
        self._members = members
        self._wall = wall
        self._fresh_s = time.monotonic()  # when it was saved last, or we began
        self._owners: dict[int, Owner] = {}  # of the workers that the core has
        self._away: dict[_Address, Saved] = {}  # of workers that are not here now
        self._leaving: dict[_Address, tuple[Owner, FrozenCache]] = {}  # ..., since the last saving
        self._timer: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None

    @property
    def age_s(self) -> float:
        """The seconds since the file was last saved, or, if it never was, since this router
        started.
        """
        return time.monotonic() - self._fresh_s

    async def load(self) -> None:
        """Read the saved file; called before any worker joins. An unusable file is ignored."""
        try:
            found = await asyncio.to_thread(read_saved, self._path)
        except FileNotFoundError:
            log.info("kv_state: %s does not exist yet; caches are learned anew", self._path)
        except (OSError, SavedFileError) as error:
            log.warning("kv_state: %s is not used, caches are learned anew: %s", self._path, error)
        else:
            self._away = {_address(one.head.owner): one for one in found}
            self._forget_old()
            log.info("kv_state: %s has the caches of %d workers", self._path, len(self._away))

    def with_saved_cache(self, fact: WorkerChange) -> WorkerChange:
        """Return the fact about a worker that the core should get. If the fact is that a worker
        joins, its saved cache is added to it.
        """
        worker, owner = self._core.workers.get(fact.worker_id), self._owners.get(fact.worker_id)
        if fact.state == "gone":
            if owner is not None:
                self._forget(self._owners.pop(fact.worker_id))
        elif worker is None or owner is None:
            return self._joins(fact)
        elif fact.state == "down":
            frozen = _provable(worker) if worker.state != "down" else None
            if frozen is not None:
                self._leaving[_address(owner)] = (owner, frozen)
        elif worker.state == "down" and fact.spec is not None:
            self._note_owner(fact.worker_id, fact.spec)
        return fact

    def start(self, interval_s: Callable[[], float]) -> None:
        """Save at every interval from now on."""
        self._timer = asyncio.create_task(self._run(interval_s), name="kv_state")

    async def close(self) -> None:
        """Save the caches once more, and stop. If `start` was never called, there is nothing new to
        save.
        """
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.wait([self._timer])
            await self.save()

    def retire(self) -> None:
        """Stop saving, because the file belongs to another router now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def save(self) -> None:
        """Save the caches of all workers. A failure is logged, and the previous file stays.

        Only one save runs at a time. If the caller is cancelled, the save still continues.
        """
        if self._saving is not None:
            await asyncio.wait([self._saving])
        self._saving = asyncio.create_task(self._save(), name="kv_state writes")
        await asyncio.shield(self._saving)

    # --- who comes and goes -----------------------------------------------------------------

    def _joins(self, fact: WorkerChange) -> WorkerChange:
        owner = None if fact.spec is None else self._note_owner(fact.worker_id, fact.spec)
        saved = None if owner is None else self._away.get(_address(owner))
        if owner is None or saved is None:
            return fact
        if saved.head.owner != owner:
            log.info("worker %d: not the one whose cache was saved", fact.worker_id)
            self._forget(owner)
            return fact
        log.info(
            "worker %d: its cache was saved (%d bytes), to be proven by batch %d of its events",
            fact.worker_id,
            len(saved.snapshot.blocks),
            saved.snapshot.next_seq - 1,
        )
        return replace(fact, saved=saved.snapshot)

    def _note_owner(self, worker_id: int, facts: WorkerFacts) -> Owner | None:
        """Store and return the owner of this worker's cache; None if the worker is not
        recognized.
        """
        member = self._members().get(worker_id)
        if member is None or member.recognized is None:
            return None
        kind, rank = member.recognized.kind, member.recognized.address
        owner = Owner(member.spec.url, rank, kind, facts.models, facts.block_size)
        self._owners[worker_id] = owner
        return owner

    def _forget(self, owner: Owner) -> None:
        """Drop a worker's saved cache, because it is outdated or useless."""
        self._away.pop(_address(owner), None)
        self._leaving.pop(_address(owner), None)

    def _forget_old(self) -> None:
        """Drop the saved caches of absent workers that are older than a day, and the oldest ones
        beyond 1 GiB in all.
        """
        now = self._wall()
        latest = sorted(self._away.items(), key=lambda item: _age_s(item[1], now))
        self._away.clear()
        size_bytes = 0
        for address, saved in latest:
            size_bytes += len(saved.snapshot.blocks)
            if _age_s(saved, now) < AWAY_S and size_bytes <= AWAY_BYTES:
                self._away[address] = saved

    # --- the file ---------------------------------------------------------------------------

    async def _run(self, interval_s: Callable[[], float]) -> None:
        while True:
            await asyncio.sleep(interval_s())
            await self.save()

    async def _save(self) -> None:
        file = None
        try:
            file = await asyncio.to_thread(SavedFile, self._path)
            written = 0
            for worker_id in list(self._owners):
                if (frozen := self._frozen(worker_id)) is not None:
                    await asyncio.to_thread(self._write, file, *frozen)
                    self._forget(frozen[0])
                    written += 1
            for address, left in list(self._leaving.items()):
                saved = await asyncio.to_thread(self._thawed, *left)
                if self._leaving.get(address) is left:  # it has not returned meanwhile
                    self._away[address] = saved
                    del self._leaving[address]
            self._forget_old()
            for saved in list(self._away.values())[: MAX_WORKERS - written]:
                await asyncio.to_thread(file.add, saved)
            self.size_bytes = await asyncio.to_thread(file.finish)
        except OSError as error:
            self.failed_saves += 1
            log.error("kv_state: cannot write %s: %s", self._path, error.strerror or error)
            if file is not None:
                await asyncio.to_thread(file.abandon)
        else:
            self.saves += 1
            self._fresh_s = time.monotonic()
            log.debug("kv_state: %d bytes written to %s", self.size_bytes, self._path)

    def _frozen(self, worker_id: int) -> tuple[Owner, FrozenCache] | None:
        """Return the owner and a frozen copy of a present worker's cache, or None if there is
        nothing to save.
        """
        owner, worker = self._owners.get(worker_id), self._core.workers.get(worker_id)
        frozen = None if worker is None else _provable(worker)
        return None if owner is None or frozen is None else (owner, frozen)

    def _write(self, file: SavedFile, owner: Owner, frozen: FrozenCache) -> None:
        """Write one worker's cache to the file. It runs in a thread."""
        file.add(self._thawed(owner, frozen))

    def _thawed(self, owner: Owner, frozen: FrozenCache) -> Saved:
        """Return the record of one worker's cache, with all blocks as bytes. It runs in a
        thread.
        """
        return Saved(SnapshotHead(owner, self._wall()), frozen.thawed())


def _provable(worker: Worker) -> FrozenCache | None:
    """Return a frozen copy of a worker's cache, or None if the next router could not prove that the
    worker's events continue from it.
    """
    frozen = worker.kv.frozen()
    return frozen if frozen is not None and frozen.digest else None


def _address(owner: Owner) -> _Address:
    return owner.url, owner.rank


def _age_s(saved: Saved, now: float) -> float:
    """Return the age of a saved cache in seconds. It is 0 if the cache's time is in the future,
    because then the clock was set back.
    """
    return max(now - saved.head.saved_at, 0.0)
