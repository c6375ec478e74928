"""The workers and what each of them holds: membership, load reports, KV events, expectations."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from kvkernels import PrefixIndex, hit_tokens
from policies.contract import Bools, Hashes, Ints
from policies.facts import (
    Arrival,
    Finish,
    KvCopied,
    KvEvents,
    KvHeard,
    LoadReport,
    ReplayEnd,
    WorkerChange,
    WorkerFacts,
)
from router.core.actions import Action
from router.core.columns import Cells, WorkerColumns
from router.core.counters import Window
from router.core.eligible import Rows
from router.core.health import SlowStart
from router.core.hold_queue import Pending
from router.core.kv_state import KvState
from router.core.ledger import Charge, Ledger
from router.core.mirror import Blocks, ExpectedBlocks, Mirrors, Prediction, answer_blocks, found_by
from router.core.settings import CoreSettings
from router.core.workers import Worker, WorkerHealth, WorkerTable


class TableFullError(Exception):
    """No worker slot is free; `max_workers` is the bound to raise."""


class Roster:
    """Lifetime: process."""

    def __init__(
        self, settings: CoreSettings, columns: WorkerColumns, workers: WorkerTable
    ) -> None:
        self._settings = settings
        self._columns = columns
        self._cells = Cells(columns)
        self._workers = workers
        slots, entries = settings.max_workers, settings.speculative_entries
        self.index = PrefixIndex(slots, settings.index_entries, settings.index_bytes)
        self.speculative = ExpectedBlocks(slots, entries, settings.speculative_s)
        self.slow_start = SlowStart(settings.slow_start_s)
        self.others_s = -math.inf  # when a worker last reported load that we did not send it
        # Blocks that no events will ever tell of: text blocks, and workers without events.
        self.mirrors = Mirrors(slots, settings.mirrored_blocks)

    # --- workers ----------------------------------------------------------------------------

    def change(self, fact: WorkerChange) -> list[Action]:
        """Enter, change or remove a worker. Raises TableFullError for one too many."""
        worker = self._workers.get(fact.worker_id)
        self._workers.changed()
        if fact.state == "gone":
            if worker is not None:
                self._close(worker)
            return []
        if worker is None:
            if fact.spec is not None:
                self._open(fact, fact.spec)
            return []
        if fact.spec is not None and fact.spec != worker.facts:
            self._describe(worker, fact.spec)
        if fact.state == "down":
            self._forget(worker)
        elif worker.state == "down":
            worker.health.forgive()
        worker.state = fact.state
        return []

    def _open(self, fact: WorkerChange, facts: WorkerFacts) -> None:
        slot = self._workers.take_slot()
        if slot is None:
            raise TableFullError(f"all {self._settings.max_workers} worker slots are taken")
        self._columns.open(slot, fact.worker_id)
        self._columns.describe(slot, facts, calibrate=True)
        self._columns.hits_unknown[slot] = facts.has_events
        kv = self._kv_state(slot, facts)
        if fact.saved is not None and facts.has_events:
            kv.take_saved(fact.saved)
        health = WorkerHealth(Window(self._settings.ejection_window_s))
        state, now_s = fact.state, fact.now_s
        worker = Worker(fact.worker_id, slot, facts, kv, health, state, now_s)
        self.slow_start.joined(worker, self._workers, now_s)
        self._workers.add(worker)

    def _describe(self, worker: Worker, facts: WorkerFacts) -> None:
        """It was recognized anew, perhaps as another engine, or its thresholds were changed."""
        speeds = (worker.facts.prefill_tokens_per_s, worker.facts.step_s, worker.facts.weight)
        calibrate = speeds != (facts.prefill_tokens_per_s, facts.step_s, facts.weight)
        self._columns.describe(worker.slot, facts, calibrate)
        another_cache = _cache_of(facts) != _cache_of(worker.facts)
        worker.facts = facts
        if another_cache:
            self._forget(worker)
            worker.kv = self._kv_state(worker.slot, facts)

    def _forget(self, worker: Worker) -> None:
        """The cache we knew may be gone with its engine: expect nothing of it until it tells."""
        worker.kv.reset()
        self.speculative.clear_worker(worker.slot)
        self.mirrors.clear_worker(worker.slot)
        self._columns.hits_unknown[worker.slot] = worker.facts.has_events

    def _close(self, worker: Worker) -> None:
        worker.kv.close()
        self.speculative.clear_worker(worker.slot)
        self.mirrors.clear_worker(worker.slot)
        self._columns.open(worker.slot, -1)
        self.slow_start.left(worker.worker_id)
        self._workers.remove(worker.worker_id)

    def _kv_state(self, slot: int, facts: WorkerFacts) -> KvState:
        capacity_tokens = facts.kv_capacity_tokens
        known = not math.isnan(capacity_tokens)
        return KvState(
            self.index,
            slot,
            facts.block_size,
            facts.models[0],
            capacity_tokens / facts.block_size if known else math.inf,
            self._settings.parked_blocks,
            self._settings.backlog_batches,
            self._settings.index_entries,
        )

    # --- what workers tell ------------------------------------------------------------------

    def report(self, fact: LoadReport, ledger: Ledger) -> None:
        """A load report: what goes beyond our own requests is others' load."""
        worker = self._workers.get(fact.worker_id)
        if worker is None:
            return
        columns, slot = self._columns, worker.slot
        own_waiting = self._cells.waiting[slot]
        own_running = self._cells.requests[slot] - own_waiting
        # A request of ours may stand in the other state there: compare the totals first.
        foreign = max(fact.running + fact.waiting - own_running - own_waiting, 0)
        foreign_waiting = min(max(fact.waiting - own_waiting, 0), foreign)
        columns.foreign_waiting[slot] = foreign_waiting
        columns.foreign_running[slot] = foreign - foreign_waiting
        columns.report_s[slot] = fact.now_s
        if foreign:
            self.others_s = max(self.others_s, fact.now_s)
        columns.kv_reported_tokens[slot] = fact.kv_used_tokens
        columns.own_tokens_at_report[slot] = columns.own_tokens(slot)

    def kv_events(self, fact: KvEvents) -> int | None:
        """KV events: the sequence number to replay from when some were missed."""
        worker = self._workers.get(fact.worker_id)
        if worker is None:
            return None
        emptied = worker.kv.emptied
        from_seq = worker.kv.take(fact)
        if worker.kv.emptied > emptied:  # its cache began anew: nothing is on its way
            self.speculative.clear_worker(worker.slot)
        self._columns.event_s[worker.slot] = fact.now_s
        self._columns.hits_unknown[worker.slot] = not worker.kv.known
        return from_seq

    def first_question(self, worker_id: int) -> int:
        """Number of the first batch that a new feed of this worker must ask for."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else worker.kv.first_question

    def wants_snapshot(self, worker_id: int) -> bool:
        """Whether it takes a snapshot to know this worker's cache."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.kv.wants_snapshot

    def replay_end(self, fact: ReplayEnd) -> int | None:
        """A replay is over, complete or not: the sequence number to go on from, if any."""
        worker = self._workers.get(fact.worker_id)
        if worker is None:
            return None
        emptied = worker.kv.emptied
        from_seq = worker.kv.end_replay(fact.answered, fact.began_anew)
        if worker.kv.emptied > emptied:
            self.speculative.clear_worker(worker.slot)
        self._columns.hits_unknown[worker.slot] = not worker.kv.known
        return from_seq

    def kv_copied(self, fact: KvCopied) -> int | None:
        """A peer's account of a cache: the sequence number to replay from, if any is missing."""
        worker = self._workers.get(fact.worker_id)
        if worker is None:
            return None
        from_seq = worker.kv.take_copy(fact.snapshot)
        self._columns.event_s[worker.slot] = fact.now_s
        self._columns.hits_unknown[worker.slot] = not worker.kv.known
        return from_seq

    def kv_heard(self, fact: KvHeard) -> None:
        """Whether a worker's events reach us."""
        worker = self._workers.get(fact.worker_id)
        if worker is not None:
            worker.kv.unheard = not fact.heard
            self._columns.hits_unknown[worker.slot] = not worker.kv.known

    # --- what they hold ---------------------------------------------------------------------

    def expect(self, worker: Worker, arrival: Arrival, now_s: float) -> Prediction | None:
        """A dispatch will leave these blocks there; of a mirrored worker, what it will find."""
        facts, chain = worker.facts, arrival.chains[worker.facts.block_size]
        if facts.has_events and not arrival.approximate:
            self.speculative.expect(worker.slot, chain, now_s)
            return None
        told_blocks = facts.kv_capacity_tokens / facts.block_size
        return self.mirrors.expect(worker.slot, chain, told_blocks)

    def ended(self, pending: Pending, charge: Charge | None, finish: Finish | None) -> None:
        """A dispatch is over, with an answer where there is a `finish`."""
        prediction, pending.prediction = pending.prediction, None
        worker = None if charge is None else self._workers.get(charge.worker_id)
        if prediction is None or charge is None or worker is None:
            return
        counted = finish is not None and finish.prompt_tokens is not None
        if charge.waiting and not counted:  # refused, or given up on before its prefill was over
            self.mirrors.failed(prediction)
            return
        found, answered, size = None, 0, worker.facts.block_size
        if finish is not None:
            found = found_by(pending.arrival, finish, size, prediction.chain)
            answered = answer_blocks(pending.arrival, finish, size)
        self.mirrors.answered(prediction, found, answered)

    def expire(self, now_s: float) -> None:
        """Forget expectations nobody confirmed."""
        self.speculative.expire(now_s)

    def hit_tokens(self, rows: Rows, chains: Mapping[int, Hashes], prompt_tokens: int) -> Ints:
        """int64[rows]: prompt tokens each holds or will soon; at least one is left."""
        sizes = rows.distinct_block_sizes
        most = max(prompt_tokens - 1, 0)
        if len(sizes) == 1:
            return hit_tokens(self._hit_blocks(chains[sizes[0]]), rows.slot_ids, sizes[0], most)
        hits = np.zeros(len(rows), dtype=np.int64)
        own_sizes = np.array(rows.block_sizes)
        for size in sizes:
            blocks = self._hit_blocks(chains[size])[rows.slots]
            np.multiply(blocks, size, out=hits, where=own_sizes == size, dtype=np.int64)
        return np.minimum(hits, most, out=hits)

    def copies(self, last_hash: int) -> int:
        """How many workers hold a block, or soon will, and with it all before it."""
        return int(np.count_nonzero(self.holders(last_hash)))

    def holders(self, last_hash: int) -> Bools:
        """bool[slots]: whether the worker of a slot holds a block, or soon will."""
        return self._hit_blocks(np.array([last_hash], dtype=np.uint64)) > 0

    def _hit_blocks(self, chain: Hashes) -> Blocks:
        """int32[slots]: leading blocks by events, by our dispatches, by what no event tells."""
        blocks = self.index.longest_prefix(chain)
        self.speculative.raise_prefix(blocks, chain)
        self.mirrors.raise_prefix(blocks, chain)
        return blocks


def _cache_of(facts: WorkerFacts) -> tuple[object, ...]:
    """What tells one engine's cache from another's."""
    capacity = facts.kv_capacity_tokens
    known = None if math.isnan(capacity) else capacity
    return facts.models, facts.block_size, facts.has_events, known
