"""The latest token of each running request, where the model computes.

A step leaves its tokens here and the next one takes them from here, so that it can be laid out
before anybody on the host has seen them. Steps compute in order: a row is given to another request
only for a step after the last one that read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.batch import FlatBatch
from engine.model.placed import placed
from engine.request import Request, State


class TokenPool:
    """`rows` tokens on `device`. Lifetime: worker.

    `row` is the event loop's, `fill` and `keep` are the model's thread's.
    """

    def __init__(self, rows: int, device: str = "cpu") -> None:
        self.latest = torch.zeros(rows, dtype=torch.int64, device=device)
        self._free = list(range(rows))
        self._owners: dict[int, tuple[Request, int]] = {}  # by request id

    def row(self, request: Request) -> int:
        """The row of a running request; there is one for as many as may run at once."""
        owner, row = self._owners.get(request.request_id, (None, 0))
        if owner is request:
            return row
        if not self._free:
            for request_id, (one, old) in list(self._owners.items()):
                if one.state is not State.RUNNING:
                    del self._owners[request_id]
                    self._free.append(old)
        row = self._free.pop()
        self._owners[request.request_id] = (request, row)
        return row

    def fill(self, batch: FlatBatch) -> None:
        """Put the tokens that `batch` lacks into it."""
        rows = batch.pool_rows
        kept = self.latest[rows.clamp(min=0)]
        batch.token_ids.copy_(torch.where(rows < 0, batch.token_ids, kept))

    def keep(self, rows: Sequence[int], ids: torch.Tensor) -> None:
        """`ids` int64[len(rows)] are the latest tokens now; -1, which is none, as token 0."""
        self.latest[placed(rows, torch.int64, self.latest.device)] = ids.clamp(min=0)
