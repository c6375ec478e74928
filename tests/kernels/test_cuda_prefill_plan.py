"""prefill's plan: every new token in one item, bad spans and tables named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkernels.ops.prefill import item_tokens, most_items, plan_prefill


@given(
    pieces=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 300)), max_size=6),
    group=st.integers(1, 128),
    spare=st.integers(0, 3),
)
def test_every_token_has_one_item(pieces: list[tuple[int, int]], group: int, spare: int) -> None:
    spans, rows = [], 0
    for start, tokens in pieces:
        spans.append((rows, tokens, start + tokens))
        rows += tokens
    table = torch.zeros(len(pieces), 50, dtype=torch.int32)
    made = torch.tensor(spans).view(-1, 3)
    room = most_items(len(pieces), rows, group) + spare
    plan = plan_prefill(made, rows, table, 1, 16, group, room)
    assert len(plan.items) == room
    owners, sees = [-1] * rows, []
    for request, first, tokens, position in plan.items[: int(plan.item_count)].tolist():
        assert 1 <= tokens <= item_tokens(group)
        row, _, context = spans[request]
        assert position - pieces[request][0] == first - row
        assert position + tokens <= context
        sees.append(position + tokens)
        for at in range(first, first + tokens):
            assert owners[at] == -1
            owners[at] = request
    assert owners == [row for row, (_, tokens) in enumerate(pieces) for _ in range(tokens)]
    assert sees == sorted(sees, reverse=True)
    again = plan.on("cpu")
    assert torch.equal(again.items, plan.items)
    assert torch.equal(again.item_count, plan.item_count)


def plan_of(spans: list[list[int]], table: list[list[int]], items: int | None = None) -> None:
    plan_prefill(torch.tensor(spans), 10, torch.tensor(table), 4, 16, 4, items)


@pytest.mark.parametrize(
    ("spans", "table", "says"),
    [
        ([[0, 5, 4]], [[0]], "request 0 has 5 tokens from row 0 of 10 on, in a context of 4"),
        ([[0, 5, 5], [6, 5, 5]], [[0], [0]], "request 1 has 5 tokens from row 6 of 10 on"),
        ([[-1, 5, 5]], [[0]], "request 0 has 5 tokens from row -1"),
        ([[0, -1, 5]], [[0]], "request 0 has -1 tokens"),
        ([[0, 1, (1 << 30) + 1]], [[0]], "in a context of 1073741825 .at most 1073741824"),
        ([[0, 5, 17]], [[0]], "request 0 has 17 context tokens, its row of page_table is for 0 to"),
        ([[0, 5, 17]], [[0, 4]], r"page_table\[0, 1\] is 4, pages go from 0 to 3"),
        ([[0, 5, 17]], [[-1, 0]], r"page_table\[0, 0\] is -1"),
        ([[0, 5, 5]], [[0], [0]], r"\[1\] context tokens and a page_table of \[2, 1\]"),
        ([[0, 5]], [[0]], r"spans have shape \[1, 2\], need \[requests, 3\]"),
    ],
)
def test_what_a_plan_refuses(spans: list[list[int]], table: list[list[int]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_of(spans, table)


def test_tables_are_checked_where_they_are_read_only() -> None:
    plan_of([[0, 5, 17], [5, 0, 40]], [[0, 3], [-1, -1]])


def test_room_and_groups_are_checked() -> None:
    with pytest.raises(ValueError, match="1 items do not fit into a plan of 0"):
        plan_of([[0, 5, 5]], [[0]], 0)
    for group in (0, 129):
        with pytest.raises(ValueError, match=f"{group} query heads a KV head: prefill has 1 to"):
            item_tokens(group)
