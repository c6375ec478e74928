"""Lays out a step for the model: its tokens and block ids, as arrays. This runs on the event loop's
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.backends import Int8Choice
from engine.model.batch import FlatBatch, Piece, placed
from engine.scheduler.request import Request, State
from engine.scheduler.types import Step

LEAST_BLOCKS = 64  # of a row


class BlockRows:
    """Arrays with the block ids of up to `rows` running requests, for the event loop. Lifetime:
    worker.
    """

    def __init__(self, rows: int) -> None:
        self._cells = np.zeros((rows, LEAST_BLOCKS), dtype=np.int32)
        # The block list from which each row was copied.
        self._lists: list[list[int]] = [[] for _ in range(rows)]
        self._final = [0] * rows  # leading ids that stay: those of published blocks

    def of(self, request: Request, row: int) -> NDArray[np.int32]:
        """Return the block ids of `request`, which is the only request that uses `row`. The array
        is valid until the next call for the same request.
        """
        ids = request.block_ids
        if len(ids) > self._cells.shape[1]:
            wider = np.zeros((len(self._cells), 2 * len(ids)), dtype=np.int32)
            wider[:, : self._cells.shape[1]] = self._cells
            self._cells = wider
        known = self._final[row] if ids is self._lists[row] else 0
        self._cells[row, known : len(ids)] = ids[known:]
        self._lists[row], self._final[row] = ids, request.visible_blocks
        return self._cells[row, : len(ids)]


class TokenPool:
    """The latest token of each of up to `rows` requests, on `device`. Lifetime: worker. The event
    loop calls `row`, the model's thread `fill` and `keep`.
    """

    def __init__(self, rows: int, device: str = "cpu") -> None:
        self.latest = torch.zeros(rows, dtype=torch.int64, device=device)
        self._free = list(range(rows))
        self._owners: dict[int, tuple[Request, int]] = {}  # by request id

    def row(self, request: Request) -> int:
        """Return the row of a running request. There are as many rows as requests that may run at
        once.
        """
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
        """Write the tokens that `batch` lacks into it."""
        rows = batch.pool_rows
        kept = self.latest[rows.clamp(min=0)]
        batch.token_ids.copy_(torch.where(rows < 0, batch.token_ids, kept))

    def keep(self, rows: Sequence[int], ids: torch.Tensor) -> None:
        """Keep `ids` int64[len(rows)] as the latest tokens of these rows; -1, which means that no
        token was chosen, is kept as token 0.
        """
        self.latest[placed(rows, torch.int64, self.latest.device)] = ids.clamp(min=0)


@dataclass(frozen=True, slots=True)
class Work:
    """The pieces that a step computes, and the requests that get a token.

    Lifetime: step. `sampled` requests get the tokens at `positions`, counted from their prompts'
    first token, in the order of the pieces that need logits; `rows` are their rows of the token
    pool.
    """

    pieces: list[Piece]
    sampled: list[Request]
    positions: list[int]
    rows: list[int]


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A step that is ready for the model's thread. Lifetime: step."""

    work: Work
    batch: FlatBatch  # on the host
    graph: str | None = None  # `GraphUse`; None: there are no graphs
    int8: Int8Choice | None = None  # None: no weights are INT8

    @property
    def padded_rows(self) -> int:
        """Number of rows that are computed as padding."""
        return len(self.batch.token_ids) - len(self.work.pieces) if self.batch.is_fixed else 0

    @property
    def int8_backend(self) -> str | None:
        """The backend that computes the layers' INT8 products in this step; None if the model has
        no INT8 weights.
        """
        return self.int8.of_step(self.batch.sizes.tokens) if self.int8 else None


def work_of(step: Step, pool: TokenPool, blocks: BlockRows) -> Work:
    """Return the work of `step`, which was just scheduled: decodes, then chunks of prompts.

    The blocks of its pieces are views of `blocks`. A decode computes its last token, whose KV is
    not in the cache yet; if a step in flight will produce that token, the token pool will have it.
    """
    sampled = step.sampled
    pieces = [_decode(one, pool.row(one), blocks) for one in step.decodes]
    pieces += [
        Piece(
            token_ids=request.tokens(start, start + tokens).tolist(),
            start=start,
            block_ids=blocks.of(request, pool.row(request)),
            wants_logits=start + tokens == request.prefill_target,
        )
        for request, start, tokens in step.chunks
    ]
    return Work(
        pieces,
        sampled,
        positions=[one.scheduled_tokens for one in sampled],
        rows=[pool.row(one) for one in sampled],
    )


def _decode(one: Request, row: int, blocks: BlockRows) -> Piece:
    at = one.scheduled_tokens - 1
    held = blocks.of(one, row)
    if at >= one.total_tokens:
        return Piece((0,), at, held, pool_row=row)
    return Piece((one.token(at),), at, held)
