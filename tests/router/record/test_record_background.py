"""Tests of the queue of lines to be written to disk: it is bounded, keeps the order, and never
blocks its callers.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from router.record.log_files import Background


class Blocked:
    """A sink whose disk hangs until the test releases it. Lifetime: test."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.busy = threading.Event()
        self.written: list[int] = []

    def write(self, items: Any) -> None:
        self.busy.set()
        self.go.wait()
        self.written += items

    def reopen(self) -> None:
        raise AssertionError("nobody asked")

    def close(self) -> None:
        self.written.append(-1)


@pytest.mark.parametrize(("items_max", "bytes_max", "room"), [(10, 1 << 20, 10), (99, 35, 4)])
def test_a_slow_disk_loses_items_and_never_blocks_the_caller(
    items_max: int, bytes_max: int, room: int
) -> None:
    sink = Blocked()
    queue: Background[int] = Background("slow", sink, items_max, bytes_max)
    assert queue.put(0, 0)
    assert sink.busy.wait(10)
    assert [queue.put(n, 10) for n in range(1, 21)] == [True] * room + [False] * (20 - room)
    assert queue.close(0.0) == room
    sink.go.set()
    assert queue.close(10.0) == 0
    assert sink.written == [*range(room + 1), -1]


def test_an_exception_in_the_sink_is_logged_and_ends_only_the_queue(caplog) -> None:
    class Broken(Blocked):
        def write(self, items: Any) -> None:
            self.busy.set()
            raise ZeroDivisionError

    queue: Background[int] = Background("broken", Broken(), 10, 100)
    assert queue.put(1, 1)
    assert queue.close(10.0) == 0
    assert not queue.put(2, 1)
    assert "ZeroDivisionError" in caplog.text
