"""Saves what is known of the workers' caches, and gives it back to those that come again.

One worker after another, and its bytes are written in a thread: the event loop is held for the
copy of one worker's blocks at most. A router that ends saves once more. What a file holds is
believed of a worker of the same address, kind, models and block size, and only when the core has
seen proof that its publisher is still the same one (`router.core.kv_state`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from policies.facts import WorkerChange, WorkerFacts
from router.core.core import RouterCore
from router.fleet_io.member import Member
from router.fleet_io.recognize import Recognized
from router.state.saved_file import Head, Owner, Saved, SavedFile, SavedFileError, read_saved

log = logging.getLogger(__name__)

_Address = tuple[str, int | None]  # URL and rank


class StateKeeper:
    """Lifetime: process."""

    def __init__(
        self, path: Path, core: RouterCore, members: Callable[[], Mapping[int, Member]]
    ) -> None:
        self.saves = 0
        self.failed_saves = 0
        self._path = path
        self._core = core
        self._members = members
        self._waiting: dict[_Address, Saved] = {}  # for workers that have not come yet
        self._timer: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Read the file, before any worker joins. One that cannot be used is left aside."""
        try:
            found = await asyncio.to_thread(read_saved, self._path)
        except FileNotFoundError:
            log.info("kv_state: %s does not exist yet; caches are learned anew", self._path)
        except (OSError, SavedFileError) as error:
            log.warning("kv_state: %s is not used, caches are learned anew: %s", self._path, error)
        else:
            self._waiting = {(one.head.owner.url, one.head.owner.rank): one for one in found}
            log.info("kv_state: %s has the caches of %d workers", self._path, len(found))

    def with_saved(self, fact: WorkerChange) -> WorkerChange:
        """The fact, with what was saved of a worker that joins."""
        member = self._members().get(fact.worker_id)
        if not self._waiting or fact.spec is None or member is None or member.recognized is None:
            return fact
        owner = _owner(member, member.recognized, fact.spec)
        saved = self._waiting.pop((owner.url, owner.rank), None)
        if saved is None or self._core.workers.get(fact.worker_id) is not None:
            return fact
        if saved.head.owner != owner:
            log.info("worker %d: not the one whose cache was saved", fact.worker_id)
            return fact
        log.info(
            "worker %d: its cache was saved (%d bytes), to be proven by batch %d of its events",
            fact.worker_id,
            len(saved.blocks),
            saved.head.next_seq - 1,
        )
        return replace(fact, saved=saved.stream)

    def start(self, interval_s: Callable[[], float]) -> None:
        """Save at every interval from now on."""
        self._timer = asyncio.create_task(self._run(interval_s), name="kv_state")

    async def close(self) -> None:
        """Save once more, and end; where nothing was started, there is nothing new to save."""
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.wait([self._timer])
            await self.save()

    async def save(self) -> None:
        """Write all there is. A failure is logged, and the file before stays.

        One saving at a time; cancelling this stops the waiting only.
        """
        if self._saving is not None:
            await asyncio.wait([self._saving])
        self._saving = asyncio.create_task(self._save(), name="kv_state writes")
        await asyncio.shield(self._saving)

    async def _run(self, interval_s: Callable[[], float]) -> None:
        while True:
            await asyncio.sleep(interval_s())
            self._waiting.clear()  # who has not come by now has begun anew
            await self.save()

    async def _save(self) -> None:
        file = None
        try:
            file = await asyncio.to_thread(SavedFile, self._path)
            for worker_id in list(self._members()):
                if (saved := self._saved(worker_id)) is not None:
                    await asyncio.to_thread(file.add, saved)
            for saved in list(self._waiting.values()):
                await asyncio.to_thread(file.add, saved)
            size_bytes = await asyncio.to_thread(file.finish)
        except OSError as error:
            self.failed_saves += 1
            log.error("kv_state: cannot write %s: %s", self._path, error.strerror or error)
            if file is not None:
                await asyncio.to_thread(file.abandon)
        else:
            self.saves += 1
            log.debug("kv_state: %d bytes written to %s", size_bytes, self._path)

    def _saved(self, worker_id: int) -> Saved | None:
        member, worker = self._members().get(worker_id), self._core.workers.get(worker_id)
        if member is None or worker is None or member.recognized is None:
            return None
        stream = worker.kv.saved()
        if stream is None:
            return None
        owner = _owner(member, member.recognized, worker.facts)
        return Saved(Head(owner, stream.next_seq, stream.digest, stream.known), stream.blocks)


def _owner(member: Member, recognized: Recognized, facts: WorkerFacts) -> Owner:
    kind, address = recognized.kind, recognized.address
    return Owner(member.spec.url, address, kind, facts.models, facts.block_size)
