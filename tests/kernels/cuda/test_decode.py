"""Tests of `shared_decode` for requests that share nothing, whose work items have few rows: in the
emulator, against float64.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.ops.calibration import ALWAYS
from kvkernels.ops.shared_decode import unsupported
from kvkernels.ops.shared_runs import LARGEST_CHUNK, LEAST_CHUNK
from tests.effort import examples
from tests.kernels.cuda.decoding import BOUND, in_one_piece
from tests.kernels.emulated import emulate, needs_compiler, relative_error
from tests.kernels.shared_cases import Case, Request, alone, case, exact

pytestmark = needs_compiler


def check_result(made: Case, lengths: list[int], seed: int = 1, bound: float | None = None) -> None:
    emulate("shared_decode", *made, seed=seed)
    wanted = exact(made, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        if length:
            assert relative_error(made.out[row], wanted[row]) < (bound or BOUND[made.q.dtype])
        else:
            assert (made.out[row] == 0).all()


@pytest.mark.parametrize("group", [1, 4, 7, 8, 16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_agrees_with_float64_for_groups_and_ragged_lengths(
    group: int, dim: int, dtype: torch.dtype
) -> None:
    lengths = [1, 15, 16, 17, 63, 64, 65, 0, 129]
    check_result(alone(lengths, group, 1, dim, dtype=dtype, seed=group), lengths, seed=group)


@pytest.mark.parametrize("page_tokens", [16, 32, 48, 256])
def test_decode_is_right_if_requests_are_split_into_chunks(page_tokens: int) -> None:
    lengths = [LEAST_CHUNK - 1, LEAST_CHUNK, LEAST_CHUNK + 1, 2 * LEAST_CHUNK + 17]
    made = alone(lengths, 4, 2, 64, page_tokens, room=(40, 40))
    check_result(made, lengths, seed=page_tokens)


def test_decode_merges_more_partial_results_than_a_warp_has_lanes() -> None:
    count, tile = 70, 16
    lengths = [count * tile, 30]
    made = alone(lengths, 3, 1, 64, room=(count + 1, count))
    width = made.page_table.shape[1]
    made.item_count[0], made.members[:] = count + 1, torch.arange(2)
    for number in range(count):
        own = [0, 1, number * tile, (number + 1) * tile, number, 0, 0, 0]
        made.items[number] = torch.tensor(own)
    made.items[count] = torch.tensor([1, 1, 0, 30, -1, width, 0, 0])
    made.merge_starts[1:] = count
    made.merge_slots[:] = torch.arange(count).flip(0)
    check_result(made, lengths)


def test_decode_is_right_beyond_one_window_of_page_ids() -> None:
    """A decode over so many tiles that a warp reads page ids again, after 32 tiles, is right."""
    lengths = [3 * LARGEST_CHUNK, 2050]
    check_result(in_one_piece(lengths, alone(lengths, 1, 1, 64, seed=3)), lengths)


def test_decode_is_right_with_the_largest_items() -> None:
    lengths = [8 * LARGEST_CHUNK + 100]
    check_result(alone(lengths, 8, 1, 64, 32, seed=4), lengths)


@settings(max_examples=examples(12))
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    group=st.integers(1, 16),
    kv_heads=st.integers(1, 2),
    page_tokens=st.sampled_from([16, 32, 80]),
    seed=st.integers(0, 1 << 20),
)
def test_decode_is_right_for_any_batch(
    lengths: list[int], group: int, kv_heads: int, page_tokens: int, seed: int
) -> None:
    check_result(alone(lengths, group, kv_heads, 64, page_tokens, seed=seed), lengths, seed=seed)


def test_large_scores_do_not_overflow() -> None:
    """Large scores do not overflow when one token has nearly all the weight: base-2 exponents reach
    hundreds.
    """
    lengths = [40, 300]
    made = alone(lengths, 4, 1, 64)
    check_result(made._replace(scale=60.0 * made.scale), lengths, bound=2e-2)


def test_a_request_is_the_same_in_any_batch() -> None:
    """A request gives the same bits alone, among other requests, and next to requests that share a
    prefix.
    """
    lengths = [33, LEAST_CHUNK + 40, 5]
    sharing = [Request("abc", own) for own in (3, 7, 9)]
    bits: dict[int, list[torch.Tensor]] = {row: [] for row in range(3)}
    draw = torch.Generator().manual_seed(7)
    values = torch.randn(3, 2, LEAST_CHUNK + 64, 2, 64, generator=draw).bfloat16()
    queries = torch.randn(3, 8, 64, generator=draw).bfloat16()
    for seed, rows, others in ((1, [0, 1, 2], []), (2, [1], []), (3, [2, 0, 1], sharing)):
        requests = [*others, *(Request("", lengths[row]) for row in rows)]
        made, _, _ = case(requests, 4, 2, 64, seed=seed, costs=ALWAYS)
        for at, row in enumerate(rows, len(others)):
            made.q[at] = queries[row]
            for token in range(lengths[row]):
                page = int(made.page_table[at, token // 16])
                for kept, own in zip((made.k_pages, made.v_pages), values[row], strict=True):
                    kept[page, token % 16] = own[token]
        emulate("shared_decode", *made, seed=seed + 5)
        for at, row in enumerate(rows, len(others)):
            bits[row].append(made.out[at].clone())
    for first, *rest in bits.values():
        assert rest
        assert all(torch.equal(first, other) for other in rest)


def test_partial_results_are_base_2() -> None:
    made = alone([LEAST_CHUNK + 9], 1, 1, 64)
    emulate("shared_decode", *made)
    pages = made.page_table[0, :17].long()
    k = made.k_pages.double()[pages].flatten(0, 1)[: LEAST_CHUNK + 9, 0]
    scores = k @ made.q.double()[0, 0] * made.scale / torch.tensor(2.0).double().log()
    for begin, slot in ((0, 0), (LEAST_CHUNK, 1)):
        lse = torch.exp2(scores[begin : begin + LEAST_CHUNK]).sum().log2()
        assert abs(float(made.partial_lse[slot, 0] - lse)) < 1e-3


def test_the_reason_for_an_unsupported_shape_is_reported() -> None:
    assert unsupported(32, 8, 128, 16, torch.bfloat16) == ""
    for bad in (
        (32, 8, 128, 16, torch.float32),
        (32, 8, 96, 16, torch.bfloat16),
        (32, 8, 128, 24, torch.bfloat16),
        (34, 2, 128, 16, torch.bfloat16),
        (33, 2, 128, 16, torch.bfloat16),
    ):
        assert "the kernel has" in unsupported(*bad)
