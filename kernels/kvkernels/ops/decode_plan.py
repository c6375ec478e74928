"""What decode's CTAs compute, made on the host once a step for all layers.

A request is cut into chunks by its own length alone. So its numbers do not depend on the batch, and
a token that is computed again gets the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvkernels.ops.page_tables import check_table

LEAST_CHUNK, LARGEST_CHUNK, CHUNK_STEP, CHUNKS = 256, 1024, 64, 8
TILE = 16  # tokens: pages are multiples of it, items begin at multiples of it


class DecodePlan(NamedTuple):
    """Views of one int32 tensor, `all`, so that one copy brings a plan to the device.

    `items` has (request, first token, end, slot) of each piece of work, longest first; slot -1 is
    the only item of its request. The slots of request r are
    merge_slots[merge_starts[r] : merge_starts[r + 1]]. What lies beyond the counts is not read.
    """

    all: torch.Tensor
    item_count: torch.Tensor  # [1]
    items: torch.Tensor  # [most items, 4]
    merge_starts: torch.Tensor  # [requests + 1]
    merge_slots: torch.Tensor  # [most items]

    def on(self, device: torch.device | str) -> DecodePlan:
        """The same plan on `device`, by one copy."""
        return views(self.all.to(device), len(self.merge_starts) - 1, len(self.items))


def chunk_tokens(context_tokens: torch.Tensor) -> torch.Tensor:
    """Tokens of an item for requests of `context_tokens` int64[R]; multiples of 64.

    An eighth of the request, within [256, 1024]: shorter ones cost more in partial results than
    they gain in parallelism, longer ones leave a request alone on too few SMs.
    """
    eighth = -(-context_tokens // (CHUNKS * CHUNK_STEP)) * CHUNK_STEP
    return eighth.clamp(LEAST_CHUNK, LARGEST_CHUNK)


def most_items(requests: int, tokens: int) -> int:
    """Enough items for any `requests` whose contexts have `tokens` together: for fixed buffers."""
    return requests * CHUNKS + tokens // LARGEST_CHUNK


def views(buffer: torch.Tensor, requests: int, items: int) -> DecodePlan:
    """`buffer` int32[words(requests, items)] as a plan's parts."""
    table, starts = 4 + 4 * items, 5 + 4 * items + requests
    return DecodePlan(
        buffer,
        buffer[:1],
        buffer[4:table].view(items, 4),  # rows at multiples of 16 bytes
        buffer[table:starts],
        buffer[starts : starts + items],
    )


def words(requests: int, items: int) -> int:
    """Length of a plan's buffer."""
    return 5 + 5 * items + requests


def plan_decode(
    context_tokens: torch.Tensor,
    page_table: torch.Tensor,
    pages: int,
    page_tokens: int,
    items: int | None = None,
) -> DecodePlan:
    """The plan of a step of R requests, on the CPU.

    `context_tokens` int[R] is what each attends to, its own token included; 0 is a padding row,
    whose output is zeros. `page_table` int[R, most pages] names its pages, below `pages`. `items`
    is the room of a fixed buffer (`most_items`), by default just enough. Raises ValueError for a
    table that does not hold the context, or for too many items.
    """
    context = context_tokens.to("cpu", torch.int64)
    check_table(context, page_table.to("cpu"), pages, page_tokens)
    chunk = chunk_tokens(context)
    counts = (-(-context // chunk)).clamp_min(1)  # padding has one item of no tokens
    total = int(counts.sum())
    room = total if items is None else items
    if total > room:
        raise ValueError(f"{total} items do not fit into a plan of {room}")
    requests = len(context)
    plan = views(torch.zeros(words(requests, room), dtype=torch.int32), requests, room)
    request = torch.repeat_interleave(torch.arange(requests), counts)
    first = counts.cumsum(0) - counts
    begin = (torch.arange(total) - first[request]) * chunk[request]
    end = torch.minimum(begin + chunk[request], context[request])
    is_split = counts[request] > 1
    slot = torch.where(is_split, is_split.cumsum(0) - 1, -1)
    order = (end - begin).argsort(descending=True, stable=True)
    plan.item_count[0] = total
    plan.items[:total] = torch.stack((request, begin, end, slot), dim=1)[order].to(torch.int32)
    slots = torch.where(counts > 1, counts, 0)
    plan.merge_starts[1:] = slots.cumsum(0).to(torch.int32)
    plan.merge_slots[:] = torch.arange(room, dtype=torch.int32)
    return plan
