"""Tests of shared_decode over INT8 and FP8 pages: the kernel in the emulator, against float64 on
the same bytes and on the numbers before quantization.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.cuda.library import RefusedError
from kvkernels.ops.calibration import ALWAYS
from kvkernels.ops.shared_costs import Costs
from kvkernels.ops.shared_decode import shared_decode
from tests.effort import examples
from tests.kernels.emulated import NAN, emulate, needs_compiler, relative_error
from tests.kernels.quantized import LOSS, STORED
from tests.kernels.shared_cases import (
    Case,
    Request,
    arguments,
    case,
    exact,
    quantized,
)

pytestmark = needs_compiler
BOUND = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


def check_result(plain: Case, context: torch.Tensor, stored: torch.dtype, seed: int = 1) -> Case:
    made = quantized(plain, stored)
    emulate("shared_decode", *made, seed=seed)
    same_bytes = exact(made, context)
    for row, got in enumerate(made.out):
        if context[row] == 0:
            assert (got == 0).all()
        else:
            assert relative_error(got, same_bytes[row]) < BOUND[made.q.dtype], row
    if context.any():
        assert relative_error(made.out, exact(plain, context)) < LOSS[stored]
    return made


def run(
    requests: list[Request], stored: torch.dtype, seed: int = 1, groups: int = 1, **options: Any
) -> Case:
    plain, step, context = case(requests, seed=seed, **options)
    assert step.saving.shared_prefix_groups == groups
    return check_result(plain, context, stored, seed)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("group", "requests", "dtype"),
    [
        (1, 7, torch.bfloat16),
        (4, 4, torch.float16),
        (4, 5, torch.bfloat16),
        (8, 5, torch.float16),
        (16, 2, torch.bfloat16),
    ],
)
def test_shared_decode_agrees_with_float64_for_rows_of_every_kind(
    group: int, requests: int, dtype: torch.dtype, stored: torch.dtype
) -> None:
    """Shared decode agrees with float64 for items of 8, 16 and more rows, full and partly full, and
    for a request that shares nothing.
    """
    sharing = [Request("abc", own) for own in range(5, 5 + 9 * requests, 9)]
    run([*sharing, Request("", 40)], stored, group, group=group, dtype=dtype)


@pytest.mark.parametrize(("page_tokens", "stored"), [(16, STORED[1]), (48, STORED[0])])
def test_shared_decode_is_right_for_wide_heads(page_tokens: int, stored: torch.dtype) -> None:
    requests = [Request("abcde", own) for own in (1, 16, 17, 33, 64)]
    run(requests, stored, dim=128, kv_heads=2, page_tokens=page_tokens)


@pytest.mark.parametrize("pages", [1, 3, 5, 17])
def test_shared_decode_is_right_for_prefixes_around_tiles_and_chunks(pages: int) -> None:
    """Shared decode agrees with float64 for prefixes of a page, a tile of keys and a chunk, and one
    page more or less, in items with decode's rows and with prefill's.
    """
    names = "".join(chr(ord("a") + number) for number in range(pages))
    few = [Request("X" + names, 3), Request("X" + names, 70)]
    many = [Request("Y" + names, own) for own in (1, 2, 15, 16, 17)]
    run([*few, *many], STORED[pages % 4 // 2], pages, groups=2)


def test_one_cta_processes_many_items_correctly() -> None:
    """One CTA works correctly on many items of all kinds, one after the other in the same shared
    memory.
    """
    requests = [Request("abc" * 8, 5 + number) for number in range(6)]
    requests += [Request("xy" * 7, 200), Request("xy" * 7, 2), Request("", 90), Request("", 0)]
    made = run(requests, torch.int8, kv_heads=2, groups=2)
    assert int(made.item_count) * 2 > 2 * 6


@settings(max_examples=examples(5), deadline=None)
@given(
    names=st.lists(st.text("ab", max_size=5), min_size=1, max_size=6),
    own=st.lists(st.integers(0, 70), min_size=6, max_size=6),
    group=st.integers(1, 16),
    page_tokens=st.sampled_from([16, 32]),
    stored=st.sampled_from(STORED),
    costs=st.sampled_from([ALWAYS, Costs()]),
    seed=st.integers(0, 1 << 20),
)
def test_shared_decode_is_right_for_any_step(
    names: list[str],
    own: list[int],
    group: int,
    page_tokens: int,
    stored: torch.dtype,
    costs: Costs,
    seed: int,
) -> None:
    requests = [Request(*pair) for pair in zip(names, own, strict=False)]
    plain, _, context = case(requests, group, page_tokens=page_tokens, costs=costs, seed=seed)
    check_result(plain, context, stored, seed)


@pytest.mark.parametrize("name", ["k_scales", "v_scales"])
def test_nan_in_a_shared_page_shows_only_in_its_requests(name: str) -> None:
    """A NaN in a page that five requests share shows in their rows and in no other."""
    requests = [Request("abc", own) for own in range(1, 6)] + [Request("", 20)]
    made = quantized(case(requests)[0], torch.int8)
    getattr(made, name)[made.page_table[0, 1], 7, 0] = NAN
    emulate("shared_decode", *made)
    assert made.out[:5].isnan().all()
    assert not made.out[5].isnan().any()


def test_the_cpu_implementation_reads_the_same_bytes() -> None:
    requests = [Request("aab", 3), Request("aab", 0), Request("aac", 20), Request("", 0)]
    for stored in STORED:
        plain, step, context = case(requests, kv_heads=2, page_tokens=48)
        made = quantized(plain, stored)
        pages = made.q, made.k_pages, made.v_pages, made.page_table
        workspace, scales = (made.partial, made.partial_lse), (made.k_scales, made.v_scales)
        shared_decode(*pages, step.plan, made.scale, made.out, workspace, scales)
        assert relative_error(made.out, exact(made, context)) < BOUND[torch.bfloat16]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("k_scales", lambda c: None, "k_scales and v_scales go with quantized pages"),
        ("v_scales", lambda c: c.v_scales[:, :8], "v_scales has shape [9, 8, 1], needs [9, 16, 1]"),
        ("k_scales", lambda c: c.k_scales.half(), "k_scales is float16, needs float32"),
        ("v_scales", lambda c: c.v_scales.double(), "a tensor of float64"),
        (
            "k_scales",
            lambda c: c.k_scales.repeat_interleave(2, 1)[:, ::2],
            "k_scales does not have a page's tokens side by side",
        ),
        (
            "k_scales",
            lambda c: torch.zeros(9, 1, 18)[:, :, :16].transpose(1, 2),
            "k_scales does not begin pages and heads at multiples of 16 bytes",
        ),
        ("v_scales", lambda c: c.v_scales.clone(), "v_scales has other strides than k_scales"),
        ("v_pages", lambda c: c.v_pages.bfloat16(), "v_pages is bfloat16, needs int8"),
    ],
)
def test_the_error_names_the_bad_argument(name: str, change: Any, says: str) -> None:
    made = quantized(case([Request("a", 20), Request("a", 30)])[0], torch.int8)
    with pytest.raises(RefusedError) as refused:
        emulate("shared_decode", *arguments(made, **{name: change(made)}))
    assert says in str(refused.value)


def test_scales_for_plain_pages_are_refused() -> None:
    made, _, _ = case([Request("a", 20)])
    with pytest.raises(RefusedError, match="go with quantized pages, and only with them"):
        emulate("shared_decode", *arguments(made, v_scales=made.partial_lse))


def test_the_operator_passes_opcheck() -> None:
    made = quantized(case([Request("ab", 5), Request("ab", 30)])[0], torch.int8)
    pages = ("k_pages", "v_pages", "k_scales", "v_scales")
    made = made._replace(**{name: getattr(made, name).contiguous() for name in pages})
    for part in (made.partial, made.partial_lse):
        part.zero_()  # CPUs do not write it, and NaN does not equal itself
    torch.library.opcheck(torch.ops.warmroute.shared_decode.default, tuple(made))
