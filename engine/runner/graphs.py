"""Steps of decodes at fixed sizes on fixed buffers: CUDA graphs, where there is CUDA.

A graph replays what was launched once, on the same memory: so a step is padded to the next size,
and one copy refreshes what the kernels read. Anywhere else the same function is called on the same
buffers, which saves nothing and is how CPUs try all of it but the capture (torch.cuda.graph).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from engine.model.batch import FlatBatch, Piece, Planner, fixed_batch, is_cuda, pages_of
from engine.model.kernel_choice import device_lost

# Of context. Torch reads as much for every row; kernels do not, but their buffers are that large.
GRAPH_TOKENS, KERNEL_GRAPH_TOKENS = 2048, 8192
WARM_UPS = 2  # before a capture: libraries choose and allocate as they are first called

# Why a step was one of a graph or not: it had chunks of prompts, too long a context, or the graphs
# or the kernels that they hold have failed.
GraphUse = Literal["hit", "chunks", "graph_limit", "fallback"]

log = logging.getLogger(__name__)


def graph_rows(most: int) -> list[int]:
    """The sizes up to `most` decodes: 1, 2, 4, 8, then every 16th, and `most`."""
    return sorted({rows for rows in (1, 2, 4, 8, *range(16, most, 16)) if rows < most} | {most})


def graph_pages(max_tokens: int, block_size: int, has_kernels: bool) -> int:
    """Pages that a graph reads of each request, none of which has more than `max_tokens`."""
    longest = KERNEL_GRAPH_TOKENS if has_kernels else GRAPH_TOKENS
    return -(-min(max_tokens, longest) // block_size)


class DecodeGraphs:
    """Decodes of up to `rows` requests with contexts of up to `max_tokens`. Lifetime: worker.

    `forward(batch)` gives the logits of a fixed batch, [rows, `vocab`], as `dtype`. All graphs
    share their memory: one is replayed at a time, and what leaves it is copied out. Where one
    cannot be captured or replayed, all are off from then on and `failed` says why, unless the
    device is lost, too: that raises what the graph raised.
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
        tell: Callable[[str], None] = log.info,
        planner: Planner | None = None,
    ) -> None:
        begun_s = time.monotonic()
        self.failed = ""
        self._forward = forward
        self._planner = planner
        self._pages = graph_pages(max_tokens, block_size, planner is not None)
        self._block_size = block_size
        self._device = device
        self._sizes = graph_rows(rows)
        self._made = torch.zeros(rows, vocab, dtype=dtype, device=device)
        self._memory = torch.cuda.graph_pool_handle() if is_cuda(device) else None
        # The largest first: the others find room in its memory.
        try:
            self._graphs = {size: self._captured(size) for size in reversed(self._sizes)}
        except Exception as error:  # noqa: BLE001 - what a model raises is of no common kind
            self._turn_off("a capture that failed", error)
            return
        tell(
            f"{len(self._sizes)} graphs of 1..{rows} decodes with up to "
            f"{self._pages * block_size} tokens each, in {time.monotonic() - begun_s:.1f} s"
        )

    def use(self, pieces: Sequence[Piece], has_chunks: bool) -> GraphUse:
        """Whether a graph has room for a step of `pieces`, or why not."""
        if self.failed:
            return "fallback"
        if has_chunks:
            return "chunks"
        longest = max(pages_of(piece, self._block_size) for piece in pieces)
        fits = longest <= self._pages and len(pieces) <= self._sizes[-1]
        return "hit" if fits else "graph_limit"

    def lay_out(self, pieces: Sequence[Piece]) -> FlatBatch:
        """`pieces`, of a hit, padded to the next size; on the host."""
        return self._fixed(pieces, self._sizes[bisect_left(self._sizes, len(pieces))])

    def _fixed(self, pieces: Sequence[Piece], rows: int) -> FlatBatch:
        return fixed_batch(pieces, rows, self._pages, self._block_size, self._device, self._planner)

    def logits(self, batch: FlatBatch, fill: Callable[[FlatBatch], None]) -> torch.Tensor:
        """[rows, vocab] of what `lay_out` gave, padding included; true until the next call.

        `fill` puts tokens into the batch that it lacks, where it is computed.
        """
        static, replay = self._graphs[len(batch.token_ids)]
        static.data.copy_(batch.data, non_blocking=True)
        fill(static)
        try:
            replay()
        except Exception as error:  # noqa: BLE001 - as above
            self._turn_off("a replay that failed", error)
            # K and V that were written already are written again, to the same slots.
            return self._forward(static)
        return self._made[: len(batch.token_ids)]

    def _turn_off(self, why: str, error: Exception) -> None:
        if device_lost(self._device):
            raise error
        self.failed = f"{why}: {error!s:.300}"
        log.error("graphs: steps go without from here on, because of %s", self.failed)

    def _captured(self, rows: int) -> tuple[FlatBatch, Callable[[], None]]:
        """A graph's buffers, and what computes them anew."""
        static = self._fixed([], rows).on(self._device)

        def run() -> None:
            self._made[:rows].copy_(self._forward(static))

        if self._memory is None:
            return static, run
        current = torch.cuda.current_stream(self._device)
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(current)
        # Around the capture, too: one that fails leaves the current stream changed.
        with torch.cuda.stream(beside):
            for _ in range(WARM_UPS):
                run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                run()
        current.wait_stream(beside)
        return static, graph.replay
