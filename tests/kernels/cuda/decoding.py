"""Calls of decode for requests that share nothing."""

from __future__ import annotations

import torch

from tests.kernels.shared_cases import Case

BOUND = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


def in_one_piece(lengths: list[int], made: Case) -> Case:
    """Replace the items of `made` by one for each request. Plans do so for short requests only."""
    made.item_count[0], made.members[:] = len(lengths), torch.arange(len(lengths))
    made.merge_starts.zero_()
    for row, length in enumerate(lengths):
        begins = row * made.page_table.shape[1]
        made.items[row] = torch.tensor([row, 1, 0, length, -1, begins, 0, 0])
    return made
