"""Items go to a thread through a bounded queue: whoever puts one in never waits for a disk."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

_EVERY_S = 0.1  # the thread looks this often; a call that woke it would cost the event loop more
_BATCH_ITEMS = 64  # written at once: other threads get a turn in between


class Sink(Protocol[T_contra]):
    """What the thread does with items. It answers for errors of files itself."""

    def write(self, items: Sequence[T_contra]) -> None:
        """Take the next items, in the order in which they were put."""
        ...

    def reopen(self) -> None:
        """The file may have been moved away."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class Background(Generic[T]):
    """One thread tells it items, a thread of its own writes them. Lifetime: process."""

    def __init__(self, name: str, sink: Sink[T], items_max: int, bytes_max: int) -> None:
        self._sink = sink
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._items: deque[tuple[T, int]] = deque()
        # Each is written by one thread only; their difference is what waits.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._wake = threading.Event()
        self._reopen = threading.Event()
        self._stop = threading.Event()
        self._broken = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T, size_bytes: int) -> bool:
        """Hand an item over that keeps about `size_bytes` alive; False: no room, it is lost."""
        items = self._items
        waiting_bytes = self._put_bytes - self._taken_bytes
        if len(items) >= self._items_max or waiting_bytes > self._bytes_max or self._broken:
            return False
        items.append((item, size_bytes))
        self._put_bytes += size_bytes
        if len(items) * 2 == self._items_max:
            self._wake.set()
        return True

    def reopen(self) -> None:
        """Let the sink open its file anew, soon."""
        self._reopen.set()
        self._wake.set()

    def close(self, timeout_s: float) -> int:
        """Write what waits, and end. Returns how many items were left after `timeout_s`."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)
        return len(self._items)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._wake.wait(_EVERY_S)
                self._wake.clear()
                self._drain()
                if self._reopen.is_set():
                    self._reopen.clear()
                    self._sink.reopen()
            self._drain()
            self._sink.close()
        except Exception:
            self._broken = True
            log.exception(
                "%s ended by a defect of ours; it writes nothing more",
                threading.current_thread().name,
            )

    def _drain(self) -> None:
        while self._items:
            batch = [self._items.popleft() for _ in range(min(len(self._items), _BATCH_ITEMS))]
            self._sink.write([item for item, _ in batch])
            self._taken_bytes += sum(size for _, size in batch)
