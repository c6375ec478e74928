"""Decode's plan: every token once, by the request's own length, within what was promised."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkernels.ops.shared_decode import most_items
from kvkernels.ops.shared_runs import CHUNK_STEP, LARGEST_CHUNK, LEAST_CHUNK
from tests.oracles.decode import chunk_tokens, plan_decode, words

LENGTHS = st.lists(st.integers(0, 20_000), max_size=20)


def plan_of(lengths: list[int], items: int | None = None):  # type: ignore[no-untyped-def]
    table = torch.zeros(len(lengths), 20_000 // 16, dtype=torch.int32)
    return plan_decode(torch.tensor(lengths, dtype=torch.int64), table, 1, 16, items)


@given(LENGTHS, st.integers(0, 5))
def test_every_token_once(lengths: list[int], more: int) -> None:
    room = most_items(len(lengths), sum(lengths)) + more
    plan = plan_of(lengths, room)
    assert len(plan.all) == words(len(lengths), room)
    items = plan.items[: int(plan.item_count)].tolist()
    assert len(items) <= room
    spans = [item[2] - item[1] for item in items]
    assert spans == sorted(spans, reverse=True)
    slots_seen = []
    for request, length in enumerate(lengths):
        own = sorted(item[1:] for item in items if item[0] == request)
        assert own[0][0] == 0
        assert own[-1][1] == length
        assert all(a[1] == b[0] and b[0] % CHUNK_STEP == 0 for a, b in pairwise(own))
        begin, end = plan.merge_starts[request : request + 2].tolist()
        slots = plan.merge_slots[begin:end].tolist()
        assert slots == ([item[2] for item in own] if len(own) > 1 else [])
        assert len(own) > 1 or own[0][2] == -1
        slots_seen += slots
    assert slots_seen == list(range(len(slots_seen)))


@given(LENGTHS)
def test_a_request_is_cut_the_same_in_any_batch(lengths: list[int]) -> None:
    plan = plan_of(lengths)
    for request, length in enumerate(lengths):
        alone = plan_of([length])
        here = sorted(
            i[1:3] for i in plan.items[: int(plan.item_count)].tolist() if i[0] == request
        )
        assert here == sorted(i[1:3] for i in alone.items[: int(alone.item_count)].tolist())


def test_chunks() -> None:
    lengths = torch.tensor([0, 1, 256, 257, 2048, 2049, 4096, 8192, 100_000])
    wanted = [LEAST_CHUNK] * 5 + [320, 512, LARGEST_CHUNK, LARGEST_CHUNK]
    assert chunk_tokens(lengths).tolist() == wanted


@pytest.mark.parametrize(
    ("context", "table", "says"),
    [
        ([33], [[0, 1]], "request 0 has 33 context tokens, its row of page_table is for 0 to 32"),
        ([1, -1], [[0, 1]] * 2, "request 1 has -1 context tokens"),
        ([17, 32], [[0, 1], [2, 4]], r"page_table\[1, 1\] is 4, pages go from 0 to 3"),
        ([17], [[-1, 0]], r"page_table\[0, 0\] is -1"),
        ([17], [[0, 1]] * 2, "needs .requests. and .requests, pages."),
    ],
)
def test_bad_tables_are_named(context: list[int], table: list[list[int]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_decode(torch.tensor(context), torch.tensor(table), 4, 16)


def test_pages_beyond_the_context_are_not_looked_at() -> None:
    assert plan_decode(torch.tensor([16]), torch.tensor([[3, 99]]), 4, 16).item_count == 1


def test_too_many_items_are_refused() -> None:
    with pytest.raises(ValueError, match="2 items do not fit into a plan of 1"):
        plan_of([257], 1)
