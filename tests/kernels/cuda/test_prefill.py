"""Tests of the operator `prefill`: the kernel in the emulator and the CPU implementation, against
float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.cuda.library import RefusedError
from kvkernels.ops.prefill import plan_prefill, unsupported
from tests.effort import examples
from tests.kernels.cuda.prefill_cases import Case, case, check_result, exact
from tests.kernels.emulated import emulate, needs_compiler

pytestmark = needs_compiler


def test_the_cpu_implementation_equals_the_softmax_formula() -> None:
    """The CPU implementation, which is the oracle, equals the softmax formula written out for one
    row.
    """
    made = case([(20, 5)], group=2, kv_heads=1)
    pages = made.page_table[0, :2].long()
    k, v = (x.double()[pages].flatten(0, 1)[:23, 0] for x in (made.k_pages, made.v_pages))
    scores = (k @ made.q.double()[1 + 2, 1]) * made.scale
    weights = scores.exp() / scores.exp().sum()
    out, lse = exact(made)
    assert torch.allclose(out[3, 1], weights @ v, rtol=1e-12)
    assert torch.allclose(lse[3, 1], scores.exp().sum().log2(), rtol=1e-12)
    check_result(made, run=torch.ops.warmroute.prefill)


@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill_agrees_with_float64_for_groups_and_ragged_lengths(
    group: int, dim: int, dtype: torch.dtype
) -> None:
    """Prefill agrees with float64 for lengths around pages of 16, blocks of 64 keys and items of
    128 / group tokens, from several offsets.
    """
    step = 128 // group
    pieces = [(0, 1), (0, 15), (0, 17), (63, 1), (64, 2), (5, step - 1), (0, step), (127, step + 1)]
    pieces.append((64 - 31 // group, 32))  # a warp of 32 rows sees one token of the second 64
    check_result(case(pieces, group, 1, dim, dtype=dtype, seed=group), seed=group)


@pytest.mark.parametrize("page_tokens", [16, 32, 48, 256])
def test_prefill_is_right_for_pages_of_any_size(page_tokens: int) -> None:
    check_result(
        case([(0, 65), (130, 33), (256, 1)], 4, 2, 64, page_tokens, room=40), seed=page_tokens
    )


def test_prefill_is_right_beyond_one_window_of_page_ids() -> None:
    """A prefill over so many tiles that page ids are looked up again, after 32 tiles, is right."""
    check_result(case([(2100, 3)], 2, 1, seed=3))


@pytest.mark.parametrize("group", [33, 128])
def test_prefill_is_right_for_large_groups(group: int) -> None:
    check_result(case([(30, 4), (0, 1)], group, 1, seed=group))


@settings(max_examples=examples(8))
@given(
    pieces=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 60)), min_size=1, max_size=3),
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 2),
    page_tokens=st.sampled_from([16, 32, 80]),
    seed=st.integers(0, 1 << 20),
)
def test_prefill_is_right_for_any_batch(
    pieces: list[tuple[int, int]], group: int, kv_heads: int, page_tokens: int, seed: int
) -> None:
    check_result(case(pieces, group, kv_heads, 64, page_tokens, seed=seed), seed=seed)


@pytest.mark.parametrize("kernel", ["prefill", "prefill_wgmma"])
@pytest.mark.parametrize(
    ("group", "dim", "pieces"),
    [
        (4, 64, [(1300, 40), (0, 3), (1151, 2)]),  # the last rows of a piece see its first key
        (7, 128, [(1024, 19)]),
    ],
)
def test_prefill_merges_keys_cut_into_pieces(
    kernel: str, group: int, dim: int, pieces: list[tuple[int, int]]
) -> None:
    made = case(pieces, group, 2, dim, seed=group, is_cut=True)
    assert len(made.merge_slots) > 0
    check_result(made, run=lambda *arguments: emulate(kernel, *arguments, seed=group))


def test_the_cpu_implementation_is_the_same_for_cut_and_uncut_rows() -> None:
    cut, whole = (
        case([(1300, 40), (0, 3)], 4, 1, seed=2, is_cut=is_cut) for is_cut in (True, False)
    )
    for made, wanted in zip(exact(cut), exact(whole), strict=True):
        assert torch.allclose(made, wanted, rtol=1e-12, equal_nan=True)


def test_large_scores_do_not_overflow() -> None:
    """Large scores do not overflow when one token has nearly all the weight: base-2 exponents reach
    hundreds.
    """
    made = case([(100, 40)], 4, 1, scale=60.0)
    made.lse = None
    check_result(made, bound=2e-2)


def planned(made: Case, spans: list[tuple[int, int, int]], group: int) -> Case:
    """Return `made` with the work items of a new plan and with empty outputs."""
    plan = plan_prefill(
        torch.tensor(spans), len(made.q), made.page_table, len(made.k_pages), 16, group
    )
    fresh = {"item_count": plan.item_count, "items": plan.items}
    return replace(made, **fresh, out=torch.full_like(made.out, float("nan")))


def test_a_row_is_the_same_in_any_batch_and_chunk() -> None:
    made = case([(0, 90), (40, 100)], 4, 1, seed=7)
    emulate("prefill", *made.arguments())
    for first, last in ((0, 1), (1, 30), (30, 95), (95, 100)):
        spans = [(1, 0, 90), (92 + first, last - first, 40 + last)]
        alone = planned(made, spans, 4)
        emulate("prefill", *alone.arguments(), seed=last)
        rows = slice(92 + first, 92 + last)
        assert torch.equal(alone.out[rows], made.out[rows])
        assert alone.out[: 92 + first].isnan().all()


def test_a_plan_without_items_writes_nothing() -> None:
    made = planned(case([(0, 3)]), [(1, 0, 3)], 4)
    emulate("prefill", *made.arguments())
    assert made.out.isnan().all()


def test_items_beyond_the_count_are_not_read() -> None:
    made = case([(0, 3)], room=5)
    made.items[1:] = 1 << 30
    check_result(made)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("q", lambda c: c.q[..., :80], "q has head_dim 80, prefill has 64 and 128"),
        ("q", lambda c: c.q.float(), "k_pages is bfloat16, needs float32"),
        ("q", lambda c: c.q.double(), "a tensor of float64"),
        ("q", lambda c: c.q[0], "q needs [tokens, heads, head_dim]"),
        ("q", lambda c: c.q[:, :7], "q has 7 heads for 2 KV heads, prefill has groups of 1 to 128"),
        ("q", lambda c: c.q.repeat_interleave(2, -1)[..., ::2], "q is not dense"),
        ("scale", lambda c: 0.0, "scale is not above 0"),
        ("scale", lambda c: float("inf"), "scale is not above 0"),
        ("k_pages", lambda c: None, "k_pages and v_pages need [page, token"),
        ("k_pages", lambda c: c.k_pages[..., :64], "k_pages has shape"),
        ("v_pages", lambda c: c.v_pages.contiguous(), "v_pages has other strides than k_pages"),
        ("v_pages", lambda c: c.v_pages[:, :8], "v_pages has shape [9, 8, 2, 128], needs [9, 16"),
        ("page_table", lambda c: c.page_table[0], "page_table has shape [4], needs [any, any]"),
        ("page_table", lambda c: c.page_table.long(), "page_table is int64, needs int32"),
        ("item_count", lambda c: c.items[0, :2], "item_count has shape [2], needs [1]"),
        ("items", lambda c: c.items[:, :3], "items has shape [3, 3], needs [3, 8]"),
        ("items", lambda c: c.items.repeat(1, 2)[:, :8], "items is not dense"),
        ("items", lambda c: None, "items needs [items, 8]"),
        ("merge_starts", lambda c: c.merge_starts[1:], "merge_starts has shape [63], needs [64]"),
        ("partial", lambda c: c.partial.half(), "partial is float16, needs float32"),
        ("partial_lse", lambda c: None, "partial_lse is missing"),
        ("out", lambda c: c.out.half(), "out is float16, needs bfloat16"),
        ("out", lambda c: c.out[1:], "out has shape [62, 8, 128], needs [63, 8, 128]"),
        ("lse", lambda c: c.lse[:, 1:], "lse has shape [63, 7], needs [63, 8]"),
        ("lse", lambda c: c.lse.half(), "lse is float16, needs float32"),
    ],
)
def test_the_error_names_the_bad_argument(name: str, change: Any, says: str) -> None:
    made = case([(20, 20), (0, 40)], dim=128)
    with pytest.raises(RefusedError, match=r"prefill: |a tensor of") as refused:
        emulate("prefill", *replace(made, **{name: change(made)}).arguments())
    assert says in str(refused.value)
    assert made.out.isnan().all()


def test_pages_of_unsupported_sizes_are_refused() -> None:
    made = case([(20, 20)])
    made.k_pages, made.v_pages = made.k_pages[:, :8], made.v_pages[:, :8]
    with pytest.raises(RefusedError, match="k_pages has pages of 8 tokens"):
        emulate("prefill", *made.arguments())


def test_the_reason_for_an_unsupported_shape_is_reported() -> None:
    assert unsupported(32, 8, 128, 16, torch.bfloat16) == ""
    for bad in (
        (32, 8, 128, 16, torch.float32),
        (32, 8, 96, 16, torch.bfloat16),
        (32, 8, 128, 24, torch.bfloat16),
        (129, 1, 128, 16, torch.bfloat16),
        (33, 2, 128, 16, torch.bfloat16),
    ):
        assert "the kernel has" in unsupported(*bad)


def test_the_operator_passes_opcheck() -> None:
    made = case([(5, 30), (0, 2)])
    made.k_pages, made.v_pages = made.k_pages.contiguous(), made.v_pages.contiguous()
    made.out.zero_()  # unused rows are NaN, which does not equal itself
    assert made.lse is not None
    made.lse.zero_()
    torch.library.opcheck(torch.ops.warmroute.prefill.default, tuple(made.arguments()))
