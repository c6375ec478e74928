"""A worker on virtual time: the real scheduler and block pool, with integer nanoseconds and without
tokens.

It takes every step by itself and is the oracle of `kvkernels.VirtualWorker`, its native version,
which gives the same outputs at the same times, many times faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from operator import index

import numpy as np
import numpy.typing as npt
import pytest

from engine.block_pool import BlockPool, Cleared, Removed, Stored
from engine.cache_groups import MAX_COST, MAX_WINDOW, CacheGroup, check_room
from engine.pins import Export
from engine.scheduler.request import Request, State, Tokens
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.types import MAX_LEASE_S, Refused, SchedulerSettings, Step
from engine.step_time import StepTime
from kvkernels.virtual_stats import WorkerStats
from simulator.limits import losses
from simulator.replay import fleet
from tests.oracles.block_pool import check_pool

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_BLOCKS = 2**31 - 1
MAX_NS = 2**62  # a hundred and forty years


def in_range(name: str, value: int, least: int, most: int) -> int:
    """Return `value` as an int from `least` to `most`. Raises ValueError if it is out of range,
    TypeError if it is no integer.
    """
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None
    if not least <= number <= most:
        raise ValueError(f"{name} must be {least}..{most}, got {number}")
    return number


def check_finite(name: str, value: float) -> float:
    """Return `value`. Raises ValueError unless it is finite and greater than 0."""
    if not (isfinite(value) and value > 0.0):
        raise ValueError(f"{name} must be finite and above 0, got {value}")
    return value


def check_time(now_ns: int, last_ns: int) -> int:
    """Return `now_ns`. Raises ValueError if it is earlier than `last_ns` or out of range."""
    in_range("now_ns", now_ns, 0, MAX_NS)
    if now_ns < last_ns:
        raise ValueError(f"now_ns must not go back: got {now_ns} after {last_ns}")
    return now_ns


def check_chain(chain: npt.NDArray[np.uint64]) -> None:
    """Raise TypeError or ValueError unless `chain` is a contiguous vector of uint64."""
    if not isinstance(chain, np.ndarray) or chain.dtype != np.uint64:
        raise TypeError("chain must be a buffer of uint64")
    if chain.ndim != 1:
        raise ValueError(f"chain must have 1 dimension, got {chain.ndim}")
    if not chain.flags.c_contiguous:
        raise ValueError("chain must be C-contiguous, got a strided view")


NO_TOKENS: Tokens = np.zeros(0, dtype=np.int32)
_MASK = (1 << 64) - 1


def own_hash(request_id: int, depth: int) -> int:
    """Return the name of a full block for which no chain was given; it is unique and the same in
    both versions.

    It is the finalizer of splitmix64 (Steele, Lea, Flood, 2014) over request and depth.
    """
    mixed = (request_id * 0x9E3779B97F4A7C15 + depth + 1) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def groups_of(pairs: Sequence[tuple[int, int]], host_blocks: int) -> tuple[CacheGroup, ...]:
    """Return the cache groups of (window tokens, cost) pairs; a window of 0 means states. Raises
    ValueError for bad pairs.
    """
    groups = []
    for window, cost in pairs:
        in_range("window", window, 0, MAX_WINDOW)
        in_range("cost", cost, 1, MAX_COST)
        if window == 1:
            raise ValueError("window must be 0, or 2 and more, got 1")
        groups.append(CacheGroup("window" if window else "state", window, cost))
    if groups and host_blocks:
        raise ValueError("windows and states are not kept in host memory: host blocks must be 0")
    return tuple(groups)


@dataclass(slots=True, eq=False)
class VirtualRequest(Request):
    """A request whose `names` are the chain hashes it came with, maybe including the answer's
    blocks. Lifetime: request.
    """

    names: list[int] = field(default_factory=list)
    zeros: Tokens = field(default_factory=lambda: NO_TOKENS)  # as long as any request may be

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return int32[stop - start] of zeros in place of token ids."""
        return self.zeros[: stop - start]

    def extend_chain(self, full_blocks: int, block_size: int) -> None:
        """Add names until `chain` covers `full_blocks` blocks of prompt and output."""
        self.chain += self.names[len(self.chain) : full_blocks]
        self.chain += [own_hash(self.request_id, at) for at in range(len(self.chain), full_blocks)]


def runs_of(contents: Iterable[Stored]) -> list[tuple[int | None, list[int]]]:
    """Return the stored blocks as runs (parent chain hash, chain hashes after it), parents before
    children.

    Where the tree forks, a run follows the smallest hash, and each of the other hashes starts a run
    of its own.
    """
    children: dict[int | None, list[int]] = {}
    for stored in contents:
        parent = stored.parent_hash
        for block_hash in stored.block_hashes:
            children.setdefault(parent, []).append(block_hash)
            parent = block_hash
    runs: list[tuple[int | None, list[int]]] = []
    starts: list[tuple[int | None, int]] = []  # the next one last
    starts += [(None, one) for one in sorted(children.get(None, ()), reverse=True)]
    while starts:
        parent, first = starts.pop()
        run = [first]
        while following := sorted(children.get(run[-1], ())):
            starts += [(run[-1], one) for one in reversed(following[1:])]
            run.append(following[0])
        runs.append((parent, run))
    return runs


Hashes = npt.NDArray[np.uint64]
Change = tuple[int, int | None, Hashes]
Ended = tuple[list[int], list[int], list[int], list[Change]]

STORED, REMOVED, CLEARED, STORED_HOST, REMOVED_HOST = range(5)  # kinds of changes
_GROUP_KINDS = 5  # stored and removed of the first group, then of the next one
MAX_STEP_NS = 10**15  # eleven days; the longest step there is
NO_HASHES: Hashes = np.zeros(0, dtype=np.uint64)


def hashes_of(values: Sequence[int]) -> Hashes:
    """Return the hashes as an array of uint64."""
    return np.array(values, dtype=np.uint64)


class VirtualWorker:
    """A worker on virtual time. Lifetime: replay.

    Every call gives the time in ns from 0, which never goes back. A call first ends the steps that
    end at or before this time, each followed at once by the next. Their results are kept for
    `advance`, which the driver calls at `next_ns`. `step_time` holds the constants of
    `engine.step_time.StepTime` in the order of its fields; a step lasts that long divided by
    `speed`, rounded half to even, and at least 1 ns. The same holds for loading blocks from the
    host, which keeps `host_blocks`: each block takes `load_block_s`, one load follows the other,
    and a request whose blocks have arrived runs in the step that starts then, or in the next.
    `cache_groups` are (tokens, cost) for windows and (0, cost) for states beside full attention
    (`engine.cache_groups`). The other limits are those of `SchedulerSettings`. Bad arguments raise
    ValueError or TypeError and change nothing.
    """

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        step_time: Sequence[float],
        max_num_tokens: int = 8192,
        max_batch_size: int = 256,
        max_model_tokens: int = 131072,
        min_chunk_tokens: int = 16,
        watermark: float = 0.01,
        ageing_s: float = 10.0,
        max_queue: int = 4096,
        prefix_wait_tokens: int = 256,
        record_events: bool = True,
        speed: float = 1.0,
        host_blocks: int = 0,
        load_block_s: float = 0.0,
        cache_groups: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._settings = SchedulerSettings(
            max_num_tokens=in_range("max_num_tokens", max_num_tokens, 1, MAX_INT32),
            max_batch_size=in_range("max_batch_size", max_batch_size, 1, MAX_INT32),
            max_model_tokens=in_range("max_model_tokens", max_model_tokens, 2, MAX_INT32),
            min_chunk_tokens=in_range("min_chunk_tokens", min_chunk_tokens, 1, MAX_INT32),
            watermark=watermark,
            ageing_s=check_finite("ageing_s", ageing_s),
            max_queue=in_range("max_queue", max_queue, 1, MAX_INT32),
            prefix_wait_tokens=in_range("prefix_wait_tokens", prefix_wait_tokens, 0, MAX_INT32),
            export_lease_s=MAX_LEASE_S,  # the driver ends leases
            max_exports=MAX_INT32,
        )
        if min_chunk_tokens > max_num_tokens:
            raise ValueError(
                f"min_chunk_tokens ({min_chunk_tokens}) must be at most max_num_tokens "
                f"({max_num_tokens}), or a long prompt would never start"
            )
        if len(step_time) != 9:
            raise ValueError(f"step_time must have 9 constants, got {len(step_time)}")
        self._blocks = in_range("blocks", blocks, 1, MAX_BLOCKS)
        self._block_size = in_range("block_size", block_size, 1, MAX_INT32)
        self._step_time = StepTime(*step_time)
        self._record = record_events
        self._speed = check_finite("speed", speed)
        self._host_blocks = in_range("host_blocks", host_blocks, 0, MAX_INT32)
        if not (isfinite(load_block_s) and load_block_s >= 0.0):
            raise ValueError(f"load_block_s must be finite and at least 0, got {load_block_s}")
        self._load_block_s = load_block_s
        self._groups = groups_of(cache_groups, host_blocks)
        check_room(self._groups, block_size, blocks)
        self._zeros = np.zeros(max_model_tokens, dtype=np.int32)
        self._now_ns = self._busy_ns = 0
        self._past = WorkerStats(*[0] * len(WorkerStats._fields))  # before the last `abort`
        self._first: list[int] = []
        self._first_hit_tokens: list[int] = []
        self._finished: list[int] = []
        self._changes: list[Change] = []
        self._reads: list[tuple[int, int, int]]
        self._begin()

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
    ) -> str:
        """Queue a request; return "" or the code of its refusal. Raises ValueError for an id still
        in use.

        `chain` names the full blocks of the prompt and may continue with those that the answer
        completes. If it ends early, blocks get names that no other request has. `imports` says that
        another worker holds the KV of its prompt (`take_reads`). `exports` says that its prompt's
        blocks are held after its end, until `release`.
        """
        in_range("request_id", request_id, 0, MAX_INT64)
        check_chain(chain)
        in_range("prompt_tokens", prompt_tokens, 0, MAX_INT32)
        in_range("max_output_tokens", max_output_tokens, -MAX_INT32, MAX_INT32)
        in_range("priority", priority, -MAX_INT32, MAX_INT32)
        self._settle(now_ns)
        request = VirtualRequest(
            request_id,
            self._zeros[:prompt_tokens],
            max_output_tokens,
            priority,
            names=chain.tolist(),
            zeros=self._zeros,
            imports=imports,
            exports=exports,
        )
        try:
            self._scheduler.add(request, now_ns / 1e9)
        except Refused as refusal:
            return refusal.reason
        if self._step is None:
            self._start_step(now_ns)
        return ""

    def cancel(self, request_id: int, now_ns: int) -> bool:
        """Forget a request; return False if it is finished or was never added."""
        in_range("request_id", request_id, 0, MAX_INT64)
        self._settle(now_ns)
        self._reads = [read for read in self._reads if read[0] != request_id]
        self._loads = [load for load in self._loads if load[1] != request_id]
        request = self._scheduler.requests.get(request_id)
        reads = request is not None and request.state is State.READING
        cancelled = self._scheduler.cancel(request_id)
        if reads:  # its transfer has ended, so nothing writes its blocks any more
            self._scheduler.end_read(request_id, now_ns / 1e9, arrived=False)
        if cancelled and self._step is None:  # others may have waited for its blocks
            self._start_step(now_ns)
        return cancelled

    def take_reads(self, now_ns: int) -> list[tuple[int, int, int]]:
        """Return the requests whose prompt's KV must be read from another worker, new since the
        last call, with the tokens to read: (id, start, stop).

        If there are no tokens to read, the request has begun already.
        """
        self._settle(now_ns)
        reads, self._reads = self._reads, []
        return reads

    def end_read(self, request_id: int, arrived: bool, now_ns: int) -> bool:
        """End a read: the KV has arrived, or the worker computes it. Return False if the request is
        not reading.
        """
        in_range("request_id", request_id, 0, MAX_INT64)
        self._settle(now_ns)
        request = self._scheduler.requests.get(request_id)
        ended = request is not None and request.state is State.READING
        if any(one == request_id for _, one in self._loads):
            return False
        if ended:
            self._scheduler.end_read(request_id, now_ns / 1e9, arrived=arrived)
        self._tell_changes()
        if ended and self._step is None:
            self._start_step(now_ns)
        return ended

    def release(self, request_id: int, now_ns: int) -> bool:
        """Release the held prompt of an ended request, which no worker reads any more; return False
        if none was held.
        """
        in_range("request_id", request_id, 0, MAX_INT64)
        self._settle(now_ns)
        export = self._exports.pop(request_id, None)
        if export is None:
            return False
        self._scheduler.exports.release(export)
        if self._step is None:
            self._start_step(now_ns)
        return True

    def next_ns(self) -> int:
        """Return the time of the next call of `advance`, or -1 if there is nothing to do before
        another call.
        """
        if self._first or self._finished or self._changes or self._reads:
            return self._now_ns
        if self._step is not None:
            return self._end_ns
        return self._loads[0][0] if self._loads else -1

    def advance(self, now_ns: int) -> Ended:
        """Return what happened since the last call.

        These are the ids of requests that got their first token, their prompt tokens found cached
        at the first admission, the ids of finished requests, and the cache's changes in order: (0
        stored, parent chain hash or None, hashes), (1 removed, None, hashes), (2 cleared, None,
        none); those of the host: (3 stored, None, hashes), (4 removed, None, hashes); those of the
        nth group beside full attention: (3 + 2n stored, parent chain hash, hashes), (4 + 2n
        removed, None, hashes). Blocks that a step evicts are reported at its end, as engines do.
        """
        self._settle(now_ns)
        ended = (self._first, self._first_hit_tokens, self._finished, self._changes)
        self._first, self._first_hit_tokens, self._finished, self._changes = [], [], [], []
        return ended

    def progress(self, now_ns: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return ids and output tokens so far of the running requests past their first token, in
        the order in which they are served.
        """
        self._settle(now_ns)
        running = [one for one in self._running() if one.output]
        running.sort(key=lambda one: one.queue_key)
        ids = np.array([one.request_id for one in running], dtype=np.int64)
        return ids, np.array([len(one.output) for one in running], dtype=np.int32)

    def stats(self, now_ns: int) -> WorkerStats:
        """Return counters and gauges at `now_ns`."""
        self._settle(now_ns)
        scheduler, pool, past = self._scheduler, self._pool, self._past
        in_flight_ns = 0 if self._step is None else now_ns - self._start_ns
        return WorkerStats(
            busy_ns=self._busy_ns + in_flight_ns,
            steps=past.steps + scheduler.steps_total,
            running=scheduler.running,
            waiting=scheduler.waiting,
            used_blocks=pool.used_blocks,
            evicted=past.evicted + pool.evicted_total,
            preemptions=past.preemptions + scheduler.preemptions_total,
            recomputed_tokens=past.recomputed_tokens + scheduler.recomputed_tokens_total,
            query_tokens=past.query_tokens + scheduler.prefix_query_tokens_total,
            hit_tokens=past.hit_tokens + scheduler.prefix_hit_tokens_total,
            host_blocks=len(pool.host),
            host_hit_tokens=past.host_hit_tokens + scheduler.host_hit_tokens_total,
        )

    def queued_tokens(self, now_ns: int) -> int:
        """Return the tokens that prefills must still compute: the uncached ones of waiting requests
        and the rest of running ones.

        The method visits every request, while the figures of `stats` are at hand.
        """
        self._settle(now_ns)
        return sum(map(self._left_tokens, self._scheduler.requests.values()))

    def hit_blocks(self, chain: Hashes) -> int:
        """Return how many leading blocks of `chain` can be reused, at the time of the last call
        with a time.
        """
        check_chain(chain)
        return self._pool.reusable(chain.tolist(), len(chain))

    def set_speed(self, speed: float, now_ns: int) -> None:
        """Divide the length of later steps by `speed`; the step that is running keeps its
        length.
        """
        check_finite("speed", speed)
        self._settle(now_ns)
        self._speed = speed

    def clear(self, now_ns: int) -> None:
        """Clear the cache; blocks that running requests hold stay private to them."""
        self._settle(now_ns)
        self._pool.clear()
        self._tell_changes()

    def abort(self, now_ns: int) -> list[int]:
        """Let the process die; return the ids of unfinished requests, oldest first.

        It starts again at once, with nothing cached and nothing queued; results from before are
        still reported.
        """
        self._past = self.stats(now_ns)
        self._busy_ns = self._past.busy_ns
        unfinished = list(self._scheduler.requests)
        self._begin()
        return unfinished

    def snapshot(self, now_ns: int) -> list[tuple[int | None, Hashes]]:
        """Return the visible blocks as (parent chain hash, chain hashes after it), parents first.

        Where the tree forks, a run follows the smallest hash; the other runs come after it.
        """
        self._settle(now_ns)
        snapshot = self._pool.snapshot()
        on_gpu = (one for one in snapshot if one.tier == "gpu" and not one.group)
        return [(parent, hashes_of(run)) for parent, run in runs_of(on_gpu)]

    def host_blocks(self, now_ns: int) -> Hashes:
        """Return the chain hashes of the blocks in the host's memory, parents first if both are
        there.
        """
        self._settle(now_ns)
        in_host = (one for one in self._pool.snapshot() if one.tier == "host")
        return hashes_of([block_hash for one in in_host for block_hash in one.block_hashes])

    def group_blocks(self, now_ns: int) -> list[Hashes]:
        """Return, for each group of windows or states, the chain hashes of the blocks that it
        keeps, oldest first.
        """
        self._settle(now_ns)
        kept = [place for place, _ in self._pool.groups or ()]
        numbers = range(1, len(self._groups) + 1)
        return [hashes_of([one for group, one in kept if group == number]) for number in numbers]

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        check_pool(self._pool)
        requests = self._scheduler.requests.values()
        held = {block for one in requests for block in (*one.block_ids, *one.group_ids)}
        held |= {block for one in self._exports.values() for block in one.block_ids}
        assert len(held) == self._pool.used_blocks, "blocks are held by nobody"
        rests = self._exports or any(one.state is State.READING for one in requests)
        assert self._step is not None or not requests or rests, "requests, but no step"

    def _begin(self) -> None:
        """Begin with an empty cache, an empty queue and no step."""
        self._pool = BlockPool(
            self._blocks,
            self._block_size,
            host_blocks=self._host_blocks,
            groups=self._groups,
        )
        self._scheduler = Scheduler(self._settings, self._pool)
        self._reads = []
        self._loads: list[tuple[int, int]] = []  # (end in ns, request), in this order
        self._link_free_ns = 0
        self._exports: dict[int, Export] = {}  # by request
        self._step: Step | None = None
        self._start_ns = self._end_ns = 0

    def _settle(self, now_ns: int) -> None:
        """End all steps that end at or before `now_ns`, and begin the next ones."""
        self._now_ns = check_time(now_ns, self._now_ns)
        while True:
            if self._step is not None and self._end_ns <= now_ns:
                self._end_step(self._step)
            elif self._step is None and self._loads and self._loads[0][0] <= now_ns:
                self._start_step(self._loads[0][0])
            else:
                return

    def _end_step(self, step: Step) -> None:
        end_ns = self._end_ns
        self._busy_ns += end_ns - self._start_ns
        tokens = {one.request_id: 0 for one in step.sampled}
        for request, _token, finished in self._scheduler.complete(step, tokens, end_ns / 1e9):
            if len(request.output) == 1:
                self._first.append(request.request_id)
                self._first_hit_tokens.append(request.cached_tokens)
            if finished:
                self._finished.append(request.request_id)
                if request.export is not None:
                    before = self._exports.pop(request.request_id, None)
                    if before is not None:
                        self._scheduler.exports.release(before)
                    self._exports[request.request_id] = request.export
        self._tell_changes()
        self._start_step(end_ns)

    def _end_loads(self, now_ns: int) -> None:
        """End the loads from host memory that have arrived by now; their requests may run in the
        next step.
        """
        if not self._loads or self._loads[0][0] > now_ns:
            return
        while self._loads and self._loads[0][0] <= now_ns:
            _, request_id = self._loads.pop(0)
            self._scheduler.end_read(request_id, now_ns / 1e9, arrived=True)
        self._tell_changes()

    def _start_load(self, now_ns: int, request_id: int, blocks: int) -> None:
        length_ns = self._load_block_s * blocks / self._speed * 1e9
        length_ns = length_ns if length_ns < MAX_STEP_NS else MAX_STEP_NS
        self._link_free_ns = max(self._link_free_ns, now_ns) + max(1, round(length_ns))
        self._loads.append((self._link_free_ns, request_id))

    def _start_step(self, now_ns: int) -> None:
        self._end_loads(now_ns)
        step = self._step = self._scheduler.schedule(now_ns / 1e9)
        for request, start, stop, source in self._scheduler.take_reads():
            if source == "host":
                self._start_load(now_ns, request.request_id, (stop - start) // self._block_size)
            else:
                self._reads.append((request.request_id, start, stop))
        if step is not None:
            assert step.decodes or step.chunks, "a step that computes nothing"
            length_ns = self._step_time.seconds(step) / self._speed * 1e9
            # Not `>`, because a value that overflowed may be NaN.
            length_ns = length_ns if length_ns < MAX_STEP_NS else MAX_STEP_NS
            self._start_ns, self._end_ns = now_ns, now_ns + max(1, round(length_ns))

    def _tell_changes(self) -> None:
        for event in self._pool.drain_events():
            if not self._record:
                continue
            group = 0 if isinstance(event, Cleared) else event.group or 0
            of_group = _GROUP_KINDS + 2 * (group - 1) if group else 0
            if isinstance(event, Stored):
                kind = of_group + (STORED if event.tier == "gpu" else STORED_HOST)
                self._changes.append((kind, event.parent_hash, hashes_of(event.block_hashes)))
            elif isinstance(event, Removed):
                kind = of_group + (REMOVED if event.tier == "gpu" else REMOVED_HOST)
                self._changes.append((kind, None, hashes_of(event.block_hashes)))
            else:
                self._changes.append((CLEARED, None, NO_HASHES))

    def _running(self) -> list[Request]:
        requests = self._scheduler.requests.values()
        return [one for one in requests if one.state is State.RUNNING]

    def _left_tokens(self, request: Request) -> int:
        """Return the tokens that prefills must still compute for the request."""
        if request.state is State.RUNNING:
            return max(0, request.prefill_target - request.computed_tokens)
        if request.state is State.READING:
            return request.total_tokens - request.read_target
        if request.imports:
            return 1
        limit = (request.total_tokens - 1) // self._block_size
        hit = self._pool.reusable(request.chain, limit)
        hit += self._pool.host.hit(request.chain, hit, limit)
        return request.total_tokens - hit * self._block_size


@contextmanager
def plain_workers() -> Iterator[None]:
    """Make replays and bounds use the plain worker instead of the native one while the context
    lasts.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "VirtualWorker", VirtualWorker)
        patch.setattr(losses, "VirtualWorker", VirtualWorker)
        yield
