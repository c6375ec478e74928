"""Block ids of running requests as rows of one array: what a step's table is copied from.

A request's ids are a list that grows by a block now and then; making an array of thousands of them
anew in each step would cost more than all else that is laid out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.request import Request

LEAST_BLOCKS = 64  # of a row


class BlockRows:
    """`rows` requests at once; the event loop's. Lifetime: worker."""

    def __init__(self, rows: int) -> None:
        self._cells = np.zeros((rows, LEAST_BLOCKS), dtype=np.int32)
        self._lists: list[list[int]] = [[] for _ in range(rows)]  # what each row was copied from
        self._final = [0] * rows  # leading ids that stay: those of published blocks

    def of(self, request: Request, row: int) -> NDArray[np.int32]:
        """The ids of `request`, which has `row` to itself; true until the next call for it."""
        ids = request.block_ids
        if len(ids) > self._cells.shape[1]:
            wider = np.zeros((len(self._cells), 2 * len(ids)), dtype=np.int32)
            wider[:, : self._cells.shape[1]] = self._cells
            self._cells = wider
        known = self._final[row] if ids is self._lists[row] else 0
        self._cells[row, known : len(ids)] = ids[known:]
        self._lists[row], self._final[row] = ids, request.visible_blocks
        return self._cells[row, : len(ids)]
