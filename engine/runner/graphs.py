"""Runs decode steps at fixed sizes on fixed buffers: as CUDA graphs if the device has CUDA.

A graph replays the same launches on the same memory. So a step is padded to the next size, and one
copy refreshes the data that the kernels read; rows of the page table are copied only as wide as the
longest row of the step. Without CUDA the same function is called on the same memory, which saves
nothing, but lets tests on CPUs cover everything except the capture (torch.cuda.graph).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from engine.model.backends import FellBack, device_lost
from engine.model.batch import FlatBatch, Piece, Planner, fixed_batch, is_cuda, pages_of

GRAPH_TOKENS = 2048  # of context at most: torch reads as much for every row
KERNEL_GRAPH_TOKENS = 8192  # of context a row, on average: kernels' partial results have room
WARM_UPS = 2  # before a capture: libraries choose and allocate as they are first called

# Why a step was one of a graph or not: it had chunks of prompts, too long a context or contexts too
# long together, or the graphs or the kernels that they hold have failed.
GraphUse = Literal["hit", "chunks", "graph_limit", "fallback"]

log = logging.getLogger(__name__)


def graph_rows(most: int) -> list[int]:
    """Return the numbers of decodes for which graphs are captured, up to `most`: 1, 2, 4, 8, then
    every multiple of 16, and `most`.
    """
    return sorted({rows for rows in (1, 2, 4, 8, *range(16, most, 16)) if rows < most} | {most})


class GraphRoom(NamedTuple):
    """The limits of a step that can be run by a graph of any size."""

    pages: int  # of each request
    tokens: int  # of all contexts together

    @property
    def table_bytes(self) -> int:
        """The bytes of one row of the page table."""
        return self.pages * torch.int32.itemsize


def graph_room(rows: int, max_tokens: int, block_size: int, has_kernels: bool) -> GraphRoom:
    """Return the limits of graphs of up to `rows` requests, each of at most `max_tokens`."""
    pages = -(-(max_tokens if has_kernels else min(max_tokens, GRAPH_TOKENS)) // block_size)
    longest = pages * block_size
    return GraphRoom(pages, min(rows * longest, max(rows * KERNEL_GRAPH_TOKENS, longest)))


class DecodeGraphs:
    """CUDA graphs of steps with up to `rows` decodes and contexts of up to `max_tokens`.

    Lifetime: worker. `forward(batch)` returns the logits of a fixed batch, [rows, `vocab`], as
    `dtype`. All graphs share their memory and that of the batch: one graph is replayed at a time,
    and its results are copied out. If a graph cannot be captured or replayed, all graphs are off
    from then on and `failed` says why; if the device is lost, too, the error is raised. `fell_back`
    says which of the model's kernels have failed: steps of those parts use no graph.
    """

    def __init__(
        self,
        forward: Callable[[FlatBatch], torch.Tensor],
        rows: int,
        max_tokens: int,
        block_size: int,
        vocab: int,
        dtype: torch.dtype,
        device: str = "cpu",
        report: Callable[[str], None] = log.info,
        planner: Planner | None = None,
        fell_back: Callable[[], FellBack] = dict,
    ) -> None:
        begun_s = time.monotonic()
        self.failed = ""
        self._forward = forward
        self._planner = planner
        self._fell_back = fell_back
        self._room = graph_room(rows, max_tokens, block_size, planner is not None)
        self._block_size = block_size
        self._device = device
        self._sizes = graph_rows(rows)
        self._made = torch.zeros(rows, vocab, dtype=dtype, device=device)
        self._memory = torch.cuda.graph_pool_handle() if is_cuda(device) else None
        try:
            self._graphs = self._capture()
        except Exception as error:  # noqa: BLE001 - what a model raises is of no common kind
            self._turn_off("a capture that failed", error)
            return
        report(
            f"{len(self._sizes)} graphs of 1..{rows} decodes with up to "
            f"{self._room.pages * block_size} tokens each, {self._room.tokens} together, in "
            f"{time.monotonic() - begun_s:.1f} s"
        )

    def use(self, pieces: Sequence[Piece], has_chunks: bool) -> GraphUse:
        """Return whether a graph can run a step of `pieces`, or why it cannot."""
        if self.failed:
            return "fallback"
        if has_chunks:
            return "chunks"
        tokens = sum(piece.start + len(piece.token_ids) for piece in pieces)
        fits = self._longest(pieces) <= self._room.pages and tokens <= self._room.tokens
        return "hit" if fits and len(pieces) <= self._sizes[-1] else "graph_limit"

    def lay_out(self, pieces: Sequence[Piece]) -> FlatBatch:
        """Return a batch on the host of `pieces`, which fit a graph, padded to the next size of a
        graph.
        """
        rows = self._sizes[bisect_left(self._sizes, len(pieces))]
        # Torch reads rows of the table as wide as the graph's; with a plan, kernels read only the
        # planned part.
        pages = self._room.pages if self._planner is None else self._longest(pieces)
        return self._fixed(pieces, rows, pages)

    def _longest(self, pieces: Sequence[Piece]) -> int:
        return max(pages_of(piece, self._block_size) for piece in pieces)

    def _fixed(self, pieces: Sequence[Piece], rows: int, pages: int) -> FlatBatch:
        sizes = rows, pages, self._block_size, self._device
        room_tokens = min(rows * self._room.pages * self._block_size, self._room.tokens)
        return fixed_batch(pieces, *sizes, self._planner, room_tokens)

    def logits(self, batch: FlatBatch, fill: Callable[[FlatBatch], None]) -> torch.Tensor:
        """Return the logits [rows, vocab] of a batch from `lay_out`, padding included; they are
        valid until the next call. `fill` writes the tokens that the batch lacks into it, on the
        device.
        """
        run = self._graphs[len(batch.token_ids)]
        given = batch.within(self._data)
        fill(given)
        try:
            run()
        except Exception as error:  # noqa: BLE001 - as above
            self._turn_off("a replay that failed", error)
            # K and V that were written already are written again, to the same slots.
            return self._forward(given)
        return self._made[: len(batch.token_ids)]

    def _turn_off(self, why: str, error: Exception) -> None:
        if device_lost(self._device):
            raise error
        self.failed = f"{why}: {error!s:.300}"
        log.error("graphs: steps go without from here on, because of %s", self.failed)

    def _capture(self) -> dict[int, Callable[[], None]]:
        """Capture all graphs; return, by number of rows, the function that computes the batch in
        `_data`.
        """
        largest = self._fixed([], self._sizes[-1], self._room.pages)
        self._data = torch.zeros(largest.sizes.nbytes, dtype=torch.uint8, device=self._device)
        # The largest first: the other graphs reuse its memory.
        return {rows: self._captured(rows) for rows in reversed(self._sizes)}

    def _captured(self, rows: int) -> Callable[[], None]:
        static = self._fixed([], rows, self._room.pages).within(self._data)

        def run() -> None:
            self._made[:rows].copy_(self._forward(static))
            if fell_back := self._fell_back():  # torch does not read the table as the plan does
                raise RuntimeError("; ".join(fell_back.values()))

        if self._memory is None:
            return run
        current = torch.cuda.current_stream(self._device)
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(current)
        # The stream also encloses the capture: a failed capture leaves the current stream changed.
        with torch.cuda.stream(beside):
            for _ in range(WARM_UPS):
                run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                run()
        current.wait_stream(beside)
        return graph.replay
