"""Sequences of requests, each of which has to stay with one worker."""

from __future__ import annotations

from collections import OrderedDict

from router.body.scan import Sequenced


class Sequences:
    """Which worker has which sequence: all its requests must meet the same one.

    Lifetime: process. A sequence is known from its first request to the one that ends it, or until
    so many others came since.
    """

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._workers: OrderedDict[tuple[str, str | None, str], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def worker_of(self, model: str, tenant: str | None, sequence: Sequenced) -> int | None:
        """The only worker that may have this request; None: any may."""
        if sequence.start:
            return None
        return self._workers.get((model, tenant, sequence.id))

    def sent(self, model: str, tenant: str | None, sequence: Sequenced, worker_id: int) -> None:
        """A request of it goes to this worker."""
        key = model, tenant, sequence.id
        self._workers.pop(key, None)
        if sequence.end:
            return
        self._workers[key] = worker_id
        if len(self._workers) > self._most:
            self._workers.popitem(last=False)
