"""One step's tokens as flat tensors, decode and prefill mixed, and their transfer to a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


def is_cuda(device: str | torch.device) -> bool:
    """Return whether `device` is a CUDA device, on which launched work is computed later."""
    return torch.device(device).type == "cuda"


def host_bytes(count: int, device: str | torch.device) -> torch.Tensor:
    """Return a tensor uint8[count] of zeros on the host, in memory from which a copy to `device`
    needs no wait.
    """
    return torch.zeros(count, dtype=torch.uint8, pin_memory=is_cuda(device))


def placed(
    values: Sequence[float] | torch.Tensor, dtype: torch.dtype, device: str | torch.device
) -> torch.Tensor:
    """Return `values` as a tensor on `device`."""
    made = torch.as_tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if is_cuda(device) else made.to(device)


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` on the host; it is complete when an event that is recorded after
    this call has passed.
    """
    if tensor.device.type == "cpu":
        return tensor
    kept = torch.empty_like(tensor, device="cpu", pin_memory=is_cuda(tensor.device))
    return kept.copy_(tensor, non_blocking=True)


Ints32 = NDArray[np.int32]
Ints64 = NDArray[np.int64]
KNOWN = -1  # in place of a row of the token pool: the token is in the batch


class Piece(NamedTuple):
    """The part of one request that a step computes.

    Lifetime: step. `block_ids` names the blocks with the KV of the `start` tokens before
    `token_ids` and the blocks for the new tokens; it is read while the batch is laid out.
    `pool_row` is the row in which the device keeps the one token that the host does not know yet.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int] | Ints32
    wants_logits: bool = True  # of its last token
    wants_all: bool = False  # of all of its tokens
    pool_row: int = KNOWN


class Sizes(NamedTuple):
    """The sizes of a batch: tokens, requests, pages in a request's row, and rows with logits.

    The further fields describe the plan that kernels read, and are 0 without a plan: its length in
    int32, the number of first requests that decode, and the room for the items and slots of decode
    and prefill.
    """

    tokens: int
    requests: int
    pages: int
    sampled: int
    plan_words: int = 0
    decodes: int = 0
    decode_items: int = 0
    decode_slots: int = 0
    prefill_items: int = 0
    prefill_slots: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the batch."""
        wide = 4 * self.tokens + self.sampled
        narrow = 2 * self.requests + 1 + self.requests * self.pages
        return 4 * self.plan_words + 8 * wide + 4 * narrow


Span = tuple[int, int, int]  # first row, rows, context tokens


class Saving(NamedTuple):
    """The savings of an attention plan: how many runs of tokens several requests of a step read
    together, and the bytes of KV that the step therefore does not read again.
    """

    shared_prefix_groups: int = 0
    kv_bytes_saved: int = 0


NOTHING_SAVED = Saving()


class Plan(NamedTuple):
    """The plan of the kernels' work in a step, and the sizes that are needed to read it. Lifetime:
    step.
    """

    words: torch.Tensor  # int32 on the host, a multiple of 4
    decodes: int = 0
    decode_items: int = 0
    decode_slots: int = 0
    prefill_items: int = 0
    prefill_slots: int = 0
    saving: Saving = NOTHING_SAVED


class Planner(Protocol):
    """Plans a step for kernels on the host, once for all layers."""

    def __call__(
        self, spans: Sequence[Span], page_table: torch.Tensor, room_tokens: int | None
    ) -> Plan:
        """Return the plan of a step; requests beyond `spans` are padding. If `room_tokens` is
        given, the plan has the size that any equal number of decodes needs whose contexts have this
        many tokens together; None means as small as possible.
        """


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """T tokens of R requests, S of which need logits. Lifetime: step.

    A slot is block_id * block_size + offset, or -1 for padding, which is computed but not stored.
    `spans` has (first row, rows, context tokens) of each request on the CPU, so that kernels are
    chosen without asking the device. A fixed batch has one token a request, and the sizes of its
    tensors do not depend on its requests: then kernels read no spans. All tensors are views of
    `data`, so that one copy moves them; the page table is the last, so that batches that differ
    only in its size have all other tensors at the same places.
    """

    token_ids: torch.Tensor  # int64[T]
    positions: torch.Tensor  # int64[T]
    slots: torch.Tensor  # int64[T]
    pool_rows: torch.Tensor  # int64[T], of the token pool where the token is there, else KNOWN
    query_starts: torch.Tensor  # int32[R + 1]
    context_tokens: torch.Tensor  # int32[R], this step's included
    page_table: torch.Tensor  # int32[R, pages of the longest]
    sample_rows: torch.Tensor  # int64[S], rows of T
    plan: torch.Tensor  # int32[plan words], at a multiple of 16 bytes
    spans: tuple[Span, ...]
    sizes: Sizes
    data: torch.Tensor  # uint8
    saving: Saving = NOTHING_SAVED
    is_fixed: bool = False

    @classmethod
    def over(cls, data: torch.Tensor, sizes: Sizes, spans: tuple[Span, ...]) -> FlatBatch:
        """Return a batch whose tensors are views of `data`, uint8[sizes.nbytes]."""
        tokens, requests, pages, sampled, plan_words = sizes[:5]
        plan, wide_bytes, narrow_bytes = torch.split(
            data,
            [4 * plan_words, 8 * (4 * tokens + sampled), 4 * (2 * requests + 1 + requests * pages)],
        )
        wide, narrow = wide_bytes.view(torch.int64), narrow_bytes.view(torch.int32)
        ids, positions, slots, rows, sample_rows = torch.split(
            wide, [tokens, tokens, tokens, tokens, sampled]
        )
        starts, context, table = torch.split(narrow, [requests + 1, requests, requests * pages])
        return cls(
            token_ids=ids,
            positions=positions,
            slots=slots,
            pool_rows=rows,
            query_starts=starts,
            context_tokens=context,
            page_table=table.view(requests, pages),
            sample_rows=sample_rows,
            plan=plan.view(torch.int32),
            spans=spans,
            sizes=sizes,
            data=data,
        )

    def on(self, device: str | torch.device) -> FlatBatch:
        """Return the same batch on `device`."""
        if self.data.device == torch.device(device):
            return self
        return self.within(torch.empty(len(self.data), dtype=torch.uint8, device=device))

    def within(self, buffer: torch.Tensor) -> FlatBatch:
        """Return the same batch in the first bytes of `buffer`, uint8; from pinned memory the host
        does not wait.
        """
        data = buffer[: len(self.data)].copy_(self.data, non_blocking=True)
        return replace(FlatBatch.over(data, self.sizes, self.spans), is_fixed=self.is_fixed)


def flat_batch(
    pieces: Sequence[Piece], block_size: int, device: str = "cpu", planner: Planner | None = None
) -> FlatBatch:
    """Lay out `pieces` one after another; logits come back in the same order.

    The batch is on the host, ready to be copied to `device` (`FlatBatch.on`), with the plan of a
    `planner`. Raises ValueError for a piece without tokens, or whose blocks do not cover its
    tokens.
    """
    if not pieces:
        raise ValueError("a batch needs at least one piece")
    pages = max(pages_of(piece, block_size) for piece in pieces)
    return _laid_out(pieces, pages, 0, block_size, device, planner, None)


def fixed_batch(
    pieces: Sequence[Piece],
    rows: int,
    pages: int,
    block_size: int,
    device: str = "cpu",
    planner: Planner | None = None,
    room_tokens: int | None = None,
) -> FlatBatch:
    """Return decodes of one token each, padded to `rows` requests of `pages` pages each.

    Rows of padding write nothing and read the first token of block 0; their results are not used.
    The plan has room for contexts of `room_tokens` tokens together; None means full pages. Raises
    ValueError for pieces of other sizes, too many of them, or too long ones.
    """
    if room_tokens is None:
        room_tokens = rows * pages * block_size
    if len(pieces) > rows or any(len(piece.token_ids) != 1 for piece in pieces):
        raise ValueError(f"{len(pieces)} pieces are not at most {rows} of one token each")
    if any(pages_of(piece, block_size) > pages for piece in pieces):
        raise ValueError(f"a piece ends beyond {pages} pages of {block_size} tokens")
    padding = rows - len(pieces)
    return _laid_out(pieces, pages, padding, block_size, device, planner, room_tokens)


def pages_of(piece: Piece, block_size: int) -> int:
    """Return the number of blocks up to the last token of `piece`."""
    return -(-(piece.start + len(piece.token_ids)) // block_size)


def _laid_out(
    pieces: Sequence[Piece],
    pages: int,
    padding: int,
    block_size: int,
    device: str,
    planner: Planner | None,
    room_tokens: int | None,
) -> FlatBatch:
    """Return a batch of `pieces`, then `padding` requests of one token that is not stored; it is
    fixed if `room_tokens` is given.
    """
    counts = _integers(len(one.token_ids) for one in pieces)
    begins = _integers(one.start for one in pieces)
    _check(pieces, counts, begins, block_size)
    stops, firsts = begins + counts, counts.cumsum() - counts
    tokens = int(counts.sum())
    piece = np.repeat(np.arange(len(pieces)), counts)  # of each token
    positions = np.arange(tokens) - (firsts - begins)[piece]
    table = _table(pieces, stops, len(pieces) + padding, pages, block_size)
    slots = table[piece, positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size
    is_sampled = np.repeat([one.wants_all for one in pieces], counts).astype(bool)
    is_sampled[(firsts + counts - 1)[[one.wants_logits for one in pieces]]] = True
    spans = list(zip(firsts.tolist(), counts.tolist(), stops.tolist(), strict=True))
    plan = Plan(torch.empty(0, dtype=torch.int32))
    if planner:
        plan = planner(spans, torch.from_numpy(table), room_tokens)
    sampled = np.flatnonzero(is_sampled)
    sizes = Sizes(
        *(tokens + padding, len(table), pages, len(sampled) + padding),
        *(len(plan.words), *plan[1:-1]),
    )
    is_fixed = room_tokens is not None
    kept = () if is_fixed else tuple(spans)
    made = FlatBatch.over(host_bytes(sizes.nbytes, device), sizes, kept)
    ids = chain.from_iterable(one.token_ids for one in pieces)
    rows = _integers(one.pool_row for one in pieces)[piece]
    for field, values, beyond in (
        (made.token_ids, np.fromiter(ids, np.int64, tokens), 0),
        (made.positions, positions, 0),
        (made.slots, slots, -1),
        (made.pool_rows, rows, KNOWN),
        (made.sample_rows, sampled, np.arange(tokens, tokens + padding)),
        (made.query_starts, firsts, np.arange(tokens, tokens + padding + 1)),
        (made.context_tokens, stops, 1),
    ):
        cells = field.numpy()
        cells[: len(values)], cells[len(values) :] = values, beyond
    made.page_table.numpy()[:] = table
    made.plan.numpy()[:] = plan.words.numpy()
    return replace(made, saving=plan.saving, is_fixed=is_fixed)


def _integers(values: Iterable[int]) -> Ints64:
    return np.array(list(values), dtype=np.int64)


def _table(
    pieces: Sequence[Piece], stops: Ints64, rows: int, pages: int, block_size: int
) -> Ints32:
    """Return the page table: for each piece its blocks up to its last token. The other entries are
    block 0, and are not read.
    """
    cells, last = np.zeros((rows, pages), dtype=np.int32), -(-stops // block_size)
    for row, (piece, count) in enumerate(zip(pieces, last.tolist(), strict=True)):
        cells[row, :count] = piece.block_ids[:count]
    return cells


def _check(pieces: Sequence[Piece], counts: Ints64, begins: Ints64, block_size: int) -> None:
    held = _integers(len(one.block_ids) for one in pieces)
    empty = (counts == 0) | (begins < 0)
    short = held * block_size < begins + counts
    for number in np.flatnonzero(empty | short).tolist()[:1]:
        if empty[number]:
            raise ValueError(
                f"piece {number} has {counts[number]} tokens from position {begins[number]}"
            )
        raise ValueError(
            f"piece {number} ends at token {begins[number] + counts[number]}, its {held[number]} "
            f"blocks of {block_size} do not hold that"
        )
