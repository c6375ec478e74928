"""A step as it goes to the model: laid out on the event loop, where requests stand still."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.batch import FlatBatch, Piece
from engine.model.int8_choice import Int8Choice
from engine.request import Request
from engine.runner.block_rows import BlockRows
from engine.runner.token_pool import TokenPool
from engine.scheduler_types import Step


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes. Lifetime: step.

    `sampled` requests get the tokens at `positions`, counted from their prompts' first, in the
    order of the pieces that want logits; `rows` of the token pool are theirs.
    """

    pieces: list[Piece]
    sampled: list[Request]
    positions: list[int]
    rows: list[int]


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A step as it goes to the model's thread. Lifetime: step."""

    work: Work
    batch: FlatBatch  # on the host
    graph: str | None = None  # `GraphUse`; None: there are no graphs
    int8: Int8Choice | None = None  # None: no weights are INT8

    @property
    def padded_rows(self) -> int:
        """Rows computed for nobody."""
        return len(self.batch.token_ids) - len(self.work.pieces) if self.batch.is_fixed else 0

    @property
    def int8_backend(self) -> str | None:
        """What multiplies the layers' INT8 weights in this step; None: none are."""
        return self.int8.of_step(self.batch.sizes.tokens) if self.int8 else None


def work_of(step: Step, pool: TokenPool, blocks: BlockRows) -> Work:
    """`step`, just scheduled: decodes, then chunks; its pieces' blocks are views of `blocks`.

    A decode computes its last token, whose KV is not in the cache yet; where a step in flight is
    about to say it, the token pool has it.
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
