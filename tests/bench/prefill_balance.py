"""The balance of prefill's items over the SMs of a GPU, computed from the plans without a GPU.

    python -m tests.bench.prefill_balance [--sms N]

One CTA an SM walks over (item, KV head) as `kernels/cuda/prefill/prefill_wgmma.cuh` does. A CTA's
load is its blocks of 128 keys and, for the beginning and end of each item, 0.6 of a block. There
are three plans: whole keys in rounds of one direction, whole keys in rounds that alternate
direction, and cut keys in rounds that alternate. "SMs" counts those that have work. "Balance" is
the mean load of all SMs over the largest.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch

from kvkernels.ops.prefill import plan_prefill

KEYS, ITEM_BLOCKS, PAGE, SMS = 128, 0.6, 16, 132


class Shape(NamedTuple):
    """The chunks of one launch, each as (tokens cached before, new tokens)."""

    name: str
    chunks: list[tuple[int, int]]
    heads: int = 32
    kv_heads: int = 8


SHAPES = (
    Shape("1 x 1k", [(0, 1_024)]),
    Shape("1 x 2k", [(0, 2_048)]),
    Shape("1 x 4k", [(0, 4_096)]),
    Shape("1 x 8k", [(0, 8_192)]),
    Shape("4 x 2k", [(0, 2_048)] * 4),
    Shape("4 x 2k, 64 heads", [(0, 2_048)] * 4, heads=64),
    Shape("2k after 14k", [(14_336, 2_048)]),
    Shape("512 after 8k", [(8_192, 512)]),
    Shape("384 after 8k", [(8_192, 384)]),
    Shape("256 after 8k", [(8_192, 256)]),
    Shape("64 after 2k", [(2_048, 64)]),
    Shape("64 after 8k", [(8_192, 64)]),
    Shape("64 after 16k", [(16_384, 64)]),
    Shape("16 after 32k", [(32_768, 16)]),
    Shape("128 after 32k", [(32_768, 128)]),
    Shape("4 x 64 after 8k", [(8_192, 64)] * 4),
    Shape("16 x 64 after 8k", [(8_192, 64)] * 16),
    Shape("64 after 8k beside 1 x 2k", [(8_192, 64), (0, 2_048)]),
    Shape("256 after 8k, 4 heads, 1 KV head", [(8_192, 256)], 4, 1),
    Shape("2k after 8k, 4 heads, 1 KV head", [(8_192, 2_048)], 4, 1),
)


class Balance(NamedTuple):
    """The balance of one plan: the number of SMs with work, the mean load over the largest, and the
    largest load.
    """

    sms: int
    share: float
    largest: float  # blocks of the SM that ends last


def keys_of_items(shape: Shape, is_cut: bool) -> list[int]:
    """Return the number of keys of each item, in the plan's order."""
    rows, spans = 0, []
    for before, new in shape.chunks:
        spans.append((rows, new, before + new))
        rows += new
    pages = -(-max(span[2] for span in spans) // PAGE)
    table = torch.zeros(len(spans), pages, dtype=torch.int32)
    sizes = 1, PAGE, shape.heads // shape.kv_heads
    kv_heads = shape.kv_heads if is_cut else None
    plan = plan_prefill(torch.tensor(spans), rows, table, *sizes, kv_heads=kv_heads)
    ends = plan.items[: int(plan.item_count)]
    return (ends[:, 5] - ends[:, 4]).tolist()


def balance(keys: list[int], kv_heads: int, sms: int, turns: bool) -> Balance:
    """Return the balance of SMs that walk over items with these numbers of keys for each KV head;
    `turns` makes rounds alternate direction.
    """
    work = [-(-count // KEYS) + ITEM_BLOCKS for count in keys for _ in range(kv_heads)]
    ctas = min(sms, len(work))
    loads = [0.0] * sms
    for number, blocks in enumerate(work):
        walk, at = divmod(number, ctas)
        loads[ctas - 1 - at if turns and walk % 2 else at] += blocks
    return Balance(sum(load > 0 for load in loads), sum(loads) / sms / max(loads), max(loads))


def measured(shape: Shape, sms: int = SMS) -> tuple[Balance, Balance, Balance]:
    """Return three balances: of whole keys in one direction, of whole keys in alternating
    directions, and of cut keys.
    """
    whole, cut = (keys_of_items(shape, is_cut) for is_cut in (False, True))
    first = balance(whole, shape.kv_heads, sms, turns=False)
    second = balance(whole, shape.kv_heads, sms, turns=True)
    return first, second, balance(cut, shape.kv_heads, sms, turns=True)


def main() -> None:
    """Print the table of `docs/kernels.md`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sms", type=int, default=SMS)
    options = parser.parse_args()
    print("| new tokens | SMs | balance | rounds that turn | SMs | balance | time, computed |")
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        before, turned, after = measured(shape, options.sms)
        print(
            f"| {shape.name} | {before.sms} | {before.share:.1%} | {turned.share:.1%} | "
            f"{after.sms} | {after.share:.1%} | {after.largest / before.largest:.2f} |"
        )


if __name__ == "__main__":
    main()
