"""Tests of the operator `shared_decode`: the kernel in the emulator and the CPU implementation,
against float64.
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
from tests.kernels.emulated import emulate, needs_compiler, relative_error
from tests.kernels.shared_cases import Case, Request, arguments, case, exact

pytestmark = needs_compiler
BOUND = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


def check_result(made: Case, context: torch.Tensor, seed: int = 1) -> None:
    emulate("shared_decode", *made, seed=seed)
    for row, (got, wanted) in enumerate(zip(made.out, exact(made, context), strict=True)):
        if context[row] == 0:
            assert (got == 0).all()
        else:
            assert relative_error(got, wanted) < BOUND[made.q.dtype], row


def run(requests: list[Request], seed: int = 1, groups: int = 1, **options: Any) -> Case:
    made, step, context = case(requests, seed=seed, **options)
    assert step.saving.shared_prefix_groups == groups
    check_result(made, context, seed)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "requests"), [(1, 7), (4, 2), (4, 4), (7, 3), (8, 5), (16, 2)])
def test_shared_decode_agrees_with_float64_for_rows_of_every_kind(
    group: int, requests: int, dtype: torch.dtype
) -> None:
    """Shared decode agrees with float64 for items of 8, 16 and more rows, full and partly full, and
    for a request that shares nothing.
    """
    sharing = [Request("abc", own) for own in range(5, 5 + 9 * requests, 9)]
    run([*sharing, Request("", 40)], group, group=group, dtype=dtype)


@pytest.mark.parametrize("page_tokens", [16, 48])
def test_shared_decode_is_right_for_wide_heads(page_tokens: int) -> None:
    requests = [Request("abcde", own) for own in (1, 16, 17, 33, 64)]
    run(requests, dim=128, kv_heads=2, page_tokens=page_tokens)


@pytest.mark.parametrize("pages", [1, 3, 4, 5, 16, 17, 33])
def test_shared_decode_is_right_for_prefixes_around_tiles_and_chunks(pages: int) -> None:
    """Shared decode agrees with float64 for prefixes of a page, a tile of keys and a chunk, and one
    page more or less, in items with decode's rows and with prefill's.
    """
    names = "".join(chr(ord("a") + number) for number in range(pages))
    few = [Request("X" + names, 3), Request("X" + names, 70)]
    many = [Request("Y" + names, own) for own in (1, 2, 15, 16, 17)]
    run([*few, *many], pages, groups=2)


def test_shared_decode_is_right_for_several_groups_and_levels() -> None:
    names = ["aabb", "aabbcc", "aabbcc", "aabd", "aabd", "xy", "xyz", "xyz", "q", "", "aabb"]
    requests = [Request(one, 7 * number + 1) for number, one in enumerate(names)]
    run(requests, groups=6, kv_heads=2)


def test_shared_decode_is_right_for_empty_and_one_token_suffixes() -> None:
    """Shared decode is right if a request shares all of its tokens, and if a padding row has no
    tokens.
    """
    run([Request("abc", 0), Request("abc", 0), Request("abc", 1), Request("", 0)])


def test_shared_decode_is_right_for_a_single_request() -> None:
    for own in (0, 1, 300):
        run([Request("abc", own)], groups=0)


def test_requests_beyond_the_rows_of_an_item_get_another_item() -> None:
    made = run([Request("abcde", 1 + number % 20) for number in range(37)], group=4)
    assert sorted(made.items[: int(made.item_count), 1].tolist())[-2:] == [5, 32]


def test_one_cta_processes_many_items_correctly() -> None:
    """One CTA works correctly on many items of all kinds, one after the other in the same shared
    memory.
    """
    requests = [Request("abc" * 12, 5 + number) for number in range(6)]
    requests += [Request("xy" * 9, 300), Request("xy" * 9, 2), Request("", 90), Request("", 17)]
    made = run(requests, kv_heads=2, groups=2)
    assert int(made.item_count) * 2 > 2 * 6


def test_the_kernel_reads_only_the_given_counts_of_fixed_buffers() -> None:
    """The kernel does not read beyond the given counts in buffers of fixed size."""
    requests = [Request("abcd", 9), Request("abcd", 300), Request("", 0)]
    made, step, context = case(requests, room=(30, 40))
    assert step.saving.shared_prefix_groups == 1
    made.items[int(made.item_count) :] = -1
    made.merge_slots[int(made.merge_starts[-1]) :] = -1
    check_result(made, context)


def test_the_page_table_may_be_part_of_a_wider_tensor() -> None:
    """The page table may lie in a wider tensor, as in a CUDA graph, because the plan says where its
    rows begin.
    """
    made, _, context = case([Request("abcd", 9), Request("abcd", 300), Request("ab", 1)])
    wide = torch.full((3, 50), -1, dtype=torch.int32)
    wide.view(-1)[: made.page_table.numel()] = made.page_table.flatten()
    for run_it in (emulate, lambda name, *given: getattr(torch.ops.warmroute, name)(*given)):
        made.out.fill_(float("nan"))
        run_it("shared_decode", *arguments(made, page_table=wide))
        assert relative_error(made.out, exact(made, context)) < BOUND[made.q.dtype]


@settings(max_examples=examples(10), deadline=None)
@given(
    names=st.lists(st.text("ab", max_size=5), min_size=1, max_size=7),
    own=st.lists(st.integers(0, 70), min_size=7, max_size=7),
    group=st.integers(1, 16),
    page_tokens=st.sampled_from([16, 32]),
    costs=st.sampled_from([ALWAYS, Costs()]),
    seed=st.integers(0, 1 << 20),
)
def test_shared_decode_is_right_for_any_step(
    names: list[str], own: list[int], group: int, page_tokens: int, costs: Costs, seed: int
) -> None:
    requests = [Request(*pair) for pair in zip(names, own, strict=False)]
    made, _, context = case(requests, group, page_tokens=page_tokens, costs=costs, seed=seed)
    check_result(made, context, seed)


def test_bits_do_not_depend_on_the_requests_that_share_pages() -> None:
    """A request's bits do not depend on the requests that share its pages: the same pages are
    shared with five and with nine others.
    """
    bits = []
    for others in (5, 9):
        requests = [Request("abcdef", 21)] + [Request("abcdef", 7)] * others
        made, _, _ = case(requests)
        draw = torch.Generator().manual_seed(9)
        for tensor in (made.k_pages, made.v_pages):  # the first request's are the same
            values = torch.randn(8, 16, 1, 64, generator=draw).to(tensor.dtype)
            tensor[made.page_table[0, :8].long()] = values
        made.q[0] = torch.randn(4, 64, generator=draw).to(made.q.dtype)
        emulate("shared_decode", *made, seed=others)
        bits.append(made.out[0])
    assert torch.equal(*bits)


def test_the_cpu_implementation_equals_plain_attention() -> None:
    requests = [Request("aab", 3), Request("aab", 0), Request("aac", 20), Request("", 0)]
    made, step, context = case(requests, kv_heads=2)
    wide = made._replace(**{x: getattr(made, x).double() for x in ("q", "k_pages", "v_pages")})
    wide = wide._replace(out=torch.full_like(wide.q, float("nan")))
    torch.ops.warmroute.shared_decode(*wide)
    assert torch.allclose(wide.out, exact(made, context), rtol=1e-12, atol=1e-14)
    tensors = (made.q, made.k_pages, made.v_pages, made.page_table)
    shared_decode(*tensors, step.plan, made.scale, made.out, made[11:13])
    assert relative_error(made.out, exact(made, context)) < BOUND[made.q.dtype]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("q", lambda c: c.q[..., :40], "q has head_dim 40, shared_decode has 64 and 128"),
        ("q", lambda c: c.q.float(), "k_pages is bfloat16, needs float32"),
        ("q", lambda c: c.q.double(), "a tensor of float64"),
        ("scale", lambda c: 0.0, "scale is not above 0"),
        ("scale", lambda c: -1.0, "scale is not above 0"),
        ("scale", lambda c: float("nan"), "scale is not above 0"),
        ("v_pages", lambda c: c.v_pages[:, :8], "v_pages has shape [9, 8, 1, 64], needs [9, 16"),
        ("page_table", lambda c: c.page_table.long(), "page_table is int64, needs int32"),
        ("scale", lambda c: float("inf"), "scale is not above 0"),
        ("v_pages", lambda c: c.v_pages.contiguous(), "v_pages has other strides than k_pages"),
        ("page_table", lambda c: c.page_table[:1], "page_table has shape [1, 4], needs [2, any]"),
        ("page_table", lambda c: c.page_table[:, 1:], "page_table is not dense"),
        ("items", lambda c: c.items[:, :4], "items has shape [3, 4], needs [3, 8]"),
        ("items", lambda c: c.items.repeat(1, 2)[:, :8], "items is not dense"),
        ("members", lambda c: c.members[:1], "members has shape [1], needs [2]"),
        ("members", lambda c: c.members.long(), "members is int64, needs int32"),
        ("item_count", lambda c: c.merge_starts, "item_count has shape [3], needs [1]"),
        ("merge_starts", lambda c: c.merge_starts[:2], "merge_starts has shape [2], needs [3]"),
        ("merge_slots", lambda c: c.merge_slots[:2], "merge_slots has shape [2], needs [4]"),
        ("partial_lse", lambda c: c.partial_lse[:1], "partial_lse has shape [1, 4], needs [4, 4]"),
        ("partial", lambda c: c.partial.transpose(0, 1).contiguous().transpose(0, 1), "not dense"),
        ("out", lambda c: c.out.half(), "out is float16, needs bfloat16"),
    ],
)
def test_the_error_names_the_bad_argument(name: str, change: Any, says: str) -> None:
    made, _, _ = case([Request("a", 20), Request("a", 30)])
    with pytest.raises(RefusedError) as refused:
        emulate("shared_decode", *arguments(made, **{name: change(made)}))
    assert says in str(refused.value)


def test_pages_and_groups_of_unsupported_sizes_are_refused() -> None:
    made, _, _ = case([Request("a", 20)], group=3, kv_heads=2)
    narrow = {"k_pages": made.k_pages[:, :8], "v_pages": made.v_pages[:, :8]}
    with pytest.raises(RefusedError, match="k_pages has pages of 8 tokens"):
        emulate("shared_decode", *arguments(made, **narrow))
    with pytest.raises(RefusedError, match="q has 5 heads for 2 KV heads"):
        emulate("shared_decode", *arguments(made, q=made.q[:, :5]))


def test_the_operator_passes_opcheck() -> None:
    made, _, _ = case([Request("ab", 5), Request("ab", 30)])
    made = made._replace(k_pages=made.k_pages.contiguous(), v_pages=made.v_pages.contiguous())
    for part in (made.partial, made.partial_lse):
        part.zero_()  # CPUs do not write it, and NaN does not equal itself
    torch.library.opcheck(torch.ops.warmroute.shared_decode.default, tuple(made))
