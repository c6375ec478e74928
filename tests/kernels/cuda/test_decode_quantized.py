"""Tests of shared_decode over INT8 and FP8 pages for requests that share nothing: in the emulator,
against float64 on the same bytes and on the numbers before quantization.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.ops.shared_runs import LEAST_CHUNK
from tests.effort import examples
from tests.kernels.emulated import NAN, emulate, needs_compiler, relative_error
from tests.kernels.quantized import LOSS, STORED
from tests.kernels.shared_cases import Case, alone, exact, quantized

pytestmark = needs_compiler
BOUND = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


def check_result(plain: Case, lengths: list[int], stored: torch.dtype, seed: int = 1) -> None:
    made, context = quantized(plain, stored), torch.tensor(lengths)
    emulate("shared_decode", *made, seed=seed)
    same_bytes, before = exact(made, context), exact(plain, context)
    for row, length in enumerate(lengths):
        if length:
            assert relative_error(made.out[row], same_bytes[row]) < BOUND[made.q.dtype]
            assert relative_error(made.out[row], before[row]) < LOSS[stored]
        else:
            assert (made.out[row] == 0).all()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (7, 128), (8, 64), (16, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_agrees_with_float64_for_groups_and_ragged_lengths(
    stored: torch.dtype, group: int, dim: int, dtype: torch.dtype
) -> None:
    lengths = [1, 15, 16, 17, 64, 65, 0, 129]
    check_result(
        alone(lengths, group, 2, dim, dtype=dtype, seed=group), lengths, stored, seed=group
    )


@pytest.mark.parametrize("page_tokens", [16, 48, 256])
def test_decode_is_right_if_requests_are_split_into_chunks(page_tokens: int) -> None:
    lengths = [LEAST_CHUNK, LEAST_CHUNK + 1, 2 * LEAST_CHUNK + 17]
    made = alone(lengths, 4, 2, 64, page_tokens, room=(40, 40))
    check_result(made, lengths, torch.int8, seed=page_tokens)


@settings(max_examples=examples(8))
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    group=st.integers(1, 16),
    page_tokens=st.sampled_from([16, 32, 80]),
    stored=st.sampled_from(STORED),
    seed=st.integers(0, 1 << 20),
)
def test_decode_is_right_for_any_batch(
    lengths: list[int], group: int, page_tokens: int, stored: torch.dtype, seed: int
) -> None:
    check_result(alone(lengths, group, 1, 128, page_tokens, seed=seed), lengths, stored, seed=seed)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_quantized_byte_is_read_as_its_number(
    stored: torch.dtype, dtype: torch.dtype
) -> None:
    """Every byte of quantized V is read as its number: a single token has weight 1, so the output
    is its V, byte by byte.
    """
    made = quantized(alone([1] * 4, 1, 1, 64, dtype=dtype), stored)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes) if stored != torch.int8 else codes
    for request, page in enumerate(made.page_table[:, 0].tolist()):
        row = codes[request * 64 : (request + 1) * 64]
        made.v_pages.view(torch.uint8)[page, 0, 0] = row
        made.v_scales[page, 0, 0] = 2.0**-9
    emulate("shared_decode", *made)
    assert torch.equal(made.out.flatten().double(), codes.view(stored).double() * 2.0**-9)


def test_small_values_keep_their_digits_in_fp16() -> None:
    """Small values keep their digits in FP16. With scales of 1e-6, weights times scales would be
    subnormal if the units were not small.
    """
    plain = alone([40], 4, 1, 64, dtype=torch.float16)
    for stored in STORED:
        made = quantized(plain, stored)
        made.v_scales.mul_(1e-3)
        emulate("shared_decode", *made)
        assert relative_error(made.out, exact(made, torch.tensor([40]))) < 4e-3


@pytest.mark.parametrize("stored", STORED)
def test_a_row_with_nan_gives_nan(stored: torch.dtype) -> None:
    for name in ("k_scales", "v_scales"):
        made = quantized(alone([20, 20], 2, 1, 64), stored)
        getattr(made, name)[made.page_table[1, 0], 3, 0] = NAN
        emulate("shared_decode", *made)
        assert not made.out[0].isnan().any()
        assert made.out[1].isnan().all()


def test_the_cpu_implementation_reads_the_same_bytes() -> None:
    for stored in STORED:
        made = quantized(alone([37, 5], 2, 2), stored)
        torch.ops.warmroute.shared_decode(*made)
        wanted = exact(made, torch.tensor([37, 5]))
        assert relative_error(made.out, wanted) < BOUND[torch.bfloat16]
