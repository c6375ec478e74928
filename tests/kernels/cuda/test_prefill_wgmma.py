"""Tests of the prefill kernel for Hopper in the emulator, against float64, with cases like the
other kernel's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.cuda.library import RefusedError
from kvkernels.ops.prefill import plan_prefill
from tests.effort import examples
from tests.kernels.cuda.prefill_cases import Case, case, check_result
from tests.kernels.emulated import emulate, needs_compiler

pytestmark = needs_compiler
KERNEL = "prefill_wgmma"


def check_wgmma_result(made: Case, seed: int = 1, bound: float | None = None) -> None:
    check_result(made, bound=bound, run=lambda *arguments: emulate(KERNEL, *arguments, seed=seed))


@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    [
        (1, 64, torch.float16),
        (4, 128, torch.bfloat16),
        (7, 64, torch.bfloat16),
        (8, 128, torch.float16),
    ],
)
def test_prefill_agrees_with_float64_for_groups_and_ragged_lengths(
    group: int, dim: int, dtype: torch.dtype
) -> None:
    """Prefill agrees with float64 for lengths around tiles of 16, blocks of 128 keys and items of
    128 / group tokens, from several offsets. There are ten items on the emulator's three CTAs, so
    buffers continue from one item to the next.
    """
    step = 128 // group
    pieces = [(0, 1), (0, 15), (0, 17), (127, 1), (128, 2), (5, step - 1), (0, step)]
    pieces += [(127, step + 1), (128 - 63 // group, 64 // group + 1)]
    check_wgmma_result(case(pieces, group, 1, dim, dtype=dtype, seed=group), seed=group)


@pytest.mark.parametrize("page_tokens", [16, 32, 48, 64, 96, 128, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_prefill_is_right_for_pages_of_any_size(page_tokens: int, dim: int) -> None:
    """Prefill agrees with float64 for pages of any size: copies of 16, 32, 64 and 128 tokens at a
    time, and items that end within such a copy and at its edge.
    """
    pieces = [(0, 65), (130, 33), (256, 1), (160, 32)]
    check_wgmma_result(case(pieces, 4, 2, dim, page_tokens, room=40), seed=page_tokens)


@pytest.mark.parametrize("group", [33, 128])
def test_prefill_is_right_for_large_groups(group: int) -> None:
    check_wgmma_result(case([(30, 4), (0, 1)], group, 1, seed=group))


def test_prefill_is_right_for_a_long_context() -> None:
    """Prefill agrees with float64 for a long context, in which the places of the ring buffer are
    used more than once and the keys end within a tile.
    """
    check_wgmma_result(case([(1100, 3)], 2, 1, 128, seed=3))


@pytest.mark.full
@settings(max_examples=examples(4))
@given(
    pieces=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=3),
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 2),
    page_tokens=st.sampled_from([16, 32, 64, 80, 128]),
    seed=st.integers(0, 1 << 20),
)
def test_prefill_is_right_for_any_batch(
    pieces: list[tuple[int, int]], group: int, kv_heads: int, page_tokens: int, seed: int
) -> None:
    check_wgmma_result(case(pieces, group, kv_heads, 64, page_tokens, seed=seed), seed=seed)


def test_large_scores_do_not_overflow() -> None:
    made = case([(100, 40)], 4, 1, scale=60.0)
    made.lse = None
    check_wgmma_result(made, bound=2e-2)


def test_a_row_is_the_same_in_any_batch_and_chunk() -> None:
    made = case([(0, 40), (120, 40)], 4, 1, seed=7)
    emulate(KERNEL, *made.arguments())
    for first, last in ((0, 3), (3, 40)):
        spans = [(1, 0, 40), (42 + first, last - first, 120 + last)]
        plan = plan_prefill(
            torch.tensor(spans), len(made.q), made.page_table, len(made.k_pages), 16, 4
        )
        alone = replace(
            made,
            item_count=plan.item_count,
            items=plan.items,
            out=torch.full_like(made.out, float("nan")),
        )
        emulate(KERNEL, *alone.arguments(), seed=last)
        rows = slice(42 + first, 42 + last)
        assert torch.equal(alone.out[rows], made.out[rows])
        assert alone.out[: 42 + first].isnan().all()


def test_items_beyond_the_count_are_not_read() -> None:
    made = case([(0, 3)], room=5)
    made.items[1:] = 1 << 30
    check_wgmma_result(made)


@pytest.mark.parametrize("kernel", [KERNEL, "prefill_mma"])
def test_both_prefill_kernels_check_their_arguments(kernel: str) -> None:
    made = case([(20, 20)], dim=128)
    run = partial(emulate, kernel)
    with pytest.raises(RefusedError, match="q has head_dim 80"):
        run(*replace(made, q=made.q[..., :80]).arguments())


def test_tensors_that_the_copy_engine_cannot_read_use_the_mma_kernel() -> None:
    """Tensors that the copy engine cannot read are given to the other kernel. Here all tokens of q
    are the same one, so its stride is 0, which no copy can take.
    """
    made = case([(0, 9)])
    made.q = made.q[1:2].expand(len(made.q), -1, -1)
    check_result(replace(made, out=made.out.clone()))
    with pytest.raises(RefusedError, match="wgmma: q has strides"):
        emulate(KERNEL, *made.arguments())


@pytest.mark.parametrize("way", ["mma", "wgmma"])
def test_the_environment_variable_chooses_the_kernel(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The environment variable WARMROUTE_PREFILL chooses the kernel. The two kernels differ in
    their bits, because they sum over 128 and over 64 keys.
    """
    named, wanted = (case([(150, 20)], 4, 1, seed=5) for _ in range(2))
    monkeypatch.setenv("WARMROUTE_PREFILL", way)
    emulate("prefill", *named.arguments())
    emulate(f"prefill_{way}", *wanted.arguments())
    other = case([(150, 20)], 4, 1, seed=5)
    emulate({"mma": "prefill_wgmma", "wgmma": "prefill_mma"}[way], *other.arguments())
    assert torch.equal(named.out.nan_to_num(), wanted.out.nan_to_num())
    assert not torch.equal(named.out.nan_to_num(), other.out.nan_to_num())


def test_an_unknown_kernel_in_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_PREFILL", "fast")
    made: Any = case([(0, 3)])
    with pytest.raises(RefusedError, match="WARMROUTE_PREFILL is fast, there are mma and wgmma"):
        emulate("prefill", *made.arguments())
