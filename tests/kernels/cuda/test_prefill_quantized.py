"""Tests of prefill over INT8 and FP8 pages: both kernels in the emulator, against float64 on the
same bytes and on the numbers before quantization.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.cuda.library import RefusedError
from kvkernels.ops.prefill import plan_prefill
from tests.effort import examples
from tests.kernels.cuda.prefill_cases import Case, case, check_result, exact, quantized
from tests.kernels.emulated import NAN, emulate, needs_compiler, relative_error
from tests.kernels.quantized import LOSS, STORED

pytestmark = needs_compiler
by_both = pytest.mark.parametrize("kernel", ["prefill_mma", "prefill_wgmma"])


def check_quantized_result(kernel: str, plain: Case, stored: torch.dtype, seed: int = 1) -> None:
    made = quantized(plain, stored)
    check_result(made, run=lambda *arguments: emulate(kernel, *arguments, seed=seed))
    before, there = exact(plain)[0], ~made.out.isnan()
    assert relative_error(made.out[there], before[there]) < LOSS[stored]


@by_both
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    [
        (1, 64, torch.bfloat16),
        (4, 128, torch.bfloat16),
        (8, 64, torch.float16),
        (7, 128, torch.float16),
    ],
)
def test_prefill_agrees_with_float64_for_groups_and_ragged_lengths(
    kernel: str, group: int, dim: int, dtype: torch.dtype, stored: torch.dtype
) -> None:
    """Prefill agrees with float64 for lengths around pages of 16, blocks of 64 and 128 keys and
    items of 128 / group tokens, from several offsets.
    """
    step = 128 // group
    pieces = [(0, 1), (0, 17), (63, 1), (64, 2), (128, 2), (5, step - 1), (127, step + 1)]
    pieces.append((64 - 31 // group, 32))  # a warp of 32 rows sees one token of the second 64
    plain = case(pieces, group, 1, dim, dtype=dtype, seed=group)
    check_quantized_result(kernel, plain, stored, seed=group)


@by_both
@pytest.mark.parametrize(("page_tokens", "dim"), [(32, 64), (48, 128), (256, 64), (256, 128)])
def test_prefill_is_right_for_pages_of_any_size(kernel: str, page_tokens: int, dim: int) -> None:
    made = case([(0, 65), (130, 33), (256, 1)], 4, 2, dim, page_tokens, room=40)
    check_quantized_result(kernel, made, torch.int8, seed=page_tokens)


@by_both
def test_prefill_is_right_beyond_one_window_of_page_ids(kernel: str) -> None:
    """A prefill over so many tiles that a warp looks up page ids again, after 32 tiles,
    is right.
    """
    check_quantized_result(kernel, case([(2100, 3)], 2, 1, seed=3), torch.float8_e4m3fn)


@by_both
def test_prefill_merges_keys_cut_into_pieces(kernel: str) -> None:
    made = case([(1300, 40), (0, 3), (1151, 2)], 4, 1, 64, seed=5, is_cut=True)
    assert len(made.merge_slots) > 0
    check_quantized_result(kernel, made, torch.int8, seed=5)


@by_both
@settings(max_examples=examples(5))
@given(
    pieces=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 60)), min_size=1, max_size=3),
    group=st.integers(1, 9),
    page_tokens=st.sampled_from([16, 32, 80]),
    stored=st.sampled_from(STORED),
    seed=st.integers(0, 1 << 20),
)
def test_prefill_is_right_for_any_batch(
    kernel: str,
    pieces: list[tuple[int, int]],
    group: int,
    page_tokens: int,
    stored: torch.dtype,
    seed: int,
) -> None:
    plain = case(pieces, group, 1, 64, page_tokens, seed=seed)
    check_quantized_result(kernel, plain, stored, seed=seed)


@by_both
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_quantized_byte_is_read_as_its_number_in_its_place(
    kernel: str, stored: torch.dtype, dtype: torch.dtype, dim: int
) -> None:
    """Every byte of quantized V is read as its number: requests of one token give it weight 1, so
    the output is its V, byte by byte.
    """
    requests = 256 // dim
    made = quantized(case([(0, 1)] * requests, 1, 1, dim, dtype=dtype), stored)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes) if stored != torch.int8 else codes
    assert made.v_scales is not None
    for request, page in enumerate(made.page_table[:, 0].tolist()):
        row = codes[request * dim : (request + 1) * dim]
        made.v_pages.view(torch.uint8)[page, 0, 0] = row
        made.v_scales[page, 0, 0] = 2.0**-9
    emulate(kernel, *made.arguments())
    got = made.out[1::2].flatten().double()  # an unused row precedes each
    assert torch.equal(got, codes.view(stored).double() * 2.0**-9)


@by_both
def test_a_row_is_the_same_in_any_chunk(kernel: str) -> None:
    made = quantized(case([(0, 90), (40, 100)], 4, 1, 128, seed=7), torch.int8)
    emulate(kernel, *made.arguments())
    for first, last in ((0, 1), (30, 95)):
        spans = torch.tensor([(1, 0, 90), (92 + first, last - first, 40 + last)])
        plan = plan_prefill(spans, len(made.q), made.page_table, len(made.k_pages), 16, 4)
        out = torch.full_like(made.out, NAN)
        chunk = replace(made, item_count=plan.item_count, items=plan.items, out=out)
        emulate(kernel, *chunk.arguments(), seed=last)
        rows = slice(92 + first, 92 + last)
        assert torch.equal(chunk.out[rows], made.out[rows])


@by_both
def test_small_values_keep_their_digits_in_fp16(kernel: str) -> None:
    """Small values keep their digits in FP16. With scales of 1e-6, weights times scales would be
    subnormal if the units were not small.
    """
    for stored in STORED:
        made = quantized(case([(8, 32)], 4, 1, dtype=torch.float16), stored)
        assert made.v_scales is not None
        made.v_scales *= 1e-3
        made.lse = None
        emulate(kernel, *made.arguments())
        assert relative_error(made.out[1:33], exact(made)[0][1:33]) < 4e-3


@by_both
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", ["k_scales", "v_scales"])
def test_nan_shows_only_in_rows_that_see_its_token(
    kernel: str, stored: torch.dtype, name: str
) -> None:
    """A NaN in token 13 of the second request shows in all rows that see this token, and in no row
    of the first request.
    """
    made = quantized(case([(10, 4), (10, 6)], 2, 1), stored)
    getattr(made, name)[made.page_table[1, 0], 13, 0] = NAN
    emulate(kernel, *made.arguments())
    assert not made.out[1:5].isnan().any()
    assert made.out[9:12].isnan().all()


def test_the_cpu_implementation_reads_the_same_bytes() -> None:
    for stored in STORED:
        made = quantized(case([(37, 5), (0, 9)], 2, 2), stored)
        check_result(made, run=torch.ops.warmroute.prefill)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("k_scales", lambda c: None, "k_scales and v_scales go with quantized pages"),
        ("v_scales", lambda c: c.v_scales[:, :8], "v_scales has shape [6, 8, 1], needs [6, 16, 1]"),
        ("k_scales", lambda c: c.k_scales.half(), "k_scales is float16, needs float32"),
        (
            "k_scales",
            lambda c: c.k_scales.repeat_interleave(2, 1)[:, ::2],
            "k_scales does not have a page's tokens side by side",
        ),
        ("v_scales", lambda c: c.v_scales.clone(), "v_scales has other strides than k_scales"),
        ("v_pages", lambda c: c.v_pages.bfloat16(), "v_pages is bfloat16, needs int8"),
    ],
)
def test_the_error_names_the_bad_argument(name: str, change: Any, says: str) -> None:
    made = quantized(case([(10, 10), (0, 5)], 2, 1), torch.int8)
    with pytest.raises(RefusedError) as refused:
        emulate("prefill", *replace(made, **{name: change(made)}).arguments())
    assert says in str(refused.value)


def test_mma_and_wgmma_kernels_have_different_bits() -> None:
    """The two prefill kernels differ in their bits, because they sum over 128 and over 64 keys. The
    emulator's device is not Hopper, so `prefill` chooses the mma kernel.
    """
    made = [quantized(case([(150, 20)], 4, 1, seed=5), torch.int8) for _ in range(3)]
    for kernel, one in zip(("prefill_wgmma", "prefill_mma", "prefill"), made, strict=True):
        emulate(kernel, *one.arguments())
    by_wgmma, by_mma, chosen = (one.out.nan_to_num() for one in made)
    assert torch.equal(chosen, by_mma)
    assert not torch.equal(chosen, by_wgmma)


def test_scales_for_plain_pages_are_refused() -> None:
    made = case([(0, 20)], 2, 1)
    with pytest.raises(RefusedError, match="go with quantized pages, and only with them"):
        emulate("prefill", *replace(made, k_scales=made.lse).arguments())


def test_the_operator_passes_opcheck() -> None:
    made = quantized(case([(5, 30)], 2, 1), torch.int8)
    for name in ("k_pages", "v_pages", "k_scales", "v_scales"):
        setattr(made, name, getattr(made, name).contiguous().nan_to_num())
    made.out.zero_()  # unused rows are NaN, which does not equal itself
    assert made.lse is not None
    made.lse.zero_()
    torch.library.opcheck(torch.ops.warmroute.prefill.default, tuple(made.arguments()))
