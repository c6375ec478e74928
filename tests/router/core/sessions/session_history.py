"""Random histories of followed sessions, and their invariants, computed in plain Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvkernels import chain_hashes
from policies.facts import Arrival
from router.core.sessions.sessions import Sessions, TrackedRequest
from router.core.workers.columns import WorkerColumns

BLOCK = 16
SLOTS = 3
CAPACITY_TOKENS = 4_000.0


def columns() -> WorkerColumns:
    """Return the data of three workers, the last of which has an unknown capacity."""
    made = WorkerColumns(SLOTS)
    for slot in range(SLOTS):
        made.open(slot, 10 + slot)
        made.prefill_tokens_per_s[slot] = 1_000.0 * (slot + 1)
        if slot < SLOTS - 1:
            made.kv_capacity_tokens[slot] = CAPACITY_TOKENS * (slot + 1)
    made.attention.pair_tokens = 1e-3
    return made


def prompt(*parts: tuple[int, int]) -> np.ndarray:
    """Return the token ids of the parts (n, tokens); each number n stands for its own tokens."""
    ids = [np.arange(n * 100_000, n * 100_000 + tokens, dtype=np.int32) for n, tokens in parts]
    return np.concatenate(ids) if ids else np.empty(0, dtype=np.int32)


def arrival(tokens: np.ndarray, now_s: float = 0.0, **fields: object) -> Arrival:
    """Return the arrival of a request with these tokens."""
    known: dict[str, object] = {
        "now_s": now_s,
        "request_id": 0,
        "model": "m",
        "prompt_tokens": len(tokens),
        "chains": {BLOCK: chain_hashes(tokens, BLOCK)},
    }
    return Arrival(**known | fields)  # type: ignore[arg-type]


def come(
    sessions: Sessions, tokens: np.ndarray, now_s: float = 0.0, **fields: object
) -> TrackedRequest:
    """Let a request arrive and return its tracking record."""
    fact = arrival(tokens, now_s, **fields)
    return sessions.arrived(fact, fact.chains[BLOCK], BLOCK)


@dataclass(eq=False)
class Talk:
    """The record that the test itself keeps of one session."""

    session: str | None
    tenant: str
    trunk: int
    tokens: np.ndarray
    turns: int = 0


@dataclass(eq=False)
class Open:
    """A request that has begun and not ended."""

    talk: Talk
    tracked: TrackedRequest
    slot: int = -1


@dataclass
class History:
    """A random history of a few sessions on three workers, described by a list of small numbers."""

    limit: int = 8
    now_s: float = 0.0
    columns: WorkerColumns = field(default_factory=columns)
    talks: list[Talk] = field(default_factory=list)
    open: list[Open] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.columns, SLOTS, self.limit, 4_096)

    def step(self, kind: int, which: int, amount: int) -> None:
        """Let one event of kind `kind` happen to one session."""
        self.now_s += amount * 0.05
        todo = self.open[which % len(self.open)] if self.open else None
        if kind < 5:
            if len(self.open) < self.limit:
                self._arrive(which, amount)
        elif kind == 5:
            self.sessions.refresh(self.now_s)
        elif kind == 6:
            self.now_s += amount * 4.0  # a long silence: some sessions are over
            self.sessions.refresh(self.now_s)
        elif kind == 7:
            slot = which % SLOTS
            self.sessions.worker_lost(slot)
            for other in self.open:
                other.slot = -1 if other.slot == slot else other.slot
        elif todo is None:
            return
        elif kind < 11:  # dispatched, or tried again elsewhere
            todo.slot = amount % SLOTS
            self.sessions.dispatched(todo.tracked, todo.slot)
        elif kind == 11:
            if todo.slot < 0:
                self.sessions.cache_lost(todo.tracked)
        else:
            self._end(todo, None if kind == 12 else amount)

    def _arrive(self, which: int, amount: int) -> None:
        if which % 3 == 0 or not self.talks:
            number = len(self.talks)
            named = f"s{number % 5}" if which % 2 else None
            head = prompt((which % 2, 64))
            self.talks.append(Talk(named, f"t{which % 2}", which % 2, head))
        talk = self.talks[which % len(self.talks)]
        talk.turns += 1
        more = prompt((10 + len(self.talks) * 50 + talk.turns, 5 + amount * 7))
        talk.tokens = np.concatenate((talk.tokens, more))
        tracked = come(
            self.sessions, talk.tokens, self.now_s, session=talk.session, tenant=talk.tenant
        )
        self.open.append(Open(talk, tracked))

    def _end(self, todo: Open, output_tokens: int | None) -> None:
        self.open.remove(todo)
        self.sessions.ended(todo.tracked, output_tokens, self.now_s)

    def end_all(self) -> None:
        """End all requests, and let an hour pass without any request."""
        while self.open:
            self._end(self.open[0], 3)
        for _ in range(4):
            self.now_s += 1_000.0
            self.sessions.refresh(self.now_s)

    def check(self) -> None:
        """Check that the sums equal those of the table, and that the table equals the test's own
        records.
        """
        sessions = self.sessions
        rows = sessions._rows
        alive = [row for row in range(rows.used) if rows.serial[row]]
        assert len(rows) == len(alive) <= self.limit
        assert {rows.find(rows.key(row)) for row in alive} == set(alive)
        assert {rows.row_of(int(rows.serial[row])) for row in alive} == set(alive)
        assert sorted([*alive, *rows._free]) == list(range(rows.used))
        inflight = Counter(o.tracked.row for o in self.open)
        assert {row: int(rows.inflight[row]) for row in alive} == {r: inflight[r] for r in alive}
        private, work, trunk = ([0.0] * SLOTS for _ in range(3))
        at: Counter[tuple[int, int]] = Counter()
        for row in alive:
            assert 0.0 <= rows.weight[row] <= 1.0
            home, name = int(rows.home[row]), int(rows.trunk[row])
            if inflight[row] and home >= 0:
                assert rows.weight[row] == 1.0
            if home >= 0:
                private[home] += rows.weight[row] * rows.private_tokens[row]
                work[home] += rows.weight[row] * rows.cold_work[row]
                if name:
                    at[name, home] += 1
        for name, home in at:
            trunk[home] += sessions.sets.tokens_of(name)
        sets = sessions.sets
        np.testing.assert_allclose(sets.private_tokens, private, atol=1e-6)
        np.testing.assert_allclose(sets.cold_work, work, atol=1e-6)
        assert sets.trunk_tokens.tolist() == trunk
        names = {name for name, _ in at}
        assert sets.trunks == len(names) == len(sets._tokens)
        for name in names:
            places = [at[name, slot] for slot in range(SLOTS)]
            assert [sets.sessions_with(name, slot) for slot in range(SLOTS)] == places
            assert sets.holding(name).tolist() == [count > 0 for count in places]
        assert not sets.holding(12345).any()
        assert set(sets._shown) <= names
