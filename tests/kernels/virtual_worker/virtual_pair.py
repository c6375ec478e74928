"""A plain and a native virtual worker that receive the same calls, and a comparison of every
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvkernels.virtual_stats import WorkerStats
from tests.oracles.virtual_worker import Ended, Hashes, VirtualWorker, own_hash

STEP_TIME = (2.1e-5, 3.3e-9, 4.7e-3, 1.3e-8, 3.1e-3, 0.06, 0.002, 15e-6, 1.5)
# So tight that requests wait for every reason there is and preempt each other.
TIGHT: dict[str, Any] = {
    "blocks": 14,
    "block_size": 4,
    "step_time": STEP_TIME,
    "max_num_tokens": 24,
    "max_batch_size": 5,
    "max_model_tokens": 60,
    "min_chunk_tokens": 4,
    "watermark": 0.1,
    "ageing_s": 0.05,
    "max_queue": 12,
    "prefix_wait_tokens": 8,
}


KINDS = (
    *("stored", "removed", "cleared", "stored_host", "removed_host"),
    *(f"{what}_{group}" for group in ("first", "second") for what in ("kept", "dropped")),
)  # kinds of changes


class Twin(Protocol):
    """The interface that the plain and the native virtual worker have in common."""

    def add(
        self,
        request_id: int,
        chain: Hashes,
        prompt_tokens: int,
        max_output_tokens: int,
        priority: int,
        now_ns: int,
        imports: bool = False,
        exports: bool = False,
    ) -> str: ...
    def cancel(self, request_id: int, now_ns: int) -> bool: ...
    def take_reads(self, now_ns: int) -> list[tuple[int, int, int]]: ...
    def end_read(self, request_id: int, arrived: bool, now_ns: int) -> bool: ...
    def release(self, request_id: int, now_ns: int) -> bool: ...
    def next_ns(self) -> int: ...
    def advance(self, now_ns: int) -> Ended: ...
    def progress(self, now_ns: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]: ...
    def stats(self, now_ns: int) -> WorkerStats: ...
    def queued_tokens(self, now_ns: int) -> int: ...
    def hit_blocks(self, chain: Hashes) -> int: ...
    def set_speed(self, speed: float, now_ns: int) -> None: ...
    def clear(self, now_ns: int) -> None: ...
    def abort(self, now_ns: int) -> list[int]: ...
    def snapshot(self, now_ns: int) -> list[tuple[int | None, Hashes]]: ...
    def host_blocks(self, now_ns: int) -> Hashes: ...
    def group_blocks(self, now_ns: int) -> list[Hashes]: ...
    def check(self) -> None: ...


def chain_of(path: Sequence[int]) -> Hashes:
    """Return chain hashes of blocks named by small numbers, so that equal hashes mean equal
    prefixes.
    """
    parent, chain = 1 << 63, []  # no request has such an id: own names stay apart
    for part in path:
        parent = own_hash(parent | 1 << 63, part)
        chain.append(parent)
    return np.array(chain, dtype=np.uint64)


def plain_of(answer: Any) -> Any:
    """Return arrays as lists with their type, so that `==` compares them."""
    if isinstance(answer, np.ndarray):
        return (answer.dtype.str, answer.tolist())
    if isinstance(answer, WorkerStats):
        return answer
    if isinstance(answer, tuple | list):
        return type(answer)(plain_of(one) for one in answer)
    return answer


class Pair:
    """Calls both workers; raises AssertionError if they differ."""

    def __init__(self, native: type[Twin], **options: Any) -> None:
        self.plain: Twin = VirtualWorker(**options)
        self.native: Twin = native(**options)
        self.now_ns = 0
        self.seen = dict.fromkeys((*KINDS, *("first", "finished", "runs", "reads", "released")), 0)
        self.reading: list[int] = []  # told to read, perhaps cancelled since
        self.exporting: list[int] = []  # asked to keep their KV, perhaps not ended

    def both(self, call: str, *arguments: Any) -> Any:
        plain = plain_of(getattr(self.plain, call)(*arguments))
        native = plain_of(getattr(self.native, call)(*arguments))
        assert native == plain, f"{call}{arguments}: native says {native}, plain says {plain}"
        assert type(native) is type(plain)
        return plain

    def at(self, call: str, *arguments: Any) -> Any:
        """Make `call` at both workers, with the time after its other arguments; then compare every
        gauge.
        """
        answer = self.both(call, *arguments, self.now_ns)
        self.compare()
        return answer

    def add(self, request_id: int, *arguments: Any, legs: tuple[bool, bool]) -> str:
        """Add a request to both workers; `legs` says whether it imports and whether it
        exports KV.
        """
        answer = self.both("add", request_id, *arguments, self.now_ns, *legs)
        if legs[1]:
            self.exporting.append(request_id)
        self.compare()
        return str(answer)

    def end_read(self, place: int, arrived: bool) -> None:
        """End the KV read of one request at both workers; `arrived` says whether its KV came."""
        if self.reading:
            request_id = self.reading.pop(place % len(self.reading))
            self.seen["reads"] += self.at("end_read", request_id, arrived)

    def release(self, place: int) -> None:
        """Release the KV that one request has left for others, if it has ended."""
        if self.exporting:
            released = self.at("release", self.exporting[place % len(self.exporting)])
            self.seen["released"] += released

    def compare(self) -> None:
        self.plain.check()
        self.native.check()
        self.both("stats", self.now_ns)
        self.both("queued_tokens", self.now_ns)
        self.both("progress", self.now_ns)

    def run_until(self, end_ns: int) -> None:
        """Call `advance` at each `next_ns` of the native worker, as a driver does. The plain worker
        may stop more often, but reports nothing there.
        """
        while 0 <= (next_ns := self.native.next_ns()) <= end_ns:
            assert next_ns >= self.now_ns
            while 0 <= (between_ns := self.plain.next_ns()) < next_ns:
                assert self.plain.advance(between_ns) == ([], [], [], [])
                self.seen["runs"] += 1
            assert self.plain.next_ns() == next_ns
            self.now_ns = next_ns
            first, _cached, finished, changes = self.both("advance", next_ns)
            self.seen["first"] += len(first)
            self.seen["finished"] += len(finished)
            for kind, _parent, _hashes in changes:
                self.seen[KINDS[kind]] += 1
            reads = self.both("take_reads", next_ns)
            self.reading += [number for number, start, stop in reads if start < stop]
        self.now_ns = max(self.now_ns, end_ns)

    def drain(self) -> None:
        """Run both workers until neither has anything left to compute or to read."""
        while True:
            while (next_ns := self.native.next_ns()) >= 0:
                self.run_until(next_ns)
            if not self.reading and not self.exporting:
                break
            while self.reading:
                self.end_read(0, True)
            while self.exporting:
                self.release(0)
                del self.exporting[0]
        self.compare()
        assert self.plain.next_ns() == -1
