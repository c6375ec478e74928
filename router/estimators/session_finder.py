"""Whose a request is: the session of its id, or else the one that its prompt goes on from.

A prompt goes on from a session's last one where it begins with all of that, but for an ending that
a chat template may write in another way in the next turn; a chain hash stands for all before it, so
one comparison tells. A session whose request is still in flight cannot go on: what begins like it
is a sibling, a fork or a sub-agent, so another session.
"""

from __future__ import annotations

import hashlib

from kvkernels import PrefixOwners
from policies.contract import Hashes
from policies.facts import Arrival
from router.estimators.session_rows import SessionRows

_ID_CHARS = 64  # of an id that is kept as it is
_ENDING_TOKENS = 16  # such as what asks for an answer or opens a thought


class SessionFinder:
    """Lifetime: process. `owners` may know sessions that are forgotten."""

    def __init__(self, rows: SessionRows, entries: int) -> None:
        self._rows = rows
        self.owners = PrefixOwners(entries)

    def row(self, fact: Arrival, chain: Hashes, owner: int) -> int:
        """The session of a request whose deepest known block is `owner`'s; -1: not known."""
        rows = self._rows
        if fact.session is not None:
            row = rows.find((fact.tenant, fact.model, _short(fact.session)))
            if row >= 0:
                return row
        row = rows.row_of(owner)
        if row < 0 or not self._goes_on(row, chain):
            return -1
        tenant, model, name = rows.key(row)
        if (tenant, model) != (fact.tenant, fact.model):
            return -1
        # One that has an id is not another id's; one without has perhaps been given one now.
        return -1 if fact.session is not None and isinstance(name, str) else row

    def name(self, row: int, fact: Arrival) -> None:
        """Its request came with an id: from now on it is found by that."""
        if fact.session is not None and isinstance(self._rows.key(row)[2], int):
            self._rows.rename(row, (fact.tenant, fact.model, _short(fact.session)))

    def new(self, fact: Arrival, owner: int) -> int:
        """A row for a session not known before; the table must not be full.

        The blocks of an owner that is no more are its heir's, with the serial: or a session that
        was forgotten and comes back would share its past with itself.
        """
        heir = owner if owner >= 0 and self._rows.row_of(owner) < 0 else -1
        session = None if fact.session is None else _short(fact.session)
        return self._rows.take(fact.tenant, fact.model, session, heir)

    def keep_tip(self, row: int, chain: Hashes, block_size: int, prompt_tokens: int) -> None:
        """Remember how the next prompt of this session begins."""
        cells, blocks = self._rows.cells, len(chain)
        whole = max(min((prompt_tokens - _ENDING_TOKENS) // block_size, blocks), min(blocks, 1))
        cells.tip_blocks[row] = whole
        cells.tip[row] = int(chain[whole - 1]) if whole else 0

    def _goes_on(self, row: int, chain: Hashes) -> bool:
        cells = self._rows.cells
        blocks = cells.tip_blocks[row]
        return (
            cells.inflight[row] == 0
            and 0 < blocks <= len(chain)
            and int(chain[blocks - 1]) == cells.tip[row]
        )


def _short(session: str) -> str:
    """An id, or what stands for a long one: the table keeps very many."""
    if len(session) <= _ID_CHARS:
        return session
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()
