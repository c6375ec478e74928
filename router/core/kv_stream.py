"""What stands of one worker's KV events: its blocks, how well they are known, what is missing."""

from __future__ import annotations

from kvkernels import PrefixIndex, WorkerBlocks
from policies.contract import Hashes
from router.core.backlog import Backlog
from router.core.frozen import CopiedStream
from router.core.kv_counters import KvCounters
from router.core.publisher import Publisher
from router.core.turnover import Turnover


class KvStream:
    """What stands of it; `kv_state.KvState` changes it. Lifetime: worker."""

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
    ) -> None:
        self.blocks = WorkerBlocks(index, slot, block_size, model, parked_blocks)
        self._block_size = block_size
        self._resident_blocks_max = resident_blocks
        self._counters = KvCounters()
        self.resyncing = False  # a replay was asked for and has not ended
        self._exact = False  # all before `next_seq` was seen
        self._turnover = Turnover(capacity_blocks)  # since it was not
        self._doubtful = False  # what we hold was saved by another router, and is unproven
        self._overflowed = False  # it holds more than we may keep of one worker
        self.unheard = False  # what a peer reads for us does not reach us; set from outside
        self.next_seq = 0  # number of the batch that continues what was applied
        self._progressed = False  # the replay brought something new
        self._skipped_facts = 0
        self._backlog = Backlog(backlog_batches)
        self._publisher = Publisher()

    @property
    def known(self) -> bool:
        """Whether the index tells all that this worker holds; else it tells a lower bound."""
        known = self._exact or self._turnover.over
        return known and not (self._lacking or self.resyncing or self.unheard)

    @property
    def exact(self) -> bool:
        """Known from events alone, not because as much was stored as the worker holds.

        Such a turnover takes for gone what was missed; what hits kept alive all along is not.
        """
        return self._exact and self.known

    @property
    def wants_snapshot(self) -> bool:
        """Whether it takes a snapshot to make it exact, for all that was replayed until now."""
        gap = self._lacking and not self._progressed
        return (gap or self._doubtful or not self._exact) and not self._overflowed

    @property
    def _lacking(self) -> bool:
        """Whether batches that are known to exist were not applied."""
        return bool(self._backlog) or self.next_seq <= self._publisher.last_seq

    @property
    def counters(self) -> KvCounters:
        """What happened until now."""
        return self._counters.with_blocks(self.blocks, self._skipped_facts)

    @property
    def settled(self) -> bool:
        """Nothing is asked for, waits or is in doubt: the batch `next_seq` is the next one."""
        return not (self._lacking or self.resyncing or self._doubtful)

    @property
    def emptied(self) -> int:
        """How often the worker's cache began anew."""
        return self._counters.restarts + self._counters.clears

    @property
    def resident_blocks(self) -> int:
        """Blocks the worker is known to hold, in any tier."""
        return len(self.blocks)

    @property
    def parked_blocks(self) -> int:
        """Blocks waiting for their parent."""
        return self.blocks.parked

    @property
    def backlog_batches(self) -> int:
        """Batches that wait for the ones missing before them."""
        return len(self._backlog)

    def chains(self, tier: int = 0) -> Hashes:
        """Chain hashes of the blocks it is known to hold in a tier, in no order."""
        return self.blocks.chains(tier)

    def mark(self) -> tuple[int, ...]:
        """`next_seq` first, `settled` last; another one after all that changes what is known, but
        for a batch that only brings one block for another, or a snapshot.
        """
        counters, blocks = self._counters, self.blocks
        counts = self.next_seq, self.emptied, counters.overflows, len(blocks)
        return (*counts, self._exact, self._turnover.over, self._doubtful, self.settled)

    def copied(self) -> CopiedStream | None:
        """All that a peer needs to go on from here; None while something is asked for."""
        if not self.settled:
            return None
        next_seq, publisher = self.next_seq, self._publisher
        digest, blocks = publisher.digest(next_seq - 1), self.blocks.frozen()
        over = self._turnover.over
        return CopiedStream(next_seq, publisher.live_seq, digest, self._exact, over, blocks)
