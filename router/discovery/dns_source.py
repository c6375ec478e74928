"""Workers behind a name: each of its addresses is one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

from router.config.worker_spec import WorkerSpecError
from router.discovery.source import DnsSpec, Report, ReportedWorker, bounded

ANSWER_S = 5.0  # after this the name does not resolve, for now


class DnsSource:
    """Lifetime: as long as it is named. One question at a time, however long the resolver takes."""

    def __init__(self, spec: DnsSpec, answer_s: float = ANSWER_S) -> None:
        self._spec = spec
        self._answer_s = answer_s
        self._asking: asyncio.Task[Report] | None = None

    async def reports(self) -> AsyncIterator[Report]:
        """One for each answer."""
        while True:
            yield await self._asked()
            await asyncio.sleep(self._spec.every_s)

    async def _asked(self) -> Report:
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        # A look-up runs in a thread, which nobody can stop: it is waited for again next time.
        done, _ = await asyncio.wait({self._asking}, timeout=self._answer_s)
        if not done:
            return Report(None, f"{self._spec.name}: no answer from DNS in {self._answer_s:g} s")
        answer, self._asking = self._asking, None
        return answer.result()

    async def _ask(self) -> Report:
        spec = self._spec
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(spec.name, spec.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            return Report(None, f"{spec.name} does not resolve: {error}")
        seen: dict[str, ReportedWorker] = {}
        refused: list[str] = []
        for address in sorted({str(entry[4][0]) for entry in found}):
            try:
                worker = spec.template.at(address, spec.port, spec.name)
            except WorkerSpecError as error:
                refused.append(f"{address}: {error}")
            else:
                seen[worker.url] = ReportedWorker(worker)
        return bounded(list(seen.values()), refused)
