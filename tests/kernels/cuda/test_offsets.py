"""Tests of pools with more than 2^31 elements, in which kernels must compute offsets in 64 bits."""

from __future__ import annotations

import mmap

import pytest
import torch

from kvkernels.ops.prefill import plan_prefill
from tests.kernels import shared_cases as shared
from tests.kernels.cuda import append_cases as append
from tests.kernels.cuda import prefill_cases as prefill
from tests.kernels.cuda.decoding import BOUND
from tests.kernels.emulated import emulate, needs_compiler, relative_error

pytestmark = needs_compiler
BF16 = torch.bfloat16
FAR = (1 << 31) + (1 << 20)  # elements between pages; 4 GiB of addresses, hardly any memory


@pytest.fixture
def far_pages() -> list[torch.Tensor]:
    """Return K and V of two pages [page, token, kv head, D] that lie more than 2^31
    elements apart.
    """
    try:
        memory = mmap.mmap(
            -1,
            2 * (FAR + (1 << 20)),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000),
        )
    except OSError as error:
        pytest.skip(f"no address space: {error}")
    whole = torch.frombuffer(memory, dtype=torch.bfloat16)
    strides = (FAR, 64, 32 * 64, 1)
    return [whole.as_strided((2, 32, 2, 64), strides, first) for first in (0, 8 * 32 * 64)]


def test_append_and_attention_are_right_beyond_32_bit_offsets(
    far_pages: list[torch.Tensor],
) -> None:
    tokens = 40
    slots = [32 + at if at < 32 else at - 32 for at in range(tokens)]  # page 1, then page 0
    written = append.case(slots, 4, 2, 64, page_tokens=32, pages=2)
    near = append.case(slots, 4, 2, 64, page_tokens=32, pages=2)
    written.k_pages, written.v_pages = far_pages
    append.in_emulator(*written.arguments())
    append.in_emulator(*near.arguments())
    at = torch.tensor(slots)
    for far, close in ((far_pages[0], near.k_pages), (far_pages[1], near.v_pages)):
        assert torch.equal(far[at // 32, at % 32], close[at // 32, at % 32])

    table = torch.tensor([[1, 0]], dtype=torch.int32)
    made = shared.alone([tokens], 2, 2, 64, 32)._replace(page_table=table)
    emulate("shared_decode", *made._replace(k_pages=far_pages[0], v_pages=far_pages[1]))
    made = made._replace(k_pages=near.k_pages, v_pages=near.v_pages)
    assert relative_error(made.out, shared.exact(made, torch.tensor([tokens]))) < BOUND[BF16]

    many = prefill.case([(tokens - 5, 5)], 2, 2, 64, 32)
    many.page_table = table
    plan = plan_prefill(torch.tensor([[1, 5, tokens]]), len(many.q), table, 2, 32, 2)
    many.item_count, many.items = plan[1:3]
    many.k_pages, many.v_pages = far_pages
    prefill.emulate("prefill", *many.arguments())
    many.k_pages, many.v_pages = near.k_pages, near.v_pages
    assert relative_error(many.out[1:6], prefill.exact(many)[0][1:6]) < prefill.BOUND[BF16]
