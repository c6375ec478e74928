"""The table of sessions: numpy columns, one row each, so that all can be weighed at once."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from policies.contract import Ints

_START = 256  # rows at first; doubled as they fill


class SessionRows:
    """Lifetime: process. Rows are reused; serials never."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_key: dict[Hashable, int] = {}
        self._keys: list[Hashable] = []  # by row
        self._by_serial: dict[int, int] = {}
        self._free: list[int] = []
        self._next_serial = 1
        self.used = 0  # rows ever taken: those beyond are spare
        self.serial = np.zeros(_START, dtype=np.int64)  # 0: nobody's
        self.home = np.full(_START, -1, dtype=np.int64)  # worker slot
        self.inflight = np.zeros(_START, dtype=np.int64)  # requests, held ones too
        self.blocks = np.zeros(_START, dtype=np.int64)  # of its last prompt
        self.private_tokens = np.zeros(_START)  # of its longest prompt and answer
        self.cold_work = np.zeros(_START)  # to compute these again, in tokens of linear work
        self.trunk = np.zeros(_START, dtype=np.uint64)  # its name; 0: none
        self.trunk_tokens = np.zeros(_START, dtype=np.int64)
        self.idle_s = np.zeros(_START)  # when its last answer ended
        self.bin = np.full(_START, -1, dtype=np.int64)  # of idle time, as told to the hazard
        self.weight = np.zeros(_START)  # as it counts at home, 0..1

    def __len__(self) -> int:
        return len(self._by_serial)

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return len(self) >= self._limit

    def find(self, key: Hashable) -> int:
        """The row of a session; -1: not known."""
        return -1 if key is None else self._by_key.get(key, -1)

    def row_of(self, serial: int) -> int:
        """The row of a live session by its serial, else -1."""
        return self._by_serial.get(serial, -1)

    def key(self, row: int) -> Hashable:
        """What it is found by."""
        return self._keys[row]

    def take(self, key: Hashable) -> int:
        """A row for a new session; `key` None: it has no id of its own."""
        if self._free:
            row = self._free.pop()
        else:
            row = self.used
            self.used += 1
            self._keys.append(None)
            if row == len(self.serial):
                self._grow()
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        if key is None:
            key = serial  # an id that a client gives is a tuple: no mix-up
        self._by_key[key] = row
        self._by_serial[serial] = row
        self._keys[row] = key
        for name, empty in _EMPTY.items():
            getattr(self, name)[row] = empty
        self.serial[row] = serial
        return row

    def give_back(self, row: int) -> None:
        """Forget a session that is at home nowhere."""
        del self._by_key[self._keys[row]]
        del self._by_serial[int(self.serial[row])]
        self._keys[row] = None
        self.serial[row] = 0
        self.weight[row] = 0.0
        self._free.append(row)

    def idle(self) -> Ints:
        """Rows of sessions without a request in flight."""
        n = self.used
        rows: Ints = np.flatnonzero((self.serial[:n] > 0) & (self.inflight[:n] == 0))
        return rows

    def at_home(self, slot: int) -> Ints:
        """Rows of sessions at home on a worker."""
        n = self.used
        rows: Ints = np.flatnonzero((self.serial[:n] > 0) & (self.home[:n] == slot))
        return rows

    def longest_idle(self) -> Ints:
        """Rows of the sixteenth that has been idle for longest; of none, if all are in flight."""
        idle = self.idle()
        count = max(len(idle) // 16, min(1, len(idle)))
        return idle[np.argsort(self.idle_s[idle], kind="stable")[:count]]

    def _grow(self) -> None:
        for name, empty in _EMPTY.items():
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.full_like(column, empty))))


_EMPTY = {
    "serial": 0,
    "home": -1,
    "inflight": 0,
    "blocks": 0,
    "private_tokens": 0.0,
    "cold_work": 0.0,
    "trunk": 0,
    "trunk_tokens": 0,
    "idle_s": 0.0,
    "bin": -1,
    "weight": 0.0,
}
