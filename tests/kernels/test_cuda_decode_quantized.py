"""decode over INT8 and FP8 pages: the kernel in the emulator against float64, on the same bytes and
against the numbers before they were quantized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.cuda.library import RefusedError
from kvkernels.ops.shared_runs import LEAST_CHUNK
from tests.effort import examples
from tests.kernels.emulated import NAN, emulate, needs_compiler, relative_error
from tests.kernels.quantized import LOSS, STORED, as_numbers, quantized_pages
from tests.kernels.test_cuda_decode import BOUND, Case, case, exact, hold

pytestmark = needs_compiler


def quantized(plain: Case, stored: torch.dtype) -> Case:
    """`plain` with its pages in bytes."""
    return replace(plain, **quantized_pages(plain.k_pages, plain.v_pages, stored))


def exact_quantized(made: Case) -> torch.Tensor:
    """Float64 attention over what the bytes stand for."""
    k_pages = as_numbers(made.k_pages, made.k_scales)
    v_pages = as_numbers(made.v_pages, made.v_scales)
    return exact(replace(made, k_pages=k_pages, v_pages=v_pages, k_scales=None, v_scales=None))


def hold_quantized(plain: Case, stored: torch.dtype, seed: int = 1) -> None:
    made = quantized(plain, stored)
    emulate("decode", *made.arguments(), seed=seed)
    same_bytes, before = exact_quantized(made), exact(plain)
    there = same_bytes.flatten(1).norm(dim=1) > 0
    assert (made.out[~there] == 0).all()
    for row in there.nonzero().flatten().tolist():
        assert relative_error(made.out[row], same_bytes[row]) < BOUND[made.q.dtype]
        assert relative_error(made.out[row], before[row]) < LOSS[stored]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (7, 128), (8, 64), (16, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_and_ragged_lengths(
    stored: torch.dtype, group: int, dim: int, dtype: torch.dtype
) -> None:
    lengths = [1, 15, 16, 17, 64, 65, 0, 129]
    hold_quantized(case(lengths, group, 2, dim, dtype=dtype, seed=group), stored, seed=group)


@pytest.mark.parametrize("page_tokens", [16, 48, 256])
def test_splits(page_tokens: int) -> None:
    lengths = [LEAST_CHUNK, LEAST_CHUNK + 1, 2 * LEAST_CHUNK + 17]
    hold_quantized(case(lengths, 4, 2, 64, page_tokens, room=40), torch.int8, seed=page_tokens)


@settings(max_examples=examples(8))
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    group=st.integers(1, 16),
    page_tokens=st.sampled_from([16, 32, 80]),
    stored=st.sampled_from(STORED),
    seed=st.integers(0, 1 << 20),
)
def test_any_batch(
    lengths: list[int], group: int, page_tokens: int, stored: torch.dtype, seed: int
) -> None:
    hold_quantized(case(lengths, group, 1, 128, page_tokens, seed=seed), stored, seed=seed)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_byte_is_its_number(stored: torch.dtype, dtype: torch.dtype) -> None:
    """One token: its weight is 1, so the output is its V, byte by byte."""
    made = quantized(case([1] * 4, 1, 1, 64, dtype=dtype), stored)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes) if stored != torch.int8 else codes
    for request, page in enumerate(made.page_table[:, 0].tolist()):
        row = codes[request * 64 : (request + 1) * 64]
        made.v_pages.view(torch.uint8)[page, 0, 0] = row
        made.v_scales[page, 0, 0] = 2.0**-9
    emulate("decode", *made.arguments())
    assert torch.equal(made.out.flatten().double(), codes.view(stored).double() * 2.0**-9)


def test_small_values_keep_their_digits_in_fp16() -> None:
    """Scales of 1e-6: weights times them would be subnormal where units were not small."""
    plain = case([40], 4, 1, 64, dtype=torch.float16)
    for stored in STORED:
        made = quantized(plain, stored)
        made.v_scales *= 1e-3
        emulate("decode", *made.arguments())
        assert relative_error(made.out, exact_quantized(made)) < 4e-3


@pytest.mark.parametrize("stored", STORED)
def test_a_row_with_nan_shows(stored: torch.dtype) -> None:
    for name in ("k_scales", "v_scales"):
        made = quantized(case([20, 20], 2, 1, 64), stored)
        getattr(made, name)[made.page_table[1, 0], 3, 0] = NAN
        emulate("decode", *made.arguments())
        assert not made.out[0].isnan().any()
        assert made.out[1].isnan().all()


def test_the_cpu_implementation_reads_the_same_bytes() -> None:
    for stored in STORED:
        made = quantized(case([37, 5], 2, 2), stored)
        torch.ops.warmroute.decode(*made.arguments())
        wanted = exact_quantized(made)
        assert relative_error(made.out, wanted) < BOUND[torch.bfloat16]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("k_scales", lambda c: None, "k_scales and v_scales go with quantized pages"),
        ("v_scales", lambda c: c.v_scales[:, :8], "v_scales has shape [7, 8, 1], needs [7, 16, 1]"),
        ("v_scales", lambda c: c.v_scales.double(), "a tensor of float64"),
        ("k_scales", lambda c: c.k_scales.half(), "k_scales is float16, needs float32"),
        (
            "k_scales",
            lambda c: c.k_scales.repeat_interleave(2, 1)[:, ::2],
            "k_scales does not have a page's tokens side by side",
        ),
        (
            "k_scales",
            lambda c: torch.zeros(7, 1, 18)[:, :, :16].transpose(1, 2),
            "k_scales does not begin pages and heads at multiples of 16 bytes",
        ),
        ("v_scales", lambda c: c.v_scales.clone(), "v_scales has other strides than k_scales"),
        ("v_pages", lambda c: c.v_pages.bfloat16(), "v_pages is bfloat16, needs int8"),
    ],
)
def test_bad_arguments_are_named(name: str, change: Any, says: str) -> None:
    made = quantized(case([20, 30], 2, 1), torch.int8)
    with pytest.raises(RefusedError) as refused:
        emulate("decode", *replace(made, **{name: change(made)}).arguments())
    assert says in str(refused.value)


def test_plain_pages_have_no_scales() -> None:
    made = case([20], 2, 1)
    with pytest.raises(RefusedError, match="go with quantized pages, and only with them"):
        emulate("decode", *replace(made, k_scales=made.partial_lse).arguments())
    hold(made)
