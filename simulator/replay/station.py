"""A simulated worker: a process that may die or hang, and that publishes KV events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from engine.step_time import StepTime
from kvkernels import VirtualWorker
from policies.contract import Hashes
from policies.facts import Cleared, KvEvent, Removed, Stored, Tier, WorkerFacts

KEPT_BATCHES = 10_000  # as our engine's publisher keeps for replays
# Kinds of changes that `VirtualWorker.advance` returns.
_STORED, _REMOVED, _CLEARED, _STORED_HOST, _REMOVED_HOST = range(5)
_FIRST_GROUP = 5  # stored and removed of the first group of windows or states, then of the next


class Station:
    """A simulated worker. Lifetime: replay.

    The engine's clock stops while the process hangs; `offset_ns` is how much it lags behind.
    """

    def __init__(
        self,
        worker_id: int,
        facts: WorkerFacts,
        engine: VirtualWorker,
        *,
        speed: float,
        step_time: StepTime,
        sequence_tokens: int,
        kept_batches: int,
        random: Random,
        kv_bytes_per_token: int,
        link_bytes_per_ns: float,
        reports_host: bool = True,
        windows: Sequence[int] = (),
    ) -> None:
        self.worker_id = worker_id
        self.facts = facts
        self.engine = engine
        self.usual_speed = speed  # of its group; 1.0: as the profile says
        self.speed = speed  # now
        self.step_time = step_time  # at speed 1.0
        self.sequence_tokens = sequence_tokens  # longest prompt plus output that fits
        self.kv_bytes_per_token = kv_bytes_per_token
        self.link_bytes_per_ns = link_bytes_per_ns  # each way
        self._reports_host = reports_host  # its events include host memory
        self._windows = windows  # tokens, 0 of states: of each group beside full attention
        self.dispatches = 0
        self.random = random  # which of its batches get lost

        # The process.
        self.alive = True
        self.incarnation = 0
        self.hung_since_ns = -1
        self.offset_ns = 0
        self.wake_ns = -1  # when its engine is advanced next
        self.parked: list[int] = []  # requests that reached it while it hung
        self.abandoned: list[int] = []  # requests whose connections were closed meanwhile

        # Its stream.
        self.next_seq = 0
        self.lost_until_ns = 0
        self.kept: deque[tuple[int, tuple[KvEvent, ...]]] = deque(maxlen=kept_batches)

        # The router's knowledge of the worker.
        self.followed = True  # recognized, and neither down nor gone
        self.draining = False
        self.gone = False
        self.seen_incarnation = 0
        self.stream = 0  # counts the router's subscriptions
        self.wanted_seq = -1  # a replay to ask for next; -1: none
        self.syncing = False
        self.progress_ns = 0  # when the core last got the progress of its answers

    @property
    def hung(self) -> bool:
        """True if the process is alive but takes no step."""
        return self.hung_since_ns >= 0

    def local_ns(self, now_ns: int) -> int:
        """Return the time on the clock of the worker's engine, which stops while the
        process hangs.
        """
        return (self.hung_since_ns if self.hung_since_ns >= 0 else now_ns) - self.offset_ns

    def batch(self, changes: Sequence[tuple[int, int | None, Hashes]]) -> tuple[KvEvent, ...]:
        """Return changes of the cache as the events of one batch of KV events."""
        size = self.facts.block_size
        if self._windows:
            return tuple([self._of_groups(*change) for change in changes])
        return tuple(
            [
                _event(kind, parent, hashes, size)
                for kind, parent, hashes in changes
                if self._reports_host or kind <= _CLEARED
            ]
        )

    def _of_groups(self, kind: int, parent: int | None, hashes: Hashes) -> KvEvent:
        """Return one change of the cache of a model with several cache groups as an event."""
        size = self.facts.block_size
        if kind < _FIRST_GROUP:
            event = _event(kind, parent, hashes, size)
            if isinstance(event, Stored):
                return replace(event, group=0, full_attention=True)
            return event
        number, is_removed = divmod(kind - _FIRST_GROUP, 2)
        if is_removed:
            return Removed(hashes, "gpu", number + 1)
        window = self._windows[number]
        return Stored(hashes, None, (), size, group=number + 1, window=window)

    def snapshot(self, now_ns: int) -> tuple[KvEvent, ...]:
        """Return the visible contents of the cache as events; parents come before their
        children.
        """
        local_ns, size = self.local_ns(now_ns), self.facts.block_size
        contents = self.engine.snapshot(local_ns)
        if self._windows:
            groups = enumerate(self.engine.group_blocks(local_ns))
            changes = [(_STORED, parent, hashes) for parent, hashes in contents]
            changes += [(_FIRST_GROUP + 2 * number, None, hashes) for number, hashes in groups]
            return self.batch(changes)
        events = [_event(_STORED, parent, hashes, size) for parent, hashes in contents]
        in_host = self.engine.host_blocks(local_ns)
        if self._reports_host and len(in_host):
            events.append(_event(_STORED_HOST, None, in_host, size))
        return tuple(events)


def _event(kind: int, parent: int | None, hashes: Hashes, block_size: int) -> KvEvent:
    if kind in (_STORED, _STORED_HOST):
        tier: Tier = "gpu" if kind == _STORED else "host"
        return Stored(hashes, parent, (), block_size, tier, chain=hashes)
    if kind == _CLEARED:
        return Cleared()
    return Removed(hashes, "gpu" if kind == _REMOVED else "host")
