"""What prefill's CTAs compute, made on the host once a step for all layers.

A request's new tokens are cut into items of as many tokens as fill ROWS rows with the query heads
of one KV head. Items that see most come first, so that the last ones to run are short.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvkernels.ops.page_tables import check_table

ROWS = 128  # of a CTA: query tokens times the heads of a group
MAX_CONTEXT = 1 << 30


class PrefillPlan(NamedTuple):
    """Views of one int32 tensor, `all`, so that one copy brings a plan to the device.

    `items` has (request, first row of q, tokens, position of the first) of each piece of work.
    What lies beyond the count is not read.
    """

    all: torch.Tensor
    item_count: torch.Tensor  # [1]
    items: torch.Tensor  # [most items, 4]

    def on(self, device: torch.device | str) -> PrefillPlan:
        """The same plan on `device`, by one copy."""
        return views(self.all.to(device))


def item_tokens(group: int) -> int:
    """Query tokens of an item, for `group` query heads a KV head. Raises ValueError."""
    if not 1 <= group <= ROWS:
        raise ValueError(f"{group} query heads a KV head: prefill has 1 to {ROWS}")
    return ROWS // group


def most_items(requests: int, tokens: int, group: int) -> int:
    """Enough items for any `requests` with `tokens` new ones together: for fixed buffers."""
    return requests + tokens // item_tokens(group)


def views(buffer: torch.Tensor) -> PrefillPlan:
    """`buffer` int32[4 + 4 * items] as a plan's parts; rows at multiples of 16 bytes."""
    return PrefillPlan(buffer, buffer[:1], buffer[4:].view(-1, 4))


def plan_prefill(
    spans: torch.Tensor,
    rows: int,
    page_table: torch.Tensor,
    pages: int,
    page_tokens: int,
    group: int,
    items: int | None = None,
) -> PrefillPlan:
    """The plan of a step of R requests over `rows` rows of q, on the CPU.

    `spans` int[R, 3] has of each request its first row of q, its tokens in this step (0: not for
    prefill) and its context tokens, these included. `page_table` int[R, most pages] names its
    pages, below `pages`. `items` is the room of a fixed buffer (`most_items`), by default just
    enough. Raises ValueError for a table that does not hold the context, for tokens beyond q or
    the context, or for too many items.
    """
    spans = spans.to("cpu", torch.int64)
    if spans.dim() != 2 or spans.shape[1] != 3:
        raise ValueError(f"spans have shape {list(spans.shape)}, need [requests, 3]")
    first, tokens, context = spans.unbind(1)
    bad = (first < 0) | (tokens < 0) | (tokens > context) | (first + tokens > rows)
    bad |= context > MAX_CONTEXT
    for row in bad.nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"request {row} has {int(tokens[row])} tokens from row {int(first[row])} of {rows} on, "
            f"in a context of {int(context[row])} (at most {MAX_CONTEXT})"
        )
    check_table(torch.where(tokens > 0, context, 0), page_table.to("cpu"), pages, page_tokens)
    step = item_tokens(group)
    counts = -(-tokens // step)
    total = int(counts.sum())
    room = total if items is None else items
    if total > room:
        raise ValueError(f"{total} items do not fit into a plan of {room}")
    request = torch.repeat_interleave(torch.arange(len(spans)), counts)
    done = (torch.arange(total) - (counts.cumsum(0) - counts)[request]) * step
    own = torch.minimum(tokens[request] - done, torch.tensor(step))
    position = (context - tokens)[request] + done
    order = (position + own).argsort(descending=True, stable=True)
    plan = views(torch.zeros(4 + 4 * room, dtype=torch.int32))
    plan.item_count[0] = total
    made = torch.stack((request, first[request] + done, own, position), dim=1)
    plan.items[:total] = made[order].to(torch.int32)
    return plan
