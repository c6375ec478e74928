"""Applies one worker's KV events in order, and judges how well its cache is known.

The batches of a worker's events are numbered from 0. Only `KvState` decides which batches are
missing; a feed carries out its requests, and asks the worker for a snapshot while `KvState` wants
one. The state is one of these:

- *exact*: all batches before `next_seq` were applied, and no later batch is known to exist.
- *asked* (`resyncing`): after a gap, the missed batches are requested again, and later batches
  wait. If a replay brings some of the missed batches, another replay is requested; otherwise a
  snapshot is wanted.
- *half told*: a replay goes beyond all batches that the router knew of, so more batches may follow
  until the replay ends.
- *lower bound*: the replay ended and the gap remains, so all known blocks are dropped, and the
  record is built again from later events. A snapshot, batch 0 or a cleared cache makes it exact.
- *lower bound* with all known blocks kept: a replay brought a batch that cannot be read.
- *turned over*: since then, as many blocks were stored as the cache holds; the cache counts as
  known, but not as exact.
- *crowded*: the index is at its limit and forgot blocks of the worker; the rest is a lower bound
  until the whole cache is reported again or has turned over.

A number identifies a batch only until its publisher restarts; the digest of its payload identifies
it for good. So a replay is requested from one batch before the first missing one. If that batch
comes with another digest, the publisher has restarted unnoticed. If there are no digests, the
numbers alone decide.

If the connection was lost and nothing shows what was missed, the record is a lower bound, even if
the numbers continue, because a restarted publisher may have published as many batches. A snapshot,
a copy, or the start time of the engine's process proves that the publisher did not restart. An
answer that finds nothing of what the events promised (*severed*) disproves it.

If another router reads the events, a copy of its record comes first, and then the batches that it
applied, in order (`router.replicas.kv_events`). Until they arrive, the worker is *unheard*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from kvkernels import PrefixIndex, WorkerBlocks
from policies.contract import Hashes
from policies.facts import CacheSnapshot, KvEvents
from router.core.workers.block_sizes import BlockSizes
from router.core.workers.engine_names import EngineNames
from router.core.workers.kv_events import Applied, WireEvents, apply_events, gpu_blocks_in
from router.core.workers.snapshot import FrozenCache


@dataclass(slots=True)
class KvCounters:
    """Counters about one worker's KV events, for metrics.

    Lifetime: worker.
    """

    batches: int = 0
    stored_blocks: int = 0  # on the GPU
    removed_blocks: int = 0
    clears: int = 0
    gaps: int = 0
    restarts: int = 0
    duplicates: int = 0
    orphans: int = 0  # stored blocks that waited for their parent
    dropped_batches: int = 0  # beyond the backlog while a gap was open
    overflows: int = 0  # more blocks stored than fit: evictions were missed, or reports are wrong
    refused_copies: int = 0  # of a peer's account of the cache: damaged, or of another model
    skipped_events: int = 0  # partial blocks, foreign block sizes, other groups, parked too long

    def with_blocks(self, blocks: WorkerBlocks, skipped_facts: int) -> KvCounters:
        """Copy counters from `blocks`, the record of the worker's blocks, and return this object.
        `skipped_facts` is the number of unusable events that were not passed to `blocks`.
        """
        self.stored_blocks = blocks.stored_blocks
        self.removed_blocks = blocks.removed_blocks
        self.orphans = blocks.orphans
        self.skipped_events = skipped_facts + blocks.skipped_events
        return self


class Turnover:
    """Counts the blocks that a worker has stored since the router lost track of its cache. Once the
    worker has stored as many blocks as its cache holds (`over`), all blocks that were cached before
    should have been evicted, except those that were used again. Lifetime: worker.
    """

    def __init__(self, capacity_blocks: float) -> None:
        self.over = False
        self._capacity_blocks = capacity_blocks
        self._stored_at_loss = 0

    def resize(self, capacity_blocks: float) -> None:
        """Set how many blocks the worker's cache holds."""
        self._capacity_blocks = capacity_blocks

    def has_room(self, blocks: int) -> bool:
        """Return True if the worker's cache can hold `blocks` blocks."""
        return blocks <= self._capacity_blocks

    def begin(self, stored_blocks: int, over: bool = False) -> None:
        """Restart the count of stored blocks, because the router lost track of the worker's cache.
        `stored_blocks` is the number of blocks that the worker has ever stored. `over` is True if a
        snapshot or a peer's copy says that enough blocks have been stored already.
        """
        self.over = over
        self._stored_at_loss = stored_blocks

    def stored(self, stored_blocks: int) -> None:
        """Set `over` to True if the worker has stored enough blocks, so that its cache is known
        again. `stored_blocks` is the number of blocks that the worker has ever stored.
        """
        self.over |= stored_blocks - self._stored_at_loss >= self._capacity_blocks


# Share of its blocks that must have been evicted before their number counts as its capacity.
_PROOF = 1 / 16


class LearnedCapacity:
    """Learns how many blocks a worker's GPU holds, from its KV events.

    Whenever the worker evicts blocks, its cache is full. The largest number of blocks at such a
    time is the estimate. It is too low by the unfinished blocks, which events do not report.
    Lifetime: until the engine restarts.
    """

    def __init__(self) -> None:
        self._most_blocks = 0
        self._pushed_out = 0

    def pushed_out(self, blocks: int, held: int) -> None:
        """Record that the worker's GPU evicted `blocks` blocks while it held `held` blocks."""
        self._pushed_out += blocks
        self._most_blocks = max(self._most_blocks, held)

    @property
    def blocks(self) -> float:
        """The learned capacity in blocks; NaN until enough blocks were evicted to trust it."""
        proven = self._pushed_out > 0 and self._pushed_out >= self._most_blocks * _PROOF
        return float(self._most_blocks) if proven else math.nan


_DIGESTS = 512  # of the latest batches


class Publisher:
    """Detects from a worker's batches of KV events whether their publisher, the engine, restarted.

    It remembers the numbers and the digests (hashes of the payload) of recent batches.
    Lifetime: worker.
    """

    def __init__(self) -> None:
        self._digests: dict[int, int] = {}  # by number, of the latest batches applied, oldest first
        self.live_seq = -1  # the highest number of this life that came live
        self.last_seq = -1  # ... or any other way
        self._replayed_seq = -1  # of the running replay
        self._outdated_seq = -1  # a publisher that is gone had replayed up to here

    def note_received(self, batch: KvEvents) -> None:
        """Record the number of a batch or snapshot that arrived and was published since the
        engine's latest restart.
        """
        self.last_seq = max(self.last_seq, batch.seq)
        if batch.source == "live":
            self.live_seq = max(self.live_seq, batch.seq)
        elif batch.source == "replay":
            self._replayed_seq = batch.seq

    def applied(self, seq: int, digest: int) -> None:
        """Remember the digest of an applied batch; 0 means that the digest is unknown."""
        if not digest:
            return
        if len(self._digests) >= _DIGESTS:
            del self._digests[next(iter(self._digests))]
        self._digests[seq] = digest

    def digest(self, seq: int) -> int:
        """Return the digest of the recently applied batch `seq`, or 0 if it is not remembered."""
        return self._digests.get(seq, 0)

    def is_known(self, batch: KvEvents) -> bool:
        """Return True if a batch with the same number and the same digest was applied before."""
        return 0 != self.digest(batch.seq) == batch.digest

    def has_restarted(self, batch: KvEvents, kept: bool) -> bool:
        """Return True if a batch proves that the engine has restarted since earlier batches. `kept`
        is True if the same batch arrived before and waits for missing batches.
        """
        if batch.source == "live" and batch.seq <= self.live_seq:
            return not (kept or self.is_known(batch))
        return bool(self.digest(batch.seq) and batch.digest) and not self.is_known(batch)

    def is_outdated(self, seq: int) -> bool:
        """Return True if a replayed batch comes from before the engine's latest restart.

        A live batch may show a restart while a replay of older batches still runs. The batches of
        that replay have rising numbers. A lower number shows that a new replay has begun.
        """
        if seq > self._outdated_seq >= 0:
            self._outdated_seq = seq
            return True
        self._outdated_seq = -1
        return False

    def continue_from_copy(
        self, next_seq: int, live_seq: int, digest: int, waiting_seq: int
    ) -> None:
        """Continue from another router's copy, which covers the batches before `next_seq`.
        `live_seq` is the highest number of a batch that the other router received as it was
        published, and `digest` is the digest of the last batch that the copy covers. `waiting_seq`
        is the last batch that this router itself received and has not applied, or -1.
        """
        self.on_restart()
        self.live_seq = max(live_seq, waiting_seq)
        self.last_seq = max(next_seq - 1, waiting_seq)
        self.applied(next_seq - 1, digest)

    def forget_digests(self) -> None:
        """Forget the digests of applied batches, because these batches may be from before a
        restart.
        """
        self._digests.clear()

    def replay_ended(self) -> None:
        """Record that the running replay of batches has ended."""
        self._replayed_seq = self._outdated_seq = -1

    def on_restart(self, batch: KvEvents | None = None) -> None:
        """Forget the numbers and digests of all batches, because the engine restarted. `batch` is
        the batch that showed the restart, or None.
        """
        seen_live = batch is not None and batch.source == "live"
        self._outdated_seq = self._replayed_seq if seen_live else -1
        self.live_seq = self.last_seq = self._replayed_seq = -1
        self._digests.clear()


MAX_BYTES = 64 << 20  # on the wire; as much as our engine keeps for replays


class Backlog:
    """Batches of one worker's KV events that wait until missing batches before them arrive.

    At most `limit` batches and `MAX_BYTES` are kept.
    Lifetime: worker.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self.batches: dict[int, KvEvents] = {}  # by number; changed only here
        self._seqs: list[int] = []  # a heap of their numbers, and of some that were taken out

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def first_seq(self) -> int:
        """The lowest number of the waiting batches. At least one batch must be waiting."""
        while self._seqs[0] not in self.batches:
            heappop(self._seqs)
        return self._seqs[0]

    @property
    def last_seq(self) -> int:
        """The highest number of the waiting batches, or -1 if none is waiting."""
        return max(self.batches, default=-1)

    def keep(self, batch: KvEvents) -> int:
        """Add a batch, and drop the batches with the lowest numbers if there are too many.

        Return how many batches were dropped.
        """
        before = self.batches.get(batch.seq)
        if before is None:
            heappush(self._seqs, batch.seq)
        else:
            self._bytes -= _size_bytes(before)
        self.batches[batch.seq] = batch
        self._bytes += _size_bytes(batch)
        dropped = 0
        while len(self) > self._limit or (self._bytes > MAX_BYTES and len(self) > 1):
            self.pop(self.first_seq)
            dropped += 1
        return dropped

    def has(self, batch: KvEvents) -> bool:
        """Return True if a batch with the same number and the same digest waits already."""
        kept = self.batches.get(batch.seq)
        return kept is not None and 0 != kept.digest == batch.digest

    def digest(self, seq: int) -> int:
        """Return the digest of the waiting batch `seq`.

        Return 0 if this batch does not wait or its digest is unknown.
        """
        kept = self.batches.get(seq)
        return 0 if kept is None else kept.digest

    def pop(self, seq: int) -> KvEvents | None:
        """Remove the waiting batch `seq` and return it, or return None if it does not wait."""
        batch = self.batches.pop(seq, None)
        if batch is not None:
            self._bytes -= _size_bytes(batch)
        while self._seqs and self._seqs[0] not in self.batches:
            heappop(self._seqs)
        return batch

    def drop_before(self, seq: int) -> None:
        """Drop all waiting batches whose number is below `seq`."""
        while self.batches and self.first_seq < seq:
            self.pop(self.first_seq)

    def clear(self) -> None:
        """Drop all batches of KV events that wait for missing ones."""
        self._bytes = 0
        self.batches.clear()
        self._seqs.clear()


def _size_bytes(batch: KvEvents) -> int:
    return batch.events.size_bytes if isinstance(batch.events, WireEvents) else 0


_PROVING_REPORTS = 2  # of the same process, after a connection was lost
USELESS_EVENTS = 16  # that could not be used, and none that could
Guess = Literal["sizes", "useless"]  # blocks of several sizes; no usable event
ROOM_SLACK = 1.25  # a worker may report this many times its capacity


class KvState:
    """Applies one worker's KV events in order, and tracks how well they show the worker's cache.

    It decides which batches are missing and must be replayed.
    Lifetime: worker.
    """

    def __init__(
        self,
        index: PrefixIndex,
        slot: int,
        block_size: int,
        model: str,
        capacity_blocks: float,
        parked_blocks: int,
        backlog_batches: int,
        resident_blocks: int,
        keeps_copies: bool = False,
        on_left: Callable[[Hashes], None] = lambda hashes: None,
    ) -> None:
        """Start with an unknown cache, whose blocks `index` will record in the worker's `slot`.
        `parked_blocks` and `backlog_batches` limit the blocks and batches that may wait for missing
        ones. `resident_blocks` limits the blocks that are recorded of this worker. `keeps_copies`
        is True if the engine may hold equal blocks twice, with KV events for each. `on_left` is
        called with the chain hashes of blocks that left the GPU, by KV events.
        """
        self._on_left = on_left
        self._terms = model, parked_blocks, keeps_copies
        self.blocks = WorkerBlocks(index, slot, block_size, *self._terms)
        self.names = EngineNames(model)
        self.sizes = BlockSizes(block_size)
        self._sizes_seen: dict[int, tuple[int, int]] = {}  # of `blocks`, of other sizes
        self._own_seen = self._skipped_seen = 0
        self._unusable = self._stored_before = 0  # useless events of this life; blocks before it
        # Why its events are of no use, so that its cache is guessed; empty where they are.
        self.guessed: Guess | None = None
        self._index, self._slot = index, slot
        self._block_size = block_size
        self._resident_blocks_max = resident_blocks
        self._gpu_blocks_max = resident_blocks
        self._counters = KvCounters()
        self.resyncing = False  # a replay was asked for and has not ended
        self._exact = False  # all before `next_seq` was seen
        self._turnover = Turnover(capacity_blocks)  # since it was not, or was crowded
        self._evicted_blocks = 0  # by the index, as of the latest batch
        self._learned = LearnedCapacity()
        self._doubtful = False  # another router saved the known state, and it is unproven
        self._overflowed = False  # it holds more than may be recorded of one worker
        self.unheard = False  # a peer reads the events, and they do not arrive; set from outside
        # The connection was lost, and it is not shown yet that the publisher has not restarted.
        self.severed = False
        self._started_s = math.nan  # its process, by its load reports before that
        self._reports = 0  # since then, of the same start time
        self.next_seq = 0  # number of the batch that continues what was applied
        # Blocks that it held as of the latest complete replay, snapshot or copy, with those stored
        # while its events were not followed. 0: all events came live.
        self.told_blocks = 0
        self._replayed = False  # some batches came by the running replay
        self._beyond = False  # a replay brought more than was heard of, and has not ended
        self._progressed = False  # the replay brought something new
        self._skips: Counter[str] = Counter()  # facts that could not be used, by why
        self._emptied: int | None = None  # how often it was, by the engine's latest load report
        self._clears_at = (0, 0)  # how often by its events, at the two latest reports
        self._backlog = Backlog(backlog_batches)
        self._publisher = Publisher()
        self.resize(capacity_blocks)

    def resize(self, capacity_blocks: float) -> None:
        """Set how many blocks fit on the worker's GPU; infinity means that the number is
        unknown.
        """
        self._turnover.resize(capacity_blocks)
        most = self._resident_blocks_max
        self._gpu_blocks_max = math.ceil(min(capacity_blocks * ROOM_SLACK, most))

    @property
    def known(self) -> bool:
        """True if the router knows all blocks in the worker's cache. False means that the worker
        may have more blocks than the router knows.
        """
        if self.guessed is not None:
            return False
        evicted = self._index.evicted_of(self._slot)
        # Evicted for other workers' blocks, since its own last batch.
        if evicted != self._evicted_blocks:
            return False
        known = (self._exact and not evicted) or self._turnover.over
        incomplete = (
            self.resyncing or (self._beyond and self._replay_may_bring_more) or self._lacking
        )
        return known and not (incomplete or self.unheard or self.severed)

    @property
    def exact(self) -> bool:
        """True if the KV events prove which blocks are in the worker's cache.

        `known` can be True without proof: once the worker has stored as many blocks as its cache
        holds, blocks whose events were missed count as evicted. Some of them may still be cached.
        """
        return self._exact and self.known and not self.evicted_blocks

    @property
    def wants_snapshot(self) -> bool:
        """True if the record of the cache can become exact only by a snapshot, not by a replay."""
        gap = self._lacking and not self._progressed
        lacks = gap or self._doubtful or self.severed or not self._exact
        return lacks and not self._overflowed

    @property
    def _lacking(self) -> bool:
        """True if a batch that is known to exist has not been applied."""
        return self.next_seq <= self._publisher.last_seq or bool(self._backlog.batches)

    @property
    def _replay_may_bring_more(self) -> bool:
        """True if the running replay may bring batches that the router does not know of yet. Until
        a live batch arrives, the router does not know the number of the latest batch.
        """
        return self._publisher.live_seq < self.next_seq - 1

    @property
    def counters(self) -> KvCounters:
        """The counters of this worker's KV events, with their present values."""
        return self._counters.with_blocks(self.blocks, self._skips.total())

    def skips(self) -> Counter[str]:
        """Return how many readable events the router could not use, for each reason."""
        return self._skips + Counter(self.blocks.skips())

    @property
    def overflows(self) -> int:
        """The number of times that the worker's events reported more blocks than its cache can
        hold.
        """
        return self._counters.overflows

    @property
    def settled(self) -> bool:
        """True if all batches that are known to exist were applied, and no replay is running or
        needed. In this case `next_seq` is the number of the next batch.
        """
        if self.resyncing or self._doubtful or (self._beyond and self._replay_may_bring_more):
            return False
        return not self._lacking

    @property
    def current(self) -> bool:
        """True if all batches that are known to be published were applied, and this router gets new
        ones.
        """
        return self.settled and not self.unheard

    @property
    def emptied(self) -> int:
        """The number of times that a restart or a "cleared" event emptied the worker's cache."""
        return self._counters.restarts + self._counters.clears

    @property
    def resident_blocks(self) -> int:
        """The number of blocks that the worker is known to have cached, in all tiers."""
        return len(self.blocks)

    @property
    def evicted_blocks(self) -> int:
        """The number of this worker's cached blocks that the router's index dropped to
        save memory.
        """
        return self._index.evicted_of(self._slot)

    @property
    def gpu_blocks(self) -> int:
        """The number of blocks that the worker is known to have cached on the GPU."""
        return self._index.held(self._slot)

    @property
    def learned_blocks(self) -> float:
        """The least number of blocks that the worker's GPU must be able to hold, as evictions show;
        NaN if unknown.
        """
        return self._learned.blocks

    @property
    def parked_blocks(self) -> int:
        """The number of stored blocks that wait for the event of their parent block."""
        return self.blocks.parked

    @property
    def backlog_batches(self) -> int:
        """The number of batches that wait because a batch before them is missing."""
        return len(self._backlog)

    def chains(self, tier: int = 0) -> Hashes:
        """Return the chain hashes of the blocks known in one tier, in any order. `tier` is 0 for
        the GPU, 1 for host memory and 2 for disk.
        """
        return self.blocks.chains(tier)

    def mark(self) -> tuple[int, ...]:
        """Return numbers that a caller compares with earlier ones to see what has changed. Each
        applied batch changes a number, and so does a change in how well the cache is known. A
        snapshot may change the known content without changing any number. The first number is
        `next_seq`, and the last one is `settled`.
        """
        counters, blocks = self._counters, self.blocks
        counts = self.next_seq, self.emptied, counters.overflows, len(blocks)
        how = self._exact, self._turnover.over, self._doubtful, self.severed
        return (*counts, *how, self.settled)

    def frozen(self) -> FrozenCache | None:
        """Return a snapshot of the worker's cache as it is known now.

        Return None if the knowledge comes from a saved snapshot that the engine has not confirmed
        yet.
        """
        if self._doubtful:
            return None
        next_seq, publisher = self.next_seq, self._publisher
        digest, live_seq = publisher.digest(next_seq - 1), max(publisher.live_seq, -1)
        exact, over = self._exact, self._turnover.over
        if self.severed:
            exact = over = False
        return FrozenCache(next_seq, live_seq, digest, exact, over, self.blocks.frozen())

    @property
    def first_question(self) -> int:
        """The number of the batch from which a new connection must request a replay from the
        engine. 0 means that the connection requests a snapshot of the cache first.
        """
        return self._from_seq() if self._doubtful and self._exact else 0

    # --- what it tells ----------------------------------------------------------------------

    def take(self, batch: KvEvents) -> int | None:
        """Apply a batch of KV events, or keep it until missing batches before it arrive.

        Return the number of the batch from which a replay must begin, or None if none is needed.
        """
        self._counters.batches += 1
        if batch.source == "snapshot":
            return self._take_snapshot(batch)
        is_replay = batch.source == "replay"
        if is_replay and self._publisher.is_outdated(batch.seq):
            self._counters.duplicates += 1
            return None
        kept = bool(self._backlog.batches) and self._backlog.has(batch)
        anew = self._publisher.has_restarted(batch, kept)
        if anew:
            self._restart(batch)
        self._replayed |= is_replay
        is_beyond = is_replay and batch.seq > self._publisher.last_seq
        self._publisher.note_received(batch)
        if batch.seq < self.next_seq or kept:
            self._counters.duplicates += 1
            self._verify_saved_snapshot(batch)
            return None
        if batch.seq == self.next_seq and not self._doubtful:
            self._progressed |= is_replay
            self._beyond |= is_beyond
            self._apply(batch)
            self._catch_up()
            return None
        self._counters.dropped_batches += self._backlog.keep(batch)
        if self.resyncing or (is_replay and not anew):
            return None
        self._counters.gaps += 1
        return self._begin_replay()

    def end_replay(self, answered: bool, began_anew: bool = False) -> int | None:
        """Handle the end of a replay, and continue from the batches that arrived. `answered` is
        True if the engine served the replay, so that a replay without batches proves an empty
        cache. `began_anew` is True if the engine no longer has batches that it published, so that
        it must have restarted. Return the number of the batch from which another replay must begin,
        or None.
        """
        self._publisher.replay_ended()
        if began_anew:
            self._restart()
            return self._begin_replay()
        self._beyond &= not answered
        if self._doubtful:  # the batch that would prove it is gone
            self._on_restart()
            if answered:
                return self._begin_replay()
        if self._lacking and self._progressed:
            return self._begin_replay()
        self.resyncing = self._progressed = False
        if answered and not self._backlog:
            self._exact |= self.next_seq == 0
            self.unheard = False
        while self._backlog:  # the gap stays: the record continues from the batches after it
            self._forget()
            self._exact = False
            self.next_seq = self._backlog.first_seq
            self._catch_up()
            if answered and self._backlog:  # the next hole may be a better one
                return self._begin_replay()
        if answered and self._replayed:
            self._replayed, self.told_blocks = False, len(self.blocks)
        return None

    def close(self) -> None:
        """Forget the cache of a worker that left, and all waiting batches."""
        self._forget()
        self._backlog.clear()

    def reset(self) -> None:
        """Forget everything about a worker that came back, and expect its batches from number 0."""
        self._empty()
        self._publisher.on_restart()

    def suspend(self, emptied: bool) -> None:
        """Forget the cache of a worker whose engine pauses and will continue later. Keep the number
        of the next batch, because the engine continues its numbering. `emptied` is True if the
        pause emptied the cache. Otherwise the cache's content is unknown.
        """
        last = max(self.next_seq - 1, self._publisher.last_seq, self._backlog.last_seq)
        digest = self._backlog.digest(last) or self._publisher.digest(last)
        self.reset()
        if digest:  # that batch proves, when the engine is back, that it is still the same one
            self.next_seq = last + 1
            self._publisher.applied(last, digest)
            self._exact = emptied
            self._doubtful = self.resyncing = True

    def was_emptied(self, times: int) -> bool:
        """Return True if the engine emptied its cache, but no KV event has reported it. `times` is
        how often the engine has emptied its cache, according to its load report.
        """
        clears, (before, grown) = self._counters.clears, (self._emptied, times)
        told = clears > self._clears_at[0]
        self._emptied, self._clears_at = times, (self._clears_at[1], clears)
        return before is not None and grown > before and not told

    def sever(self) -> None:
        """Mark the cache as not fully known, because a connection was lost.

        KV events may be missing, and the engine may have restarted meanwhile.
        """
        self.unheard = self.severed = True
        self._reports = 0
        self._turnover.begin(self.blocks.stored_blocks)

    def reported(self, started_s: float) -> None:
        """Check by a load report whether the engine restarted while the connection was lost.
        `started_s` is the start time of the engine's process; NaN if unknown. If two reports after
        the loss show the same start time as before, the engine did not restart. One report is not
        enough, because it may have been requested before the loss.
        """
        if not self.severed:
            self._started_s = started_s
        elif started_s == self._started_s:
            self._reports += 1
            self.severed = self._reports < _PROVING_REPORTS

    def disprove(self) -> None:
        """Forget all blocks, because an answer proved that the cache lost them.

        The engine probably restarted while the connection was lost.
        """
        self._forget()
        self._exact = False

    def empty(self) -> None:
        """Forget all blocks of an emptied cache, whose "cleared" event has not arrived.

        Until this event arrives, the cache does not count as exactly known.
        """
        self._forget()
        self._exact = False

    # --- from one router to the next --------------------------------------------------------

    def take_saved(self, saved: CacheSnapshot) -> bool:
        """Start from a snapshot of the cache that an earlier router saved.

        The engine must replay the last batch that the snapshot covers, which proves that it has not
        restarted. Until then the worker may have other blocks than the snapshot shows, and newer
        batches wait. Return False if the snapshot's blocks are damaged.
        """
        self.reset()
        try:
            self.blocks.load(saved.blocks)
        except ValueError:
            return False
        self.next_seq = saved.next_seq
        self._publisher.applied(saved.next_seq - 1, saved.digest)
        self._exact = saved.exact
        self._doubtful = self.resyncing = True
        self._turnover.begin(self.blocks.stored_blocks, saved.turned_over)
        self.told_blocks = len(self.blocks)
        return True

    def can_continue_from(self, next_seq: int, digest: int) -> bool:
        """Return True if another router's copy of the cache can replace this router's record.
        `next_seq` is the first batch that the copy does not cover. The copy must cover all batches
        that this router applied. `digest` is the digest of the last batch that the copy covers. It
        must equal the digest of the same batch at this router, which proves that the engine did not
        restart in between. If this router has received no live batch yet, any digest is accepted.
        """
        ours = self._backlog.digest(next_seq - 1) or self._publisher.digest(next_seq - 1)
        is_first = not self._backlog and self._publisher.live_seq < 0
        return next_seq >= self.next_seq and (ours == digest if ours else is_first)

    def take_copy(self, copy: CacheSnapshot) -> int | None:
        """Replace the record of the cache by another router's copy, and apply the waiting batches.

        Return the number of the batch from which a replay must begin, or None if none is needed. A
        copy with damaged blocks changes nothing.
        """
        try:
            self.blocks.load(copy.blocks)
        except ValueError:
            self._counters.refused_copies += 1
            return None
        self._backlog.drop_before(copy.next_seq)
        waiting_seq = self._backlog.last_seq
        self._publisher.continue_from_copy(copy.next_seq, copy.live_seq, copy.digest, waiting_seq)
        self.next_seq, self._exact = copy.next_seq, copy.exact
        self._turnover.begin(self.blocks.stored_blocks, copy.turned_over)
        self._doubtful = self._overflowed = self.resyncing = self._progressed = self.unheard = False
        self._beyond = self.severed = False
        self._catch_up()
        self.told_blocks = len(self.blocks)
        return self._begin_replay() if self._lacking else None

    def _verify_saved_snapshot(self, batch: KvEvents) -> None:
        """Trust a saved snapshot if `batch` repeats the last batch that the snapshot covers.

        An equal digest proves that the engine has not restarted since then.
        """
        if self._doubtful and batch.seq == self.next_seq - 1 and self._publisher.is_known(batch):
            self._doubtful = False
            self._progressed = True
            self._catch_up()

    def _on_restart(self) -> None:
        self._doubtful = self._exact = False
        self._forget()
        self.next_seq = 0
        self._publisher.on_restart()

    # --- order ------------------------------------------------------------------------------

    def _restart(self, batch: KvEvents | None = None) -> None:
        """Forget what is known of the cache and of earlier batches, because the engine restarted.
        `batch` is the batch that showed the restart, or None.
        """
        self._counters.restarts += 1
        self._empty()
        self._publisher.on_restart(batch)

    def _begin_replay(self) -> int:
        self.resyncing = True
        self._progressed = False
        return self._from_seq()

    def _from_seq(self) -> int:
        """Return the number of the batch from which a replay must begin. This is the last applied
        batch if its digest is known, and otherwise the batch after it. The repeated batch shows
        whether the engine restarted.
        """
        last = self.next_seq - 1
        return last if self._publisher.digest(last) else self.next_seq

    def _take_snapshot(self, batch: KvEvents) -> int | None:
        if self._exact and not self._doubtful and batch.seq + 1 < self.next_seq:
            self._counters.duplicates += 1  # an older snapshot than the applied batches
            return self._begin_replay() if self._lacking else None
        if self._doubtful:
            self._publisher.forget_digests()
        self._doubtful = self._progressed = self._beyond = self.unheard = False
        self._publisher.note_received(batch)
        self._forget()
        self.next_seq = batch.seq + 1
        self._exact = True
        self._apply_events(batch)
        self._backlog.drop_before(self.next_seq)
        self.resyncing = False
        self._catch_up()
        self.told_blocks = len(self.blocks)
        return (
            self._begin_replay() if self._lacking else None
        )  # a replay brings the batches between

    def _catch_up(self) -> None:
        backlog = self._backlog
        while backlog.batches and (batch := backlog.pop(self.next_seq)) is not None:
            self._apply(batch)
        if not backlog.batches:
            self.resyncing = False

    def _apply(self, batch: KvEvents) -> None:
        if batch.unreadable:  # its events are missing for good
            self._exact = False
            self._turnover.begin(self.blocks.stored_blocks)
        elif batch.seq == 0:
            self._exact = True  # followed from the first batch on: none was missed
        self.next_seq = batch.seq + 1
        self._publisher.applied(batch.seq, batch.digest)
        self.unheard = False  # the batch continues the known state
        self._apply_events(batch)

    def _apply_events(self, batch: KvEvents) -> None:
        blocks, most = self.blocks, self._gpu_blocks_max
        # They would evict other workers' blocks from the index.
        if gpu_blocks_in(batch.events, most) > most:
            self._overflow()
            return
        held = self._index.held(self._slot)
        applied = apply_events(batch.events, blocks, self._block_size, self.names)
        skipped = blocks.skipped_events
        if skipped != self._skipped_seen or applied.skips or applied.unreadable or self.guessed:
            self._judge(applied, skipped)
        for hashes in applied.left:
            self._on_left(hashes)
            self._learned.pushed_out(len(hashes), max(held, self.gpu_blocks))
        if applied.clears:
            self._counters.clears += applied.clears
            self._exact = True
            self._overflowed = self.severed = False
        if len(blocks) > self._resident_blocks_max or self._index.held(self._slot) > most:
            self._overflow()
        elif (evicted := self._index.evicted_of(self._slot)) != self._evicted_blocks:
            self._evicted_blocks = evicted
            self._turnover.begin(blocks.stored_blocks)
        elif (evicted or self.severed or not self._exact) and not self.resyncing:
            self._turnover.stored(blocks.stored_blocks)
            if self.severed and self._turnover.over:
                self._outlive()

    def _outlive(self) -> None:
        """Trust the cache again after a lost connection, because all old blocks have been replaced.
        The worker has stored as many blocks since the loss as its cache holds. If more blocks are
        known than fit into the cache, some are from before the loss, and all blocks are forgotten.
        """
        self.severed = self._exact = False
        if not self._turnover.has_room(self.gpu_blocks):
            self._forget()

    def _judge(self, applied: Applied, skipped: int) -> None:
        """Count events that could not be used, and decide whether to estimate the cache instead.
        `applied` has the effects of the batch applied last. `skipped` is the number of events that
        the record of the worker's blocks (`self.blocks`) has ever skipped.
        """
        blocks = self.blocks
        self._skips.update(applied.skips)
        self._unusable += skipped - self._skipped_seen + applied.unreadable
        self._unusable += sum(applied.skips.values())
        self._skipped_seen = skipped
        others = list(applied.other_sizes)
        for size, whole, partial in blocks.other_sizes():
            before = self._sizes_seen.get(size, (0, 0))
            if before != (whole, partial):
                others.append((size, whole - before[0], partial - before[1]))
                self._sizes_seen[size] = whole, partial
        own, self._own_seen = blocks.own_size - self._own_seen, blocks.own_size
        self.sizes.note(own + applied.own_size, others)
        useless = self._unusable >= USELESS_EVENTS and blocks.stored_blocks == self._stored_before
        useless |= self.names.unknown and not blocks.has_full_attention
        self.guessed = "sizes" if self.sizes.mixed else "useless" if useless else None

    def follow(self, block_size: int) -> None:
        """Restart the record of the cache with another block size, and expect batches from number
        0.
        """
        self._forget()
        self._backlog.clear()
        self.sizes.follow(block_size)
        self.blocks = WorkerBlocks(self._index, self._slot, block_size, *self._terms)
        self._block_size = block_size
        self._sizes_seen.clear()
        self._own_seen = self._skipped_seen = self._unusable = self._stored_before = 0
        self.guessed = None
        self._exact = self._doubtful = self.resyncing = self._progressed = self._overflowed = False
        self._beyond = self._replayed = self.severed = False
        self._turnover.begin(0)
        self._publisher.on_restart()
        self.next_seq = 0

    def begin_replay(self) -> int:
        """Begin to wait for a replay, and return the number of the batch where it must begin.

        The caller uses this after `follow` if the present batch itself does not show a gap.
        """
        return self._begin_replay()

    def _overflow(self) -> None:
        """Forget all blocks, because the worker reported more blocks than its cache can hold."""
        self._counters.overflows += 1
        self._forget()
        self._exact = False
        self._overflowed = True

    def _empty(self) -> None:
        self.close()
        self.names.on_engine_restart()
        self._learned = LearnedCapacity()
        self.sizes.on_engine_restart()
        self.guessed, self._unusable = None, 0
        self._stored_before = self.blocks.stored_blocks
        self._own_seen = self.blocks.own_size
        self._skipped_seen = self.blocks.skipped_events
        self.unheard = False
        self._exact = self._doubtful = self.resyncing = self._progressed = self._overflowed = False
        self._beyond = self._replayed = False
        self._started_s = math.nan
        self._emptied = None
        self.next_seq = 0

    def _forget(self) -> None:
        self.blocks.clear()
        self.severed = False
        self.told_blocks = self._evicted_blocks = 0
        self._turnover.begin(self.blocks.stored_blocks)
