"""Counts the prompt blocks of unfinished requests on each worker; a block that several requests
share counts once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.contract import Floats, Hashes, Ints
from policies.facts import Dispatched, Failure, Finish, Prefilled, Role, WorkerChange, legs_over

PIECE = 16  # blocks looked at as one: a prefix counts as shared up to its last whole piece
MAX_REQUESTS = 65_536  # tracked at once; beyond, the oldest is taken for finished

Sent = tuple[int, Role]  # a request and its leg


class ActiveBlocks:
    """Counts the prompt blocks of unfinished requests on each worker, without their answers.

    Blocks are compared in pieces of 16, by the chain hash of the last block of each piece. A chain
    hash covers all earlier blocks, so requests that share a piece share all earlier pieces.
    Lifetime: the policy's.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}  # worker -> distinct blocks in use
        self._users: dict[int, dict[int, int]] = {}  # piece -> worker -> requests that use it
        # (request, leg) -> worker, pieces, rest
        self._sent: dict[Sent, tuple[int, list[int], int]] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def observe(self, fact: Any) -> None:
        """Update the counts by the dispatch or end of a request, or by the removal of a worker.

        Facts of other kinds change nothing. The running time is O(pieces of the prompt).
        """
        kind = type(fact)
        if kind is Dispatched:
            self._add((fact.request_id, fact.leg), fact.worker_id, fact.chain)
        elif kind is Finish or kind is Failure or kind is Prefilled:
            for leg in legs_over(fact):
                self._remove((fact.request_id, leg))
        elif kind is WorkerChange and fact.state == "gone":
            for key in [key for key, sent in self._sent.items() if sent[0] == fact.worker_id]:
                self._remove(key)

    def beyond(self, chain: Hashes, worker_ids: Ints) -> Floats:
        """Return the number of blocks in use on each worker that `chain` lacks, float64[rows].

        `chain` has the chain hashes of a new request's prompt.
        """
        blocks, shared = self.blocks, self.shared(chain)
        return np.array(
            [blocks.get(w, 0) - shared.get(w, 0) for w in worker_ids.tolist()], dtype=np.float64
        )

    def shared(self, chain: Hashes) -> dict[int, int]:
        """Return the number of leading blocks of `chain` in use on each worker, by worker id.

        `chain` has the chain hashes of a new request's prompt. Workers that use none of these
        blocks are left out.
        """
        levels = []
        for piece in _pieces(chain):
            users = self._users.get(piece)
            if users is None:
                break
            levels.append(users)
        found: dict[int, int] = {}
        for depth in range(len(levels), 0, -1):
            users = levels[depth - 1]
            if len(users) > len(found):  # who uses a deeper piece is among them
                for worker_id in users:
                    found.setdefault(worker_id, depth * PIECE)
        return found

    def _add(self, key: Sent, worker_id: int, chain: Hashes) -> None:
        self._remove(key)
        if len(self._sent) >= MAX_REQUESTS:
            self._remove(next(iter(self._sent)))
        pieces, rest = _pieces(chain), len(chain) % PIECE
        self._sent[key] = (worker_id, pieces, rest)
        blocks = self.blocks.get(worker_id, 0) + rest
        for piece in pieces:
            users = self._users.setdefault(piece, {})
            if worker_id not in users:
                blocks += PIECE
            users[worker_id] = users.get(worker_id, 0) + 1
        if blocks:
            self.blocks[worker_id] = blocks

    def _remove(self, key: Sent) -> None:
        sent = self._sent.pop(key, None)
        if sent is None:
            return
        worker_id, pieces, freed = sent
        for piece in pieces:
            users = self._users[piece]
            users[worker_id] -= 1
            if not users[worker_id]:
                freed += PIECE
                del users[worker_id]
                if not users:
                    del self._users[piece]
        left = self.blocks.pop(worker_id, 0) - freed
        if left:
            self.blocks[worker_id] = left


def _pieces(chain: Hashes) -> list[int]:
    pieces: list[int] = chain[PIECE - 1 :: PIECE].tolist()
    return pieces
