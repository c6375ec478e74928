"""What kernels read of page tables, checked where plans are made: on devices nobody can."""

from __future__ import annotations

import torch


def check_table(
    context_tokens: torch.Tensor, page_table: torch.Tensor, pages: int, page_tokens: int
) -> None:
    """Raise ValueError, by row and column, where `page_table` int[R, most pages] does not name
    the pages, below `pages`, that hold `context_tokens` int[R]. Both on the CPU.
    """
    if context_tokens.dim() != 1 or page_table.dim() != 2 or len(page_table) != len(context_tokens):
        raise ValueError(
            f"{list(context_tokens.shape)} context tokens and a page_table of "
            f"{list(page_table.shape)}: needs [requests] and [requests, pages]"
        )
    wide = page_table.shape[1] * page_tokens
    for row in ((context_tokens < 0) | (context_tokens > wide)).nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"request {row} has {int(context_tokens[row])} context tokens, its row of page_table "
            f"is for 0 to {wide}"
        )
    cells = page_table.numpy()  # whose minimum is several times faster than torch's
    if cells.size == 0 or (cells.min() >= 0 and cells.max() < pages):
        return  # the rest is a hundred times slower
    used = torch.arange(page_table.shape[1]) * page_tokens < context_tokens[:, None]
    bad = used & ((page_table < 0) | (page_table >= pages))
    for row, column in bad.nonzero().tolist()[:1]:
        raise ValueError(
            f"page_table[{row}, {column}] is {int(page_table[row, column])}, "
            f"pages go from 0 to {pages - 1}"
        )
