"""Workers all of whose streams stand still at once: a stopped process, a hung device.

A stream may pause by itself, for as long as another prompt's prefill takes; so this is a reason
to ask a worker whether it is well, and no verdict.
"""

from __future__ import annotations


class Silence:
    """When workers with running streams were last heard. Lifetime: process.

    `stall_s`: silence of all streams of a worker that makes it suspect.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._streams: dict[int, set[int]] = {}  # worker -> requests past their first token
        self._heard_s: dict[int, float] = {}  # worker -> the latest byte, or question
        self._asked_s: dict[int, float] = {}  # worker -> when it was asked, until it is heard

    def heard(self, worker_id: int, request_id: int, now_s: float) -> None:
        """A stream of this worker began or grew."""
        streams = self._streams.get(worker_id)
        if streams is None:
            streams = self._streams[worker_id] = set()
        streams.add(request_id)
        self._heard_s[worker_id] = now_s
        self._asked_s.pop(worker_id, None)

    def over(self, worker_id: int, request_id: int) -> None:
        """A request is there no more."""
        streams = self._streams.get(worker_id)
        if streams is not None:
            streams.discard(request_id)
            if not streams:
                del self._streams[worker_id], self._heard_s[worker_id]
                self._asked_s.pop(worker_id, None)

    def suspects(self, now_s: float) -> list[int]:
        """Workers to ask now; each once in `stall_s` for as long as it stays silent."""
        limit_s = now_s - self._stall_s
        suspects = [worker_id for worker_id, at_s in self._heard_s.items() if at_s <= limit_s]
        for worker_id in suspects:
            self._heard_s[worker_id] = self._asked_s[worker_id] = now_s
        return suspects

    def still(self, worker_id: int) -> bool:
        """Whether nothing was heard of it since it was asked, though streams run there."""
        return worker_id in self._asked_s
