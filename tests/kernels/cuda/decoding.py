"""Makes calls of decode attention for requests that share no pages."""

from __future__ import annotations

import torch

from tests.kernels.shared_cases import Case

BOUND = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


def in_one_piece(lengths: list[int], made: Case) -> Case:
    """Return `made` with one work item for each request; plans do so for short requests only."""
    made.item_count[0], made.members[:] = len(lengths), torch.arange(len(lengths))
    made.merge_starts.zero_()
    for row, length in enumerate(lengths):
        begins = row * made.page_table.shape[1]
        made.items[row] = torch.tensor([row, 1, 0, length, -1, begins, 0, 0])
    return made
