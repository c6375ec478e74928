"""Tests of the operator `copy_runs` and its plans: pools of tagged elements arrive intact through
any change of shards, block sizes and order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkernels.cuda.library import RefusedError
from kvkernels.ops.relayout import (
    AXES,
    RUN_BYTES,
    Piece,
    PoolLayout,
    as_bytes,
    moves,
    pieces,
    plan,
)
from tests.kernels.emulated import emulate, needs_compiler

pytestmark = needs_compiler
LAYERS, HEADS = 4, 4
UNTOUCHED, OTHERS = -1, -2
Copy = Callable[..., None]


def in_emulator(*arguments: Any) -> None:
    emulate("copy_runs", *arguments)


RUNS: dict[str, Copy] = {"emulator": in_emulator, "cpu": torch.ops.warmroute.copy_runs}


def tags(
    layout: PoolLayout, blocks: list[int], tokens: int, fill: int = UNTOUCHED, more: int = 0
) -> torch.Tensor:
    """Return a pool of `layout` in which every element of `tokens` tokens has a tag that encodes
    its position.

    The `more` tokens after them have the tag OTHERS; all other elements have `fill`.
    """
    pool = torch.full((*layout.shape(), layout.row_bytes // 4), fill, dtype=torch.int32)
    view = pool.permute(*(layout.order.index(axis) for axis in AXES), 5)
    head = torch.tensor(list(layout.heads)).view(-1, 1, 1, 1)
    layer = torch.tensor(list(layout.layers)).view(-1, 1, 1)
    kv, dim = torch.arange(2).view(-1, 1), torch.arange(layout.row_bytes // 4)
    for token in range(tokens + more):
        block, offset = blocks[token // layout.block_tokens], token % layout.block_tokens
        tag = (((token * HEADS + head) * LAYERS + layer) * 2 + kv) * 64 + dim
        view[block, :, :, :, offset] = tag.to(torch.int32) if token < tokens else OTHERS
    return pool


def shards(tp: int, pp: int, base: PoolLayout) -> list[PoolLayout]:
    """Return the layout of every rank's pool. Ranks share a head if there are more ranks than
    heads.
    """
    per_stage, per_rank = LAYERS // pp, max(1, HEADS // tp)
    return [
        replace(
            base,
            layers=range(stage * per_stage, (stage + 1) * per_stage),
            heads=range(rank * HEADS // tp, rank * HEADS // tp + per_rank),
        )
        for stage in range(pp)
        for rank in range(tp)
    ]


def layout_of(**changes: Any) -> PoolLayout:
    layout = PoolLayout(range(LAYERS), range(HEADS), 12, 16, 32)
    return replace(layout, **changes)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@given(
    source_cut=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4])),
    target_cut=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4])),
    sizes=st.tuples(st.sampled_from([1, 3, 8, 16]), st.sampled_from([1, 4, 8, 16])),
    orders=st.tuples(st.permutations(AXES), st.permutations(AXES)),
    row_bytes=st.sampled_from([4, 32, 256]),
    tokens=st.integers(1, 12),
    chance=st.randoms(use_true_random=False),
)
def test_tagged_pools_survive_any_change_of_layout(
    run: Copy,
    source_cut: tuple[int, int],
    target_cut: tuple[int, int],
    sizes: tuple[int, int],
    orders: tuple[list[str], list[str]],
    row_bytes: int,
    tokens: int,
    chance: Any,
) -> None:
    bases = [
        layout_of(block_tokens=size, order=tuple(order), row_bytes=row_bytes)
        for size, order in zip(sizes, orders, strict=True)
    ]
    sources = shards(*source_cut, bases[0])
    ids = [chance.sample(range(12), 12) for _ in range(2)]
    pools = [tags(layout, ids[0], tokens, OTHERS) for layout in sources]
    rank = chance.randrange(target_cut[0] * target_cut[1])
    target = shards(*target_cut, bases[1])[rank]
    got = tags(target, ids[1], 0)
    unit = 1
    for piece in pieces(sources, target, rank):
        made = plan(sources[piece.source], target, piece)
        at = moves(made, ids[0], ids[1], range(tokens))
        padded = torch.cat([at, torch.full((1, 2), -1)])
        run(as_bytes(pools[piece.source]), as_bytes(got), made.runs, padded)
        unit = made.unit_tokens
    # The last unit arrives whole, with what its pool had beyond the last token.
    assert torch.equal(got, tags(target, ids[1], tokens, more=-tokens % unit))


def test_gathered_and_scattered_blocks_are_restored() -> None:
    pool_layout = layout_of(row_bytes=256)
    pool = tags(pool_layout, list(range(12)), 192)
    chosen = [7, 2, 11]
    buffer_layout = replace(pool_layout, blocks=3)
    buffer = tags(buffer_layout, [], 0)
    back = tags(pool_layout, [], 0)
    gather, scatter = plan(pool_layout, buffer_layout), plan(buffer_layout, pool_layout)
    tokens = range(48)
    at = moves(gather, chosen, range(3), tokens)
    in_emulator(as_bytes(pool), as_bytes(buffer), gather.runs, at)
    assert torch.equal(buffer, pool[chosen])
    at = moves(scatter, range(3), chosen, tokens)
    in_emulator(as_bytes(buffer), as_bytes(back), scatter.runs, at)
    assert torch.equal(back[chosen], pool[chosen])
    assert (back[[0, 1, 3, 4, 5, 6, 8, 9, 10]] == UNTOUCHED).all()


def test_runs_are_as_long_as_the_axis_order_allows() -> None:
    # Equal shapes: a block is one run, cut to what a CTA takes.
    one = layout_of(row_bytes=256)
    block_bytes = LAYERS * HEADS * 2 * 16 * 256
    assert plan(one, one).runs[:, 2].tolist() == [RUN_BYTES] * (block_bytes // RUN_BYTES)
    # Heads that are split: still one run a block for each source, and for the whole target.
    half = replace(one, heads=range(2))
    runs = plan(half, one).runs
    assert int(runs[:, 2].sum()) == block_bytes // 2
    assert torch.equal(runs[:, 0], runs[:, 1])
    # Layers that are split: one run a head.
    stage = replace(one, layers=range(2))
    assert len(plan(stage, one).runs) == HEADS * (block_bytes // HEADS // 2 // RUN_BYTES)
    # Other block sizes: K and V of each head and layer on their own.
    assert len(plan(replace(one, block_tokens=8), one).runs) == HEADS * LAYERS * 2


def test_replicas_are_chosen_in_turn_by_the_targets_rank() -> None:
    sources, mine = shards(8, 1, layout_of()), layout_of(heads=range(2, 3))
    assert [pieces(sources, mine, rank)[0].source for rank in range(4)] == [4, 5, 4, 5]


def test_part_of_a_request_can_be_copied_alone() -> None:
    layout = layout_of(row_bytes=32)
    pool, got = tags(layout, [3, 4], 32), tags(layout, [], 0)
    made = plan(layout, layout)
    in_emulator(*map(as_bytes, (pool, got)), made.runs, moves(made, [3, 4], [0, 1], range(16, 32)))
    assert (got[0] == UNTOUCHED).all()
    assert torch.equal(got[1], pool[4])


def test_odd_rows_and_addresses_are_copied_exactly() -> None:
    source = torch.arange(100, dtype=torch.int8)
    for length, first, into in ((1, 0, 0), (7, 3, 5), (12, 4, 8), (64, 1, 17), (0, 5, 5)):
        for run in RUNS.values():
            target = torch.full((100,), UNTOUCHED, dtype=torch.int8)
            runs = torch.tensor([[first, into, length]])
            run(source, target, runs, torch.tensor([[0, 0], [-1, 0]]))
            assert torch.equal(target[into : into + length], source[first : first + length])
            assert int((target != UNTOUCHED).sum()) == length


@pytest.mark.parametrize(
    "run", [[0, 0, 101], [90, 0, 11], [0, 99, 2], [-1, 0, 4], [1 << 62, 0, 4], [0, 0, -3]]
)
@pytest.mark.parametrize("base", [[0, 0], [100, 0], [1 << 62, 1 << 62]])
def test_runs_outside_a_pool_are_not_copied(run: list[int], base: list[int]) -> None:
    source = torch.zeros(100, dtype=torch.int8)
    target = torch.full((100,), UNTOUCHED, dtype=torch.int8)
    arguments = (source, target, torch.tensor([run]), torch.tensor([base]))
    in_emulator(*arguments)
    assert (target == UNTOUCHED).all()
    with pytest.raises(ValueError, match="leaves"):
        RUNS["cpu"](*arguments)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({0: torch.zeros(8)}, "source is float32, needs int8"),
        ({1: torch.zeros(2, 4, dtype=torch.int8)}, "target has shape [2, 4], needs [any]"),
        ({1: torch.zeros(8, dtype=torch.int8)[::2]}, "target is not dense"),
        ({2: torch.zeros(3, 2, dtype=torch.int64)}, "runs has shape [3, 2], needs [3, 3]"),
        ({2: torch.zeros(3, 3, dtype=torch.int64).T}, "runs is not dense"),
        ({3: torch.zeros(3, dtype=torch.int64)}, "moves needs two dimensions"),
        ({3: None}, "source, target, runs and moves are needed"),
    ],
)
def test_the_error_names_the_bad_argument(change: dict[int, Any], says: str) -> None:
    pool = torch.zeros(8, dtype=torch.int8)
    arguments: list[Any] = [pool, pool.clone(), torch.zeros(1, 3).long(), torch.zeros(1, 2).long()]
    for at, value in change.items():
        arguments[at] = value
    with pytest.raises(RefusedError) as refused:
        in_emulator(*arguments)
    assert says in str(refused.value)


def test_the_error_names_a_bad_layout_or_request() -> None:
    layout = layout_of()
    for changes, says in (
        ({"order": ("block", "head", "layer", "kv", "dim")}, "order"),
        ({"layers": range(3, 3)}, "layers"),
        ({"heads": range(0, 4, 2)}, "heads"),
        ({"blocks": 0}, "blocks 0 is below 1"),
    ):
        with pytest.raises(ValueError, match=says):
            layout_of(**changes)
    with pytest.raises(ValueError, match="rows of 32 and 64 bytes"):
        plan(layout, layout_of(row_bytes=64))
    with pytest.raises(ValueError, match="0 rows"):
        plan(layout_of(heads=range(2)), layout_of(heads=range(2, 4)))
    with pytest.raises(ValueError, match="are not all in"):
        plan(layout, layout, Piece(0, range(5), range(4)))
    with pytest.raises(ValueError, match="hold 8 of the target's 16"):
        pieces([layout_of(heads=range(2))], layout, 0)
    made = plan(layout, layout)
    with pytest.raises(ValueError, match="source_blocks names block 12, the pool has 0"):
        moves(made, [12], [0], range(16))
    with pytest.raises(ValueError, match="target_blocks has 1 blocks of 16 tokens, token 16"):
        moves(made, [0, 1], [0], range(32))
    with pytest.raises(ValueError, match="do not begin at a multiple of 16"):
        moves(made, [0], [0], range(8, 16))


def test_the_operator_passes_opcheck() -> None:
    layout = layout_of()
    made = plan(layout, layout)
    pools = tags(layout, [0], 16), tags(layout, [], 0)
    at = moves(made, [0], [1], range(16))
    torch.library.opcheck(
        torch.ops.warmroute.copy_runs.default, (*map(as_bytes, pools), made.runs, at)
    )
