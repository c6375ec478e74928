"""How many rows a matrix product may have without changing any row's result.

The bar is that a request's numbers do not depend on what else is in its batch. CPU libraries
add up in an order of their own by shape (one row goes another way than many), so products are
cut into tiles of row counts for which a probe found the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional

WIDTHS = (16, 64, 256)  # rows of a tile, narrowest first
ROW_BY_ROW = (1,)


@cache
def linear_widths(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Row counts, of WIDTHS, by which x[rows, inputs] @ W[outputs, inputs].T gives equal rows."""
    weight = _random((outputs, inputs), dtype)
    return agreeing(lambda rows: functional.linear(rows, weight), inputs, dtype)


@cache
def attention_widths(head_dim: int, keys: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Row counts for which both products of attention over a tile of `keys` give equal rows."""
    k, v = _random((1, head_dim, keys), dtype), _random((1, keys, head_dim), dtype)
    scores = agreeing(lambda rows: torch.bmm(rows[None], k)[0], head_dim, dtype)
    mixed = agreeing(lambda rows: torch.bmm(rows[None], v)[0], keys, dtype)
    return tuple(width for width in scores if width in mixed) or ROW_BY_ROW


def agreeing(
    multiply: Callable[[torch.Tensor], torch.Tensor], inputs: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """The widths whose rows equal the narrowest's, wherever they stand; else ROW_BY_ROW."""
    rows = _random((WIDTHS[-1], inputs), dtype)

    def in_tiles(of: torch.Tensor, width: int) -> torch.Tensor:
        return torch.cat([multiply(tile.clone()) for tile in torch.split(of, width)])

    base = in_tiles(rows, WIDTHS[0])
    agree = []
    for width in WIDTHS:
        turned = in_tiles(rows.flip(0), width).flip(0)
        if torch.equal(in_tiles(rows, width), base) and torch.equal(turned, base):
            agree.append(width)
    return tuple(agree) if WIDTHS[0] in agree else ROW_BY_ROW


def cuts(rows: int, widths: tuple[int, ...]) -> list[int]:
    """Tile widths, widest first, that cover `rows`; only the last may reach past them."""
    chosen, left = [], rows
    for width in reversed(widths):
        chosen += [width] * (left // width)
        left %= width
    return chosen + [widths[0]] * (left > 0)


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
