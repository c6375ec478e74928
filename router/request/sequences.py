"""Keeps the requests of each sequence at one worker."""

from __future__ import annotations

from collections import OrderedDict

from router.body.scan import Sequenced


class Sequences:
    """Maps sequences to workers, because all requests of a sequence must go to the same worker.
    Lifetime: process.

    A sequence is remembered from its first request to the one that ends it, or until too many other
    sequences have come since.
    """

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._workers: OrderedDict[tuple[str, str | None, str], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def worker_of(self, model: str, tenant: str | None, sequence: Sequenced) -> int | None:
        """Return the id of the only worker that may get this request; None if any worker may."""
        if sequence.start:
            return None
        return self._workers.get((model, tenant, sequence.id))

    def sent(self, model: str, tenant: str | None, sequence: Sequenced, worker_id: int) -> None:
        """Note that a request of the sequence was sent to this worker."""
        key = model, tenant, sequence.id
        self._workers.pop(key, None)
        if sequence.end:
            return
        self._workers[key] = worker_id
        if len(self._workers) > self._most:
            self._workers.popitem(last=False)
