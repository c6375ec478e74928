"""Tracks which workers exist and which KV blocks each worker's cache holds.

The sources are load reports, KV events, answers and this router's own dispatches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from kvkernels import HybridWorkers, PrefixIndex, hit_tokens
from policies.contract import Bools, Hashes, Ints
from policies.facts import (
    Arrival,
    Finish,
    KvCopied,
    KvEvents,
    KvHeard,
    LoadReport,
    ReplayEnd,
    Suspension,
    WorkerChange,
    WorkerFacts,
)
from router.core.contract.actions import Action, Confirmed, Doubted, Followed, Others
from router.core.contract.counters import Window
from router.core.contract.settings import CoreSettings
from router.core.placement.eligible import Rows
from router.core.placement.health import SlowStart
from router.core.placement.pending import AtWorker
from router.core.workers.columns import Cells, WorkerColumns
from router.core.workers.kv_state import Guess, KvState
from router.core.workers.last_block import LastBlocks
from router.core.workers.ledger import Charge, Ledger
from router.core.workers.mirror import (
    Blocks,
    EventHits,
    Expectation,
    ExpectedBlocks,
    HitConfidence,
    Mirrors,
    Prediction,
    answer_blocks,
    found_by,
)
from router.core.workers.table import BusySpell, Worker, WorkerHealth, WorkerTable


class TableFullError(Exception):
    """Raised if no worker slot is free; `max_workers` is the setting to raise."""


_WINDOW_S = 60.0
# Share of other clients' requests above which a report begins, and below which it ends.
_OTHERS, _OURS = 0.1, 0.05


class OthersShare:
    """Measures which share of the workers' requests comes from clients other than this router. Such
    requests fill the workers' caches without this router's knowledge, so its cost estimates are
    wrong if there are many such requests. Lifetime: process.
    """

    def __init__(self) -> None:
        self.is_high = False  # that there are many
        self._since_s = -math.inf
        self._all = self._others = 0

    def reported(self, requests: int, others: int, now_s: float) -> float | None:
        """Count the requests in a worker's load report, of which `others` came from other clients.

        Return the share of other clients' requests, 0..1, over the last minute, if the share has
        just become high (above 10 %) or low again (below 5 %). Return None in all other cases.
        """
        share = None
        if now_s - self._since_s >= _WINDOW_S:
            seen = self._others / max(self._all, 1)
            if seen > _OTHERS if not self.is_high else seen < _OURS:
                share, self.is_high = seen, not self.is_high
            self._since_s, self._all, self._others = now_s, 0, 0
        self._all += requests
        self._others += others
        return share


class WorkerCaches:
    """Tracks which KV blocks each worker's cache holds, and which workers there are.

    The sources are the workers' KV events, this router's dispatches, and the answers.
    Lifetime: process.
    """

    def __init__(
        self, settings: CoreSettings, columns: WorkerColumns, workers: WorkerTable
    ) -> None:
        self._settings = settings
        self._columns = columns
        self._cells = Cells(columns)
        self._workers = workers
        slots, entries = settings.max_workers, settings.speculative_entries
        self.index = PrefixIndex(slots, settings.index_entries, settings.index_bytes)
        self._hybrids = HybridWorkers(slots)
        self._evicted_blocks = 0  # by the index, as of the latest tick
        self.speculative = ExpectedBlocks(slots, entries, settings.speculative_s)
        self.slow_start = SlowStart(settings.slow_start_s)
        self.others_s = -math.inf  # when a worker last reported load that we did not send it
        self._others = OthersShare()
        # For blocks without events: prompts read as text, and workers without events.
        self.mirrors = Mirrors(slots, settings.mirrored_blocks)
        self.confidence = HitConfidence(columns.hit_confidence)
        self.last_blocks = LastBlocks(slots)
        self._news: list[Action] = []
        # The chain that was looked up last, and the leading blocks that events alone promise.
        self._by_events: tuple[Hashes | None, Blocks] = (None, np.zeros(0, dtype=np.int32))

    # --- workers ----------------------------------------------------------------------------

    def change(self, fact: WorkerChange) -> list[Action]:
        """Add a worker, remove it, or change its state or description, as `fact` says.

        Raises TableFullError if there are more workers than `max_workers`.
        """
        worker = self._workers.get(fact.worker_id)
        self._workers.changed()
        if fact.state == "gone":
            if worker is not None:
                worker.move("gone")
                self._close(worker)
            return []
        if worker is None:
            if fact.spec is not None:
                self._open(fact, fact.spec)
            return []
        if fact.spec is not None and fact.spec != (worker.reported_facts or worker.facts):
            self._describe(worker, self._as_followed(worker, fact.spec))
        if fact.state == "down":
            self._forget(worker, fact.suspended)
        elif worker.state == "down":
            worker.health.clear_failures()
            worker.spell = BusySpell()
        worker.move(fact.state)
        return []

    def _open(self, fact: WorkerChange, facts: WorkerFacts) -> None:
        slot = self._workers.take_slot()
        if slot is None:
            raise TableFullError(f"all {self._settings.max_workers} worker slots are taken")
        self._columns.open(slot, fact.worker_id)
        self._columns.describe(slot, facts, calibrate=True)
        kv = self._kv_state(slot, facts)
        if fact.saved is not None and facts.has_events:
            kv.take_saved(fact.saved)
        health = WorkerHealth(Window(self._settings.ejection_window_s))
        worker = Worker(fact.worker_id, slot, facts, kv, health, joined_s=fact.now_s)
        worker.move(fact.state)
        self.slow_start.joined(worker, self._workers, fact.now_s)
        self._workers.add(worker)
        self._show_cache(worker)

    def _show_cache(self, worker: Worker) -> None:
        """Update the numbers about a worker's cache in the worker columns, which decisions read.

        These are the cache's capacity, if it was learned, and the tokens cached in each tier. A
        flag says whether the worker may hold more blocks than its KV events reported.
        """
        columns, slot, facts = self._columns, worker.slot, worker.facts
        kv, tells = worker.kv, worker.has_usable_events
        if math.isnan(facts.kv_capacity_tokens):
            learned = kv.learned_blocks if tells else self.mirrors.learned_blocks(slot)
            columns.kv_capacity_tokens[slot] = learned * facts.block_size
        hybrids = len(self._hybrids)
        self._hybrids.set(slot, kv.blocks if tells and kv.blocks.is_hybrid else None)
        if (
            len(self._hybrids) > hybrids
        ):  # its first events: what it was expected to keep, it may not
            self.speculative.clear_worker(slot)
        columns.hits_unknown[slot] = tells and not kv.known
        columns.cached_tokens[slot] = kv.gpu_blocks * facts.block_size if tells else math.nan
        if self.index.tiers > 1:
            columns.host_cached_tokens[slot] = self.index.held(slot, 1) * facts.block_size
            columns.disk_cached_tokens[slot] = self.index.held(slot, 2) * facts.block_size

    def _as_followed(self, worker: Worker, reported: WorkerFacts) -> WorkerFacts:
        """Return the new description `reported` of a worker, with the block size that the worker's
        KV events show. The block size of the new description is used if it differs from that of the
        last description, or if the worker sends no KV events.
        """
        learned = (
            worker.reported_facts is not None
            and worker.reported_facts.block_size == reported.block_size
        )
        worker.reported_facts = reported if learned and reported.has_events else None
        return (
            reported
            if worker.reported_facts is None
            else replace(reported, block_size=worker.facts.block_size)
        )

    def _describe(self, worker: Worker, facts: WorkerFacts) -> None:
        """Replace a worker's description.

        If the description is that of another engine, whose cache differs, forget the worker's
        cache.
        """
        speeds = (worker.facts.prefill_tokens_per_s, worker.facts.step_s, worker.facts.weight)
        calibrate = speeds != (facts.prefill_tokens_per_s, facts.step_s, facts.weight)
        self._columns.describe(worker.slot, facts, calibrate)
        another_cache = _cache_of(facts) != _cache_of(worker.facts)
        worker.facts = facts
        worker.kv.resize(_capacity_blocks(facts))
        if another_cache:
            self.last_blocks.forget(worker.slot)
            worker.kv = self._kv_state(worker.slot, facts)
            self._forget(worker)
        self._show_cache(worker)

    def _forget(self, worker: Worker, suspended: Suspension | None = None) -> None:
        """Forget the blocks of a worker's cache, because the cache may be lost. New KV events will
        report the blocks that remain. `suspended` is "asleep" or "paused" if the engine only pauses
        and will continue later; it is None if the worker is down or has been replaced.
        """
        if suspended is None:
            worker.kv.reset()
        else:
            worker.kv.suspend(emptied=suspended == "asleep")
        self.confidence.reset(worker.slot)
        self.speculative.clear_worker(worker.slot)
        self.mirrors.clear_worker(worker.slot)
        self._show_cache(worker)

    def _empty(self, worker: Worker) -> None:
        """Forget the blocks of a worker whose load report shows that its cache was emptied. The KV
        event that reports the same arrives later or not at all.
        """
        worker.kv.empty()
        self.speculative.clear_worker(worker.slot)
        self.mirrors.clear_worker(worker.slot)
        self._show_cache(worker)

    def _close(self, worker: Worker) -> None:
        worker.kv.close()
        self._hybrids.set(worker.slot, None)
        self.confidence.forget(worker.slot)
        self.last_blocks.forget(worker.slot)
        self.speculative.clear_worker(worker.slot)
        self.mirrors.clear_worker(worker.slot)
        self._columns.open(worker.slot, -1)
        self.slow_start.left(worker.worker_id)
        self._workers.remove(worker.worker_id)

    def _kv_state(self, slot: int, facts: WorkerFacts) -> KvState:
        return KvState(
            self.index,
            slot,
            facts.block_size,
            facts.models[0],
            _capacity_blocks(facts),
            self._settings.parked_blocks,
            self._settings.backlog_batches,
            self._settings.index_entries,
            facts.keeps_copies,
            partial(self.speculative.drop, slot),
        )

    # --- what workers tell ------------------------------------------------------------------

    def report(self, fact: LoadReport, ledger: Ledger) -> None:
        """Record a worker's load report: requests, KV in use, and whether its cache was emptied.

        Requests beyond those that this router sent to the worker count as those of other clients.
        """
        worker = self._workers.get(fact.worker_id)
        if worker is None:
            return
        columns, slot = self._columns, worker.slot
        own_waiting = self._cells.waiting[slot]
        own_running = self._cells.requests[slot] - own_waiting
        # An own request may count in the other state there: compare the totals first.
        foreign = max(fact.running + fact.waiting - own_running - own_waiting, 0)
        foreign_waiting = min(max(fact.waiting - own_waiting, 0), foreign)
        columns.foreign_waiting[slot] = foreign_waiting
        columns.foreign_running[slot] = foreign - foreign_waiting
        columns.report_s[slot] = fact.now_s
        if foreign:
            self.others_s = max(self.others_s, fact.now_s)
        share = self._others.reported(fact.running + fact.waiting, foreign, fact.now_s)
        if share is not None:
            self._news.append(Others(share, self._others.is_high))
        idle = not (fact.running or fact.waiting)
        # Else the events of its next step show the result.
        if worker.kv.was_emptied(fact.emptied) and idle:
            self._empty(worker)
        was_severed = worker.kv.severed
        worker.kv.reported(fact.started_s)
        if worker.kv.severed != was_severed:
            self._show_cache(worker)
        columns.kv_reported_tokens[slot] = fact.kv_used_tokens
        coming = columns.decode_place_tokens[slot]  # the worker does not know of them yet
        columns.own_tokens_at_report[slot] = columns.own_tokens(slot) - coming

    def is_a_peers(self, worker: Worker) -> None:
        """Subtract one request from the load of other clients at a worker, because the request
        turned out to be that of a peer router, and the caller has charged it as such. Without the
        subtraction the request would count twice until the worker's next load report.
        """
        columns, slot = self._columns, worker.slot
        if columns.foreign_running[slot] > 0:
            columns.foreign_running[slot] -= 1
        elif columns.foreign_waiting[slot] > 0:
            columns.foreign_waiting[slot] -= 1

    def kv_events(self, fact: KvEvents) -> int | None:
        """Apply a batch of a worker's KV events to the record of the worker's cache.

        Return the number of the batch from which a replay must begin, if batches are missing; else
        None.
        """
        worker = self._workers.get(fact.worker_id)
        if worker is None:
            return None
        kv = worker.kv
        emptied, current, overflows, guessed = kv.emptied, kv.current, kv.overflows, kv.guessed
        from_seq = kv.take(fact)
        if kv.sizes.agreed_other:
            from_seq = self._follow(worker, fact)
        if kv.overflows > overflows and kv.overflows.bit_count() == 1:  # the 1st, 2nd, 4th ...
            self._news.append(self._doubted_hits(worker, "overflow"))
        if kv.guessed != guessed:
            self._guess(worker, kv.guessed)
        self._columns.event_s[worker.slot] = fact.now_s
        self._settle(worker, emptied, current, fact.source == "snapshot")
        return from_seq

    def _follow(self, worker: Worker, fact: KvEvents) -> int | None:
        """Restart the record of a worker's cache with the block size that its KV events show.

        `fact` is the batch whose events decided this. It is applied again with the new size. Return
        the number of the batch from which a replay must begin, or None if none is needed.
        """
        kv, told = worker.kv, worker.reported_facts or worker.facts
        size = kv.sizes.agreed
        worker.reported_facts = None if size == told.block_size else told
        worker.facts = replace(worker.facts, block_size=size)
        self._workers.changed()
        kv.follow(size)
        kv.resize(_capacity_blocks(worker.facts))
        self.confidence.reset(worker.slot)
        self.last_blocks.forget(worker.slot)
        self.speculative.clear_worker(worker.slot)
        self.mirrors.clear_worker(worker.slot)
        self._news.append(Followed(worker.worker_id, size, told.block_size))
        from_seq = kv.take(fact)
        if from_seq is None and fact.source == "replay" and fact.seq >= kv.next_seq:
            return kv.begin_replay()
        return from_seq

    def _guess(self, worker: Worker, why: Guess | None) -> None:
        """Begin to estimate a worker's cache, because the worker's KV events cannot be used.

        `why` is the reason. If `why` is None, the events can be used again, and the estimate ends.
        """
        self.speculative.clear_worker(worker.slot)
        self.mirrors.clear_worker(worker.slot)
        if why is not None:
            self._news.append(self._doubted_hits(worker, why))
        elif worker.kv.sizes.size == worker.told_block_size:
            size = worker.facts.block_size
            self._news.append(Followed(worker.worker_id, size, size))

    def _settle(self, worker: Worker, emptied: int, current: bool, told_anew: bool = False) -> None:
        """Update the data that depends on a worker's KV state, after the KV state changed.
        `emptied` and `current` are the values of the attributes `KvState.emptied` and
        `KvState.current` before the change. `told_anew` is True if a snapshot has reported the
        whole cache again.
        """
        kv, slot = worker.kv, worker.slot
        if kv.emptied > emptied:  # the cache was emptied: no expected block is on its way
            self.speculative.clear_worker(slot)
        if kv.emptied > emptied or told_anew or (kv.current and not current):
            self.confidence.reset(slot)
        self._show_cache(worker)

    def _doubted_hits(
        self, worker: Worker, reason: Literal["overflow", "refuted", "useless", "sizes"]
    ) -> Doubted:
        share = float(self._columns.hit_confidence[worker.slot])
        return Doubted(worker.worker_id, reason, share)

    def news(self) -> list[Action]:
        """Return the messages for the operator that have arisen since the last call.

        An example is that a worker's KV events have proven wrong.
        """
        if not self._news:
            return []
        news, self._news = self._news, []
        return news

    def first_question(self, worker_id: int) -> int:
        """Return the number of the batch from which a new connection to a worker must request KV
        events. The worker replays its events from this batch on. 0 means that the connection
        requests a snapshot of the cache first.
        """
        worker = self._workers.get(worker_id)
        return 0 if worker is None else worker.kv.first_question

    def wants_snapshot(self, worker_id: int) -> bool:
        """Return True if replayed KV events cannot complete the record of this worker's cache. In
        this case the router must request a snapshot, the list of all cached blocks.
        """
        worker = self._workers.get(worker_id)
        return worker is not None and worker.kv.wants_snapshot

    def replay_end(self, fact: ReplayEnd) -> int | None:
        """Record that a replay of a worker's KV events has ended.

        Return the number of the batch from which the next replay must begin, or None if none is
        needed.
        """
        worker = self._workers.get(fact.worker_id)
        if worker is None:
            return None
        emptied, current = worker.kv.emptied, worker.kv.current
        from_seq = worker.kv.end_replay(fact.answered, fact.began_anew)
        self._settle(worker, emptied, current)
        return from_seq

    def kv_copied(self, fact: KvCopied) -> int | None:
        """Replace the record of a worker's cache by the copy that another router sent.

        Return the number of the batch from which a replay must begin, or None if none is needed.
        """
        worker = self._workers.get(fact.worker_id)
        if worker is None:
            return None
        from_seq = worker.kv.take_copy(fact.snapshot)
        self.confidence.reset(worker.slot)
        self._columns.event_s[worker.slot] = fact.now_s
        self._show_cache(worker)
        return from_seq

    def kv_heard(self, fact: KvHeard) -> None:
        """Record whether a worker's KV events, which another router reads, reach this router.

        After a broken connection (`fact.severed`), record that events may be missing and that the
        engine may have restarted.
        """
        worker = self._workers.get(fact.worker_id)
        if worker is not None:
            if fact.severed:
                worker.kv.sever()
            else:
                worker.kv.unheard = not fact.heard
            self._show_cache(worker)

    # --- what they hold ---------------------------------------------------------------------

    def expect(self, worker: Worker, arrival: Arrival, now_s: float) -> Prediction | Expectation:
        """Record that a dispatched request will leave its prompt blocks in a worker's cache.

        Return the record, which `ended` needs at the end of the dispatch. If the worker's cache is
        estimated, the record is a `Prediction`, which also says how many prompt blocks the worker
        should find cached.
        """
        facts, chain = worker.facts, arrival.chains[worker.facts.block_size]
        if worker.has_usable_events and not arrival.approximate:
            if worker.kv.blocks.is_hybrid:  # which blocks its windows will keep, its events say
                chain = chain[:0]
            return self.speculative.expect(worker.slot, chain, now_s)
        told_blocks = facts.kv_capacity_tokens / facts.block_size
        return self.mirrors.expect(worker.slot, chain, told_blocks)

    def expected_by_events(self, worker: Worker, arrival: Arrival, alone: bool) -> EventHits | None:
        """Return how many prompt blocks a worker should find cached, according to its KV events.
        Later this number is compared with the number in the worker's answer. Return None if the
        events say too little for a comparison. `alone` is True if no other request of this router
        or its peers waits at the worker.
        """
        facts, kv, slot = worker.facts, worker.kv, worker.slot
        if not worker.has_usable_events or arrival.approximate or not kv.current:
            return None
        chain, size = arrival.chains[facts.block_size], facts.block_size
        looked_up, blocks = self._by_events
        most = max(arrival.prompt_tokens - 1, 0) // size
        by_events = blocks if looked_up is chain else self._promised(chain, most)
        expected = min(int(by_events[slot]), most)
        if expected < 2:  # an answer may find one fewer though the events are right
            return None
        alone = alone and not self._columns.foreign_waiting[slot]
        removed = kv.blocks.removed_blocks
        life = self.confidence.life(slot)
        return EventHits(worker.worker_id, chain, expected, life, removed, alone)

    def answered(self, sent: AtWorker, finish: Finish) -> None:
        """Compare the number of cached blocks in an answer with the number that KV events promised.

        If a worker's events keep promising too many blocks, the router counts only a part of the
        worker's cache hits from then on.
        """
        hits, sent.expected_by_events = sent.expected_by_events, None
        worker = None if hits is None else self._workers.get(hits.worker_id)
        if hits is None or worker is None:
            return
        kv, size = worker.kv, worker.facts.block_size
        if self.confidence.life(worker.slot) != hits.life or not kv.current:
            return
        found = found_by(sent.arrival, finish, size, hits.chain)
        if found is None:
            return
        if hits.alone:
            self.last_blocks.answered(worker.slot, hits.blocks, found.blocks, size)
        expected = hits.blocks
        if found.blocks + found.slack < expected:  # but its events may have removed blocks since
            expected = hits.kept_blocks(kv.blocks.removed_blocks)
            if found.blocks + found.slack >= expected:
                return
            if kv.severed and 2 * (found.blocks + found.slack) < expected:
                kv.disprove()  # the engine may have restarted while the connection was lost
                self._settle(worker, kv.emptied, current=False)
                return
        if not self.confidence.answered(worker.slot, expected, found):
            return
        doubted = self._columns.hit_confidence[worker.slot] < 1.0
        news = self._doubted_hits(worker, "refuted") if doubted else Confirmed(worker.worker_id)
        self._news.append(news)

    def ended(self, sent: AtWorker, charge: Charge, finish: Finish | None) -> None:
        """Update the blocks expected in a worker's cache when a dispatch has ended.

        `finish` is the end of the request, or None if the worker did not complete its part. The
        blocks of a prompt that was never computed are no longer expected.
        """
        prediction, sent.prediction = sent.prediction, None
        worker = self._workers.get(charge.worker_id)
        if prediction is None or worker is None:
            return
        refused = finish is not None and finish.refused
        if isinstance(prediction, Expectation):
            # A request that does not stream shows no first token: assume that it failed before one.
            unseen = finish is None and (charge.waiting or not sent.arrival.stream)
            self.speculative.ended(prediction, refused or unseen)
            return
        counted = finish is not None and finish.prompt_tokens is not None
        given_up = finish is None and charge.waiting  # before its prefill ended
        if (given_up or refused) and not counted:
            self.mirrors.failed(prediction)
            return
        found, answered, size = None, 0, worker.facts.block_size
        if finish is not None:
            found = found_by(sent.arrival, finish, size, prediction.chain)
            answered = answer_blocks(sent.arrival, finish, size)
        self.mirrors.answered(prediction, found, answered)
        self._show_cache(worker)

    def expire(self, now_s: float) -> None:
        """Drop expected blocks that are too old, and check whether the index has evicted blocks.

        The index is the router's own record of cached blocks, whose size is limited. If it has
        evicted blocks, the worker columns are updated.
        """
        self.speculative.expire(now_s)
        if (evicted := self.index.evicted) != self._evicted_blocks:
            self._evicted_blocks = evicted
            for worker in self._workers:
                self._show_cache(worker)

    def hit_tokens(self, rows: Rows, chains: Mapping[int, Hashes], prompt_tokens: int) -> Ints:
        """Return how many tokens of a prompt each worker has cached or soon will have, int64[rows].

        `chains` has the prompt's chain hashes for each block size. The result is below
        `prompt_tokens`, because a worker computes at least one token of each prompt.
        """
        sizes = rows.distinct_block_sizes
        most = max(prompt_tokens - 1, 0)
        if len(sizes) == 1:
            blocks = self._hit_blocks(chains[sizes[0]], most // sizes[0])
            return self._counted(rows, hit_tokens(blocks, rows.slot_ids, sizes[0], most))
        hits = np.zeros(len(rows), dtype=np.int64)
        own_sizes = np.array(rows.block_sizes)
        for size in sizes:
            blocks = self._hit_blocks(chains[size], most // size)[rows.slots]
            np.multiply(blocks, size, out=hits, where=own_sizes == size, dtype=np.int64)
        return self._counted(rows, np.minimum(hits, most, out=hits))

    def _counted(self, rows: Rows, hits: Ints) -> Ints:
        """Return how many of each worker's hit tokens count, int64[rows]. If a worker's answers
        show that it computes the last block of each hit again, this block does not count. The other
        hits are multiplied by the confidence in the worker's KV events, 0..1, which is below 1 if
        the worker's answers contradict them.
        """
        hits = self.last_blocks.without(hits, rows.slots)
        if not self.confidence.discounted:
            return hits
        counted: Ints = (hits * self._columns.hit_confidence[rows.slots]).astype(np.int64)
        return counted

    def copies(self, last_hash: int) -> int:
        """Return how many workers have cached the block with this chain hash, or will soon have
        cached it. A chain hash stands for the block and all blocks before it.
        """
        return int(np.count_nonzero(self.holders(last_hash)))

    def holders(self, last_hash: int) -> Bools:
        """Return which worker slots have cached the block with this chain hash, or will soon have
        cached it, bool[slots]. A chain hash stands for the block and all blocks before it.
        """
        chain = np.array([last_hash], dtype=np.uint64)
        return self._with_expected(chain, self.index.longest_prefix(chain)) > 0

    def _hit_blocks(self, chain: Hashes, most: int) -> Blocks:
        """Return how many leading blocks of `chain` each worker can reuse now or soon,
        int32[slots]. The sources are KV events, this router's recent dispatches, and the estimated
        caches of workers without usable events. `most` is the most blocks that a worker can reuse
        of this prompt.
        """
        blocks = self._promised(chain, most)
        self._by_events = chain, blocks.copy()
        return self._with_expected(chain, blocks)

    def _promised(self, chain: Hashes, most: int) -> Blocks:
        """Return how many leading blocks of `chain` each worker can reuse, according to KV events.

        A worker with a hybrid cache reuses a prefix only where each of its cache groups holds what
        it needs: full attention all blocks, a sliding window its last blocks, a state-space layer
        its state at the end (vLLM, `v1/core/kv_cache_coordinator.py`, 2026).
        """
        blocks = self.index.longest_prefix(chain)
        if len(self._hybrids):
            self._hybrids.limit(chain, blocks, most)
        return blocks

    def _with_expected(self, chain: Hashes, blocks: Blocks) -> Blocks:
        """Raise the numbers in `blocks` where more leading blocks of `chain` are expected than KV
        events have reported. Blocks are expected because of recent dispatches, or are estimated for
        workers without usable events.
        """
        self.speculative.raise_prefix(blocks, chain)
        self.mirrors.raise_prefix(blocks, chain)
        return blocks


def _capacity_blocks(facts: WorkerFacts) -> float:
    known = not math.isnan(facts.kv_capacity_tokens)
    return facts.kv_capacity_tokens / facts.block_size if known else math.inf


def _cache_of(facts: WorkerFacts) -> tuple[object, ...]:
    """Return the parts of a worker's description that change if another engine takes the worker's
    place. If one of them changes, all that the router knows about the cache becomes invalid.
    """
    capacity = facts.kv_capacity_tokens
    known = None if math.isnan(capacity) else capacity
    return facts.models, facts.block_size, facts.has_events, known
