"""Tests of prefill's plan: every new token is in one item, and errors name bad spans and tables."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkernels.ops.prefill import (
    FILLING_CTAS,
    LEAST_PIECE,
    MOST_SLOTS,
    PIECE_STEP,
    PrefillPlan,
    item_tokens,
    most_items,
    plan_prefill,
)
from tests.bench import prefill_balance


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
    for request, first, tokens, position, *_ in plan.items[: int(plan.item_count)].tolist():
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
def test_invalid_spans_and_tables_are_refused(
    spans: list[list[int]], table: list[list[int]], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        plan_of(spans, table)


def test_only_table_entries_that_are_read_are_checked() -> None:
    plan_of([[0, 5, 17], [5, 0, 40]], [[0, 3], [-1, -1]])


def test_room_and_groups_are_checked() -> None:
    with pytest.raises(ValueError, match="1 items do not fit into a plan of 0"):
        plan_of([[0, 5, 5]], [[0]], 0)
    for group in (0, 129):
        with pytest.raises(ValueError, match=f"{group} query heads a KV head: prefill has 1 to"):
            item_tokens(group)


def cut_plan(pieces: list[tuple[int, int]], group: int = 4, kv_heads: int = 8) -> PrefillPlan:
    """Return the plan for requests of (tokens before, new tokens), with one page for all."""
    spans, rows = [], 0
    for start, tokens in pieces:
        spans.append((rows, tokens, start + tokens))
        rows += tokens
    table = torch.zeros(len(pieces), 1 << 12, dtype=torch.int32)
    return plan_prefill(torch.tensor(spans), rows, table, 1, 16, group, kv_heads=kv_heads)


@given(
    pieces=st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 300)), min_size=1, max_size=4),
    group=st.integers(1, 128),
    kv_heads=st.integers(1, 8),
)
def test_pieces_cover_each_rows_keys_once(
    pieces: list[tuple[int, int]], group: int, kv_heads: int
) -> None:
    """The pieces cover each row's keys once and in order, and each piece has a key that every one
    of its rows sees.
    """
    plan = cut_plan(pieces, group, kv_heads)
    slots: dict[int, tuple[int, int, int]] = {}
    whole: dict[int, tuple[int, int]] = {}
    for _, first, tokens, position, begin, end, slot, _ in plan.items.tolist():
        assert begin <= position, "its first row sees the first key"
        assert begin % PIECE_STEP == 0
        for row in range(tokens):
            if slot < 0:
                whole[first + row] = (begin, end)
            else:
                assert slot + row not in slots
                slots[slot + row] = (first + row, begin, end)
    assert len(slots) == len(plan.merge_slots) <= MOST_SLOTS
    starts, row = plan.merge_starts.tolist(), 0
    for start, count in pieces:
        for token in range(count):
            merged = plan.merge_slots[starts[row] : starts[row + 1]].tolist()
            parts = [slots[slot][1:] for slot in merged] or [whole[row]]
            assert all(slots[slot][0] == row for slot in merged)
            assert parts[0][0] == 0
            assert parts[-1][1] > start + token, "the last one has the row's own token"
            assert all(a[1] == b[0] for a, b in pairwise(parts))
            row += 1
    assert starts[-1] == len(plan.merge_slots)


def test_a_short_chunk_after_a_long_context_fills_the_gpu() -> None:
    plan = cut_plan([(8_192, 64)])
    assert len(plan.items) * 8 == FILLING_CTAS
    assert int((plan.items[:, 5] - plan.items[:, 4]).max()) <= 8_256 // 8 + PIECE_STEP


@pytest.mark.parametrize("piece", [(0, 2_048), (8_192, 512), (LEAST_PIECE - 64, 64)])
def test_requests_with_many_items_or_few_keys_are_not_cut(piece: tuple[int, int]) -> None:
    plan = cut_plan([piece])
    assert len(plan.merge_slots) == 0
    assert set(plan.items[:, 6].tolist()) == {-1}


def test_the_cuts_of_keys_depend_only_on_the_request() -> None:
    alone = cut_plan([(8_192, 64)]).items[:, 3:6].tolist()
    beside = cut_plan([(300, 90), (8_192, 64), (0, 2_000)])
    own = [item for item in beside.items.tolist() if item[0] == 1]
    assert sorted(item[3:6] for item in own) == sorted(alone)


def test_a_crowded_step_cuts_nothing() -> None:
    """A step with many items cuts no keys into pieces: its items fill the GPU, and partial results
    would exceed the memory that is kept for them.
    """
    plan = cut_plan([(8_192, 64)] * 16)
    assert len(plan.merge_slots) == 0


def test_the_balance_table_in_the_docs_equals_the_commands_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["prefill_balance"])
        prefill_balance.main()
    said = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() in said


@pytest.mark.parametrize(
    ("name", "sms", "share"),
    [("64 after 8k", 100, 0.8), ("128 after 32k", 100, 0.95), ("1 x 2k", 132, 0.969)],
)
def test_a_prefill_uses_most_sms(name: str, sms: int, share: float) -> None:
    shape = next(shape for shape in prefill_balance.SHAPES if shape.name == name)
    *_, after = prefill_balance.measured(shape)
    assert after.sms >= sms
    assert after.share >= share
