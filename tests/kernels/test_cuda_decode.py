"""decode: the kernel in the emulator and the CPU implementation, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.cuda.library import RefusedError
from kvkernels.ops.shared_decode import unsupported, workspace_of
from kvkernels.ops.shared_runs import LARGEST_CHUNK, LEAST_CHUNK
from tests.effort import examples
from tests.kernels.emulated import emulate, needs_compiler, poisoned, pool_of, relative_error
from tests.oracles.decode import DecodePlan, plan_decode

pytestmark = needs_compiler
BOUND = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


@dataclass
class Case:
    """Arguments of decode in its order."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    item_count: torch.Tensor
    items: torch.Tensor
    merge_starts: torch.Tensor
    merge_slots: torch.Tensor
    scale: float
    out: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    def arguments(self) -> list[Any]:
        return list(vars(self).values())


def case(
    lengths: list[int],
    group: int = 4,
    kv_heads: int = 2,
    dim: int = 128,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    room: int = 0,
    seed: int = 0,
    scale: float = 1.0,
    is_whole: bool = False,
) -> Case:
    """Requests of `lengths` on scattered pages; whatever is none of theirs is NaN.

    `room` is the plan's, in items; `is_whole` makes one item of each request.
    """
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_tokens) for length in lengths]
    pages = sum(counts) + 3
    k_pages, v_pages = pool_of(pages, kv_heads, page_tokens, dim, dtype)
    free = torch.randperm(pages, generator=draw).tolist()
    table = torch.full((len(lengths), max([*counts, 1]) + 1), 1 << 30, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for number in range(count):
            page = table[row, number] = free.pop()
            tokens = min(page_tokens, length - number * page_tokens)
            for kept in (k_pages, v_pages):
                values = torch.randn(tokens, kv_heads, dim, generator=draw)
                kept[page, :tokens] = values.to(dtype)
    plan = plan_decode(torch.tensor(lengths), table, pages, page_tokens)
    if room:
        plan = plan_decode(torch.tensor(lengths), table, pages, page_tokens, room)
    if is_whole:
        plan.item_count[0] = len(lengths)
        plan.merge_starts.zero_()
        for row, length in enumerate(lengths):
            plan.items[row] = torch.tensor([row, 0, length, -1])
    heads = kv_heads * group
    return Case(
        torch.randn(len(lengths), heads, dim, generator=draw).to(dtype),
        *(k_pages, v_pages, table, *plan[1:], scale * dim**-0.5),
        poisoned(len(lengths), heads, dim, dtype=dtype),
        *(part.fill_(float("nan")) for part in workspace_of(plan, heads, dim)),
    )


def exact(made: Case) -> torch.Tensor:
    """The output in float64, by the CPU implementation."""
    wide = {name: x for name, x in vars(made).items() if name not in ("out", "scale")}
    for name in ("q", "k_pages", "v_pages"):
        wide[name] = wide[name].double()
    out = torch.full_like(wide["q"], float("nan"))
    torch.ops.warmroute.decode(*Case(**wide, out=out, scale=made.scale).arguments())
    return out


def hold(made: Case, seed: int = 1, bound: float | None = None) -> None:
    emulate("decode", *made.arguments(), seed=seed)
    wanted = exact(made)
    rows = wanted.flatten(1).norm(dim=1) > 0
    assert (made.out[~rows] == 0).all()
    for got, row in zip(made.out[rows], wanted[rows], strict=True):
        assert relative_error(got, row) < (bound or BOUND[made.q.dtype])


def test_the_cpu_implementation_is_softmax() -> None:
    """The oracle itself, against the formula written out for one head and token."""
    made = case([37], group=2, kv_heads=1)
    pages = made.page_table[0, :3].long()
    k, v = (x.double()[pages].flatten(0, 1)[:37, 0] for x in (made.k_pages, made.v_pages))
    scores = (k @ made.q.double()[0, 1]) * made.scale
    weights = scores.exp() / scores.exp().sum()
    assert torch.allclose(exact(made)[0, 1], weights @ v, rtol=1e-12)
    narrow = replace(made, out=made.out.clone())
    torch.ops.warmroute.decode(*narrow.arguments())
    assert relative_error(narrow.out, exact(made)) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("group", [1, 4, 7, 8, 16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_and_ragged_lengths(group: int, dim: int, dtype: torch.dtype) -> None:
    lengths = [1, 15, 16, 17, 63, 64, 65, 0, 129]
    hold(case(lengths, group, 1, dim, dtype=dtype, seed=group), seed=group)


@pytest.mark.parametrize("page_tokens", [16, 32, 48, 256])
def test_splits(page_tokens: int) -> None:
    lengths = [LEAST_CHUNK - 1, LEAST_CHUNK, LEAST_CHUNK + 1, 2 * LEAST_CHUNK + 17]
    hold(case(lengths, 4, 2, 64, page_tokens, room=40), seed=page_tokens)


def test_more_partial_results_than_a_warp_has_lanes() -> None:
    count, tile = 70, 16
    made = case([count * tile, 30], 3, 1, 64, room=count + 1)
    made.item_count[0] = count + 1
    for number in range(count):
        made.items[number] = torch.tensor([0, number * tile, (number + 1) * tile, number])
    made.items[count] = torch.tensor([1, 0, 30, -1])
    made.merge_starts[1:] = count
    made.merge_slots = torch.arange(count).int().flip(0)
    made.partial, made.partial_lse = (
        torch.full((count, *part.shape[1:]), float("nan"))
        for part in (made.partial, made.partial_lse)
    )
    hold(made)


def test_a_window_of_page_ids_and_more() -> None:
    """More than 32 tiles a warp, by an item longer than plans make them: ids are read again."""
    hold(case([3 * LARGEST_CHUNK, 2050], 1, 1, 64, seed=3, is_whole=True))


def test_the_largest_items() -> None:
    hold(case([8 * LARGEST_CHUNK + 100], 8, 1, 64, 32, seed=4))


@settings(max_examples=examples(12))
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    group=st.integers(1, 16),
    kv_heads=st.integers(1, 2),
    page_tokens=st.sampled_from([16, 32, 80]),
    seed=st.integers(0, 1 << 20),
)
def test_any_batch(
    lengths: list[int], group: int, kv_heads: int, page_tokens: int, seed: int
) -> None:
    hold(case(lengths, group, kv_heads, 64, page_tokens, seed=seed), seed=seed)


def test_large_scores_do_not_overflow() -> None:
    """Weights of one token nearly alone: base-2 exponents of hundreds."""
    hold(case([40, 300], 4, 1, 64, scale=60.0), bound=2e-2)


def test_a_request_is_the_same_in_any_batch() -> None:
    lengths = [33, LEAST_CHUNK + 40, 5]
    made = case(lengths, 4, 2, 64, seed=7)
    emulate("decode", *made.arguments())
    for row, length in enumerate(lengths):
        table = made.page_table[row : row + 1]
        plan = plan_decode(torch.tensor([length]), table, len(made.k_pages), 16)
        alone = replace(
            made,
            q=made.q[row : row + 1],
            page_table=table,
            **dict(zip(DecodePlan._fields[1:], plan[1:], strict=True)),
            out=torch.zeros_like(made.out[row : row + 1]),
            **dict(zip(("partial", "partial_lse"), workspace_of(plan, 8, 64), strict=True)),
        )
        emulate("decode", *alone.arguments(), seed=row + 5)
        assert torch.equal(alone.out[0], made.out[row])


def test_partial_results_are_base_2() -> None:
    made = case([LEAST_CHUNK + 9], 1, 1, 64)
    emulate("decode", *made.arguments())
    pages = made.page_table[0, :17].long()
    k = made.k_pages.double()[pages].flatten(0, 1)[: LEAST_CHUNK + 9, 0]
    scores = k @ made.q.double()[0, 0] * made.scale / torch.tensor(2.0).double().log()
    for begin, slot in ((0, 0), (LEAST_CHUNK, 1)):
        lse = torch.exp2(scores[begin : begin + LEAST_CHUNK]).sum().log2()
        assert abs(float(made.partial_lse[slot, 0] - lse)) < 1e-3


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("q", lambda c: c.q[..., :80], "q has head_dim 80, decode has 64 and 128"),
        ("q", lambda c: c.q.float(), "k_pages is bfloat16, needs float32"),
        ("q", lambda c: c.q.double(), "a tensor of float64"),
        ("q", lambda c: c.q[:, :7], "q has 7 heads for 2 KV heads, decode has groups of 1 to 16"),
        ("scale", lambda c: 0.0, "scale is not above 0"),
        ("scale", lambda c: float("nan"), "scale is not above 0"),
        ("v_pages", lambda c: c.v_pages.contiguous(), "v_pages has other strides than k_pages"),
        ("v_pages", lambda c: c.v_pages[:, :8], "v_pages has shape [8, 8, 2, 128], needs [8, 16"),
        ("page_table", lambda c: c.page_table[:1], "page_table has shape [1, 4], needs [2, any]"),
        ("page_table", lambda c: c.page_table.long(), "page_table is int64, needs int32"),
        ("items", lambda c: c.items[:, :3], "items has shape [2, 3], needs [2, 4]"),
        ("merge_starts", lambda c: c.merge_starts[:2], "merge_starts has shape [2], needs [3]"),
        ("partial_lse", lambda c: c.partial_lse[:1], "partial_lse has shape [1, 8], needs [2, 8]"),
        ("partial", lambda c: c.partial.transpose(0, 1).contiguous().transpose(0, 1), "not dense"),
        ("out", lambda c: c.out.half(), "out is float16, needs bfloat16"),
    ],
)
def test_bad_arguments_are_named(name: str, change: Any, says: str) -> None:
    made = case([20, 40])
    with pytest.raises(RefusedError) as refused:
        emulate("decode", *replace(made, **{name: change(made)}).arguments())
    assert says in str(refused.value)


def test_pages_of_other_sizes_are_refused() -> None:
    made = case([20, 40])
    made.k_pages, made.v_pages = made.k_pages[:, :8], made.v_pages[:, :8]
    with pytest.raises(RefusedError, match="k_pages has pages of 8 tokens"):
        emulate("decode", *made.arguments())


def test_what_is_not_supported_is_said() -> None:
    assert unsupported(32, 8, 128, 16, torch.bfloat16) == ""
    for bad in (
        (32, 8, 128, 16, torch.float32),
        (32, 8, 96, 16, torch.bfloat16),
        (32, 8, 128, 24, torch.bfloat16),
        (34, 2, 128, 16, torch.bfloat16),
        (33, 2, 128, 16, torch.bfloat16),
    ):
        assert "the kernel has" in unsupported(*bad)


def test_the_operator_is_sound() -> None:
    made = case([5, 300])
    made.k_pages, made.v_pages = made.k_pages.contiguous(), made.v_pages.contiguous()
    for part in (made.partial, made.partial_lse):
        part.zero_()  # not written on CPUs, and NaN is no equal of itself
    torch.library.opcheck(torch.ops.warmroute.decode.default, tuple(made.arguments()))
