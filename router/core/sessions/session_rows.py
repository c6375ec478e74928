"""Stores sessions as rows of a table of numpy columns, and finds the session of a request."""

from __future__ import annotations

import hashlib

import numpy as np

from kvkernels import PrefixOwners
from policies.contract import Floats, Hashes, Ints
from policies.facts import Arrival
from router.core.workers.columns import float_cells, int_cells

# Tenant and model, then the id that the client gave, or where it gave none the row's serial.
Key = tuple[str | None, str, str | int]

_FORGOTTEN_AT_ONCE = 256  # this part of a full table makes room: rarely, and no long pause


class SessionRows:
    """A table of sessions: one row for each session, in numpy columns that are allocated once.

    `cells` gives fast access to single cells.
    Lifetime: process.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_key: dict[Key, int] = {}
        self._by_serial: dict[int, int] = {}
        self._keys: dict[int, Key] = {}  # by row
        self._free: list[int] = []
        self._next_serial = 1
        self.used = 0  # rows ever taken: those beyond are spare
        self.serial = np.zeros(limit, dtype=np.int64)  # 0: the row is free
        self.home = np.full(limit, -1, dtype=np.int64)  # worker slot
        self.inflight = np.zeros(limit, dtype=np.int64)  # requests, held ones too
        # 1: several conversations use its id, so the id alone does not identify a request.
        self.mixed = np.zeros(limit, dtype=np.int64)
        # The beginning of its next prompt: this many blocks of its last one, which end in this
        # hash.
        self.tip_blocks = np.zeros(limit, dtype=np.int64)
        self.tip: Hashes = np.zeros(limit, dtype=np.uint64)
        self.private_tokens = np.zeros(limit)  # of its last prompt and answer
        self.cold_work = np.zeros(limit)  # to compute these again, in tokens of linear work
        self.trunk: Hashes = np.zeros(limit, dtype=np.uint64)  # its name; 0: none
        self.idle_s = np.zeros(limit)  # when its last answer ended
        # The bin of its idle time that the hazard counts.
        self.bin = np.full(limit, -1, dtype=np.int64)
        self.weight = np.zeros(limit)  # as it counts at home, 0..1
        self.cells = RowCells(self)

    def named(self) -> dict[str, Ints | Floats]:
        """Return, by name, the columns from which native code computes each session's weight.

        The arrays are not copied.
        """
        return {
            "serial": self.serial,
            "inflight": self.inflight,
            "home": self.home,
            "bin": self.bin,
            "idle_s": self.idle_s,
            "private_tokens": self.private_tokens,
            "cold_work": self.cold_work,
            "weight": self.weight,
        }

    def __len__(self) -> int:
        return len(self._by_serial)

    @property
    def full(self) -> bool:
        """True if the table has no free row for another session."""
        return len(self) >= self._limit

    def find(self, key: Key) -> int:
        """Return the row of the session with this key, or -1 if no row has the key."""
        return self._by_key.get(key, -1)

    def row_of(self, serial: int) -> int:
        """Return the row of the session with this serial number, or -1 if no row has it."""
        return self._by_serial.get(serial, -1)

    def key(self, row: int) -> Key:
        """Return the key under which the session in `row` is found: tenant, model and session id.

        For a session without an id, its serial number takes the place of the id.
        """
        return self._keys[row]

    def take(self, tenant: str | None, model: str, session: str | None, serial: int = -1) -> int:
        """Return a row for a new session, and clear the row. The table must not be full. `session`
        is the session's id, or None. `serial` is the serial number of a forgotten session that the
        new session gets again; -1 means a new number.
        """
        assert not self.full, "asked to follow more sessions than the limit"
        row = self._free.pop() if self._free else self.used
        self.used = max(self.used, row + 1)
        if serial < 0:
            serial, self._next_serial = self._next_serial, self._next_serial + 1
        assert serial not in self._by_serial, f"session {serial} is alive"
        self._by_serial[serial] = row
        self._call(row, (tenant, model, serial if session is None else session))
        cells = self.cells
        cells.serial[row] = serial
        cells.home[row] = cells.bin[row] = -1
        cells.inflight[row] = cells.tip_blocks[row] = cells.tip[row] = cells.trunk[row] = 0
        cells.mixed[row] = 0
        cells.private_tokens[row] = cells.cold_work[row] = cells.weight[row] = 0.0
        cells.idle_s[row] = 0.0
        return row

    def rename(self, row: int, key: Key) -> None:
        """Change the key under which the session in `row` is found."""
        del self._by_key[self._keys[row]]
        self._call(row, key)

    def _call(self, row: int, key: Key) -> None:
        assert key not in self._by_key, f"{key} has a row"
        self._by_key[key] = row
        self._keys[row] = key

    def give_back(self, row: int) -> None:
        """Forget the session in `row`, and free the row. No worker may have the session's cache."""
        cells = self.cells
        del self._by_key[self._keys.pop(row)]
        del self._by_serial[cells.serial[row]]
        cells.serial[row] = 0
        cells.weight[row] = 0.0
        self._free.append(row)

    def idle(self) -> Ints:
        """Return the rows of all sessions that have no request in flight, int64[sessions]."""
        n = self.used
        rows: Ints = np.flatnonzero((self.serial[:n] > 0) & (self.inflight[:n] == 0))
        return rows

    def at_home(self, slot: int) -> Ints:
        """Return the rows of all sessions whose cache the worker in `slot` has, int64[sessions]."""
        n = self.used
        rows: Ints = np.flatnonzero((self.serial[:n] > 0) & (self.home[:n] == slot))
        return rows

    def longest_idle(self) -> Ints:
        """Return the rows of the sessions that should be forgotten first when the table is full.

        These are the 1/256 of the idle sessions that have been idle for longest, at least one. The
        result is empty if no session is idle.
        """
        idle = self.idle()
        if not len(idle):
            return idle
        count = max(len(idle) // _FORGOTTEN_AT_ONCE, 1)
        idle_s = self.idle_s[idle]
        last_s = np.partition(idle_s, count - 1)[count - 1]
        rows: Ints = idle[idle_s <= last_s][:count]
        return rows


class RowCells:
    """Gives access to single cells of the session table as plain Python numbers.

    The cells share the memory of the table's numpy columns.
    Lifetime: process.
    """

    def __init__(self, rows: SessionRows) -> None:
        self.serial = int_cells(rows.serial)
        self.home = int_cells(rows.home)
        self.inflight = int_cells(rows.inflight)
        self.mixed = int_cells(rows.mixed)
        self.tip_blocks = int_cells(rows.tip_blocks)
        self.tip = _hash_cells(rows.tip)
        self.private_tokens = float_cells(rows.private_tokens)
        self.cold_work = float_cells(rows.cold_work)
        self.trunk = _hash_cells(rows.trunk)
        self.idle_s = float_cells(rows.idle_s)
        self.bin = int_cells(rows.bin)
        self.weight = float_cells(rows.weight)


def _hash_cells(column: Hashes) -> memoryview[int]:
    return column.data.cast("B").cast("Q")


_ID_CHARS = 64  # of an id that is kept as it is
_ENDING_TOKENS = 16  # tokens at the end of a template, such as the start of an answer or a thought


class SessionFinder:
    """Finds the session of a request, by its session id or by the prompt that it continues. An id
    is checked against the prompts, because the clients of agents give one id to several
    conversations at once. If a request comes while another request with its id is unfinished, and
    its prompt does not continue the other's prompt, the id counts as mixed. From then on, the
    requests with this id are distinguished by the prompts that they continue. `owners` records for
    each prompt block which session uses it, or that several sessions do. It may name sessions that
    were forgotten. Lifetime: process.
    """

    def __init__(self, rows: SessionRows, entries: int) -> None:
        self._rows = rows
        self.owners = PrefixOwners(entries)

    def row(self, fact: Arrival, chain: Hashes, owner: int) -> int:
        """Return the row of a request's session, or -1 if the session is not known. `owner` is the
        serial number of the session that is recorded for the prompt's last known block.
        """
        rows = self._rows
        if fact.session is not None:
            row = rows.find(_key(fact))
            if row >= 0 and self._is_named_rightly(row, chain):
                return row
        row = rows.row_of(owner)
        if row < 0 or rows.cells.inflight[row] or not self._continues(row, chain):
            return -1
        tenant, model, name = rows.key(row)
        if (tenant, model) != (fact.tenant, fact.model):
            return -1
        # A row with an id cannot have another id; a row without one may just have got one.
        return -1 if fact.session is not None and isinstance(name, str) else row

    def name(self, row: int, fact: Arrival) -> None:
        """Give the session in `row` the id that its present request names, if the session has no id
        and no other session has this one.
        """
        rows = self._rows
        if fact.session is None or isinstance(rows.key(row)[2], str):
            return
        if rows.find(key := _key(fact)) < 0:
            rows.rename(row, key)

    def new(self, fact: Arrival, owner: int) -> int:
        """Return a row for the new session of a request. The table must not be full. `owner` is the
        serial number of the session that is recorded for the prompt's last known block, or -1. If
        that session was forgotten, the new session gets its serial number, because it is probably
        the same session. With another number, its prompt would seem to be shared by two sessions.
        """
        rows = self._rows
        heir = owner if owner >= 0 and rows.row_of(owner) < 0 else -1
        session = None
        if fact.session is not None:
            if (named := rows.find(_key(fact))) < 0:
                session = _short(fact.session)
            else:
                rows.cells.mixed[named] = 1
        return rows.take(fact.tenant, fact.model, session, heir)

    def keep_tip(self, row: int, chain: Hashes, block_size: int, prompt_tokens: int) -> None:
        """Remember how the next prompt of this session should begin: with its present prompt,
        except for the last tokens.
        """
        cells, blocks = self._rows.cells, len(chain)
        whole = max(min((prompt_tokens - _ENDING_TOKENS) // block_size, blocks), min(blocks, 1))
        cells.tip_blocks[row] = whole
        cells.tip[row] = int(chain[whole - 1]) if whole else 0

    def _is_named_rightly(self, row: int, chain: Hashes) -> bool:
        """Return True if a request belongs to the session in `row` whose id it names. A prompt of
        less than a block cannot be compared, so its id is trusted. The id is also trusted while no
        other request of the session is unfinished, because clients begin new conversations under
        the same id, for example after they compact a conversation.
        """
        cells = self._rows.cells
        if not len(chain) or not cells.tip_blocks[row] or self._continues(row, chain):
            return True
        return not (cells.inflight[row] or cells.mixed[row])

    def _continues(self, row: int, chain: Hashes) -> bool:
        """Return True if a prompt begins with the latest prompt of the session in `row`."""
        cells = self._rows.cells
        blocks = cells.tip_blocks[row]
        return 0 < blocks <= len(chain) and int(chain[blocks - 1]) == cells.tip[row]


def _key(fact: Arrival) -> Key:
    assert fact.session is not None
    return fact.tenant, fact.model, _short(fact.session)


def _short(session: str) -> str:
    """Return a session id, or a hash of the id if it is long, to save memory."""
    if len(session) <= _ID_CHARS:
        return session
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()
