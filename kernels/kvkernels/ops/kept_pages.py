"""Pages as numbers, whatever they are kept in: for the operators' implementations on CPUs."""

from __future__ import annotations

import torch


def numbers(
    kept: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, wide: torch.dtype
) -> torch.Tensor:
    """Pages [page, token, head, dim] as numbers in `wide`, with their scales where they have."""
    if scales is None:
        return kept[pages].to(wide)
    # As bytes: torch cannot index FP8.
    units = kept.view(torch.uint8)[pages].view(kept.dtype)
    return units.to(wide) * scales[pages].to(wide)[..., None]
