"""Tests that plans of consecutive steps equal those that each step alone would get."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.ops import shared_decode as shared_plan
from kvkernels.ops import shared_runs as kept_tree
from kvkernels.ops.calibration import ALWAYS, NEVER
from kvkernels.ops.shared_costs import AttentionShape, Costs
from kvkernels.ops.shared_decode import (
    SharedPlan,
    SharedPlanner,
    Step,
    most_items,
    most_slots,
    plan_shared,
)
from tests.effort import examples

PAGE, PAGES = 4, 1 << 20
SHAPE = AttentionShape(8, 2, 64, layers=3)
# Costs of reading and partial results that are so close that the number of pieces decides.
CLOSE = Costs(0.0, 40.0, 0.0, 1500.0, 100.0)


@dataclass
class Batch:
    """Requests that decode, with their pages in the rows of a table. Lifetime: test."""

    page_ids: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    fresh: count[int] = field(default_factory=lambda: count(1))

    def join(self, like: int | None, common_pages: int, own_tokens: int) -> None:
        """Add a request that shares the first pages of the request `like`, or none if `like` is
        None.
        """
        shared = []
        if like is not None:
            shared = self.page_ids[like][: min(common_pages, self.lengths[like] // PAGE)]
        self.page_ids.append(list(shared))
        self.lengths.append(len(shared) * PAGE)
        self.grow(len(self.lengths) - 1, own_tokens)

    def grow(self, row: int, tokens: int) -> None:
        self.lengths[row] += tokens
        while len(self.page_ids[row]) * PAGE < self.lengths[row]:
            self.page_ids[row].append(next(self.fresh))

    def tables(self, wider: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = max([1, *map(len, self.page_ids)]) + wider
        table = torch.zeros(len(self.lengths), pages, dtype=torch.int32)
        for row, ids in enumerate(self.page_ids):
            table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return torch.tensor(self.lengths), table


def meaning(plan: SharedPlan) -> tuple[list[object], list[list[int]]]:
    """Return the items with their requests, and for each request the first tokens of its slots in
    order. The order of requests within a group does not matter.
    """
    members = plan.members.tolist()
    items, slots = list[object](), dict[int, tuple[int, int]]()
    for first, requests, begin, end, slot, *_ in plan.items[: int(plan.item_count)].tolist():
        rows = members[first : first + requests]
        items.append((sorted(rows), begin, end, slot >= 0))
        slots |= {slot + at: (row, begin) for at, row in enumerate(rows) if slot >= 0}
    merged, starts = list[list[int]](), plan.merge_starts.tolist()
    for row, (at, until) in enumerate(pairwise(starts)):
        own = [slots.pop(slot) for slot in plan.merge_slots[at:until].tolist()]
        assert {whose for whose, _ in own} <= {row}
        merged.append([begin for _, begin in own])
    assert not slots
    return sorted(items, key=str), merged


def same(made: Step, alone: Step) -> bool:
    return meaning(made.plan) == meaning(alone.plan) and made[1:] == alone[1:]


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data(), costs=st.sampled_from([ALWAYS, NEVER, CLOSE, Costs()]))
def test_a_steps_plan_does_not_depend_on_earlier_steps(data: st.DataObject, costs: Costs) -> None:
    """A step's plan does not depend on earlier steps, while tokens are added, pages fill, requests
    join, leave and are replaced, and pages pass to another request.
    """
    batch, planner = Batch(), SharedPlanner(PAGES, PAGE, SHAPE, costs)
    draw = data.draw
    batch.join(None, 0, draw(st.sampled_from([1, 70, 700, 2100])))
    for _ in range(draw(st.integers(0, 5))):
        like = draw(st.sampled_from([None, *range(len(batch.lengths))]))
        batch.join(like, draw(st.sampled_from([1, 17, 600])), draw(st.integers(1, 600)))
    for _ in range(12):
        rows = list(range(len(batch.lengths)))
        event = draw(st.sampled_from(["", "", "", "jump", "join", "leave", "page", "pause"]))
        if event == "jump":
            batch.grow(draw(st.sampled_from(rows)), draw(st.sampled_from([3, 4, 255, 512])))
        elif event == "join":
            batch.join(draw(st.sampled_from(rows)), draw(st.integers(0, 600)), 1)
        elif event == "leave" and len(rows) > 1:
            row = draw(st.sampled_from(rows))
            del batch.page_ids[row], batch.lengths[row]
        elif event == "page":  # equal blocks become one, also the one that fills now
            row, other = draw(st.sampled_from(rows)), draw(st.sampled_from(rows))
            at = draw(st.sampled_from([0, 1, -1]))
            at = at if at >= 0 else batch.lengths[row] // PAGE
            if at < min(len(batch.page_ids[row]), len(batch.page_ids[other])):
                batch.page_ids[row][at] = batch.page_ids[other][at]
        if event != "pause":
            for row in range(len(batch.lengths)):
                batch.grow(row, 1)
        context, table = batch.tables(wider=draw(st.integers(0, 2)))
        room = None
        if draw(st.booleans()):
            size = len(context), int(context.sum())
            room = most_items(*size), most_slots(*size)
        made = planner.step(context, table, room)
        assert same(made, plan_shared(context, table, PAGES, PAGE, SHAPE, costs, room))


@pytest.mark.parametrize("costs", [ALWAYS, CLOSE])
@pytest.mark.parametrize(("begin", "steps"), [(900, 130), (1990, 70), (2520, 50)])
def test_plans_are_right_for_every_length_in_turn(begin: int, steps: int, costs: Costs) -> None:
    """Plans stay right for every length in turn, with all changes of pages, pieces and chunks."""
    batch, planner = Batch(), SharedPlanner(PAGES, PAGE, SHAPE, costs)
    batch.join(None, 0, begin)
    for common in (225, 225, 100):
        batch.join(0, common, 1)
    for _ in range(steps):
        for row in range(4):
            batch.grow(row, 1)
        context, table = batch.tables(wider=0)
        alone = plan_shared(context, table, PAGES, PAGE, SHAPE, costs)
        assert same(planner.step(context, table), alone)


def test_a_page_of_two_requests_is_shared_once_full() -> None:
    """A page that two requests name is shared once it is full; before that each reads its
    own part.
    """
    batch, planner = Batch(), SharedPlanner(PAGES, PAGE, SHAPE, ALWAYS)
    batch.join(None, 0, 400)
    batch.join(0, 100, 1)
    batch.grow(0, 1)
    batch.page_ids[1][100] = batch.page_ids[0][100]
    for step in range(8):
        context, table = batch.tables(wider=0)
        made = planner.step(context, table)
        assert same(made, plan_shared(context, table, PAGES, PAGE, SHAPE, ALWAYS))
        saved = made.saving.kv_bytes_saved // SHAPE.token_bytes // SHAPE.layers
        assert saved == (400 if step < 3 else 404)
        for row in range(2):
            batch.grow(row, 1)


def test_another_request_with_fewer_tokens_gets_a_new_plan() -> None:
    """Another request with fewer tokens in the same pages gets a new plan: 257 tokens are two
    pieces, and 256 are one.
    """
    planner, table = SharedPlanner(PAGES, PAGE, SHAPE, ALWAYS), torch.arange(65)[None].int()
    for length, pieces in ((257, 2), (256, 1)):
        made = planner.step(torch.tensor([length]), table)
        assert int(made.plan.item_count) == pieces


def test_the_planner_does_not_repeat_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner does not repeat its work: it builds one tree per batch, and chooses again when
    pieces change, not when pages fill.
    """
    made = {"tree": 0, "choice": 0}

    def counted(name: str, module: object, attribute: str) -> None:
        original = getattr(module, attribute)

        def call(*arguments: object) -> object:
            made[name] += 1
            return original(*arguments)

        monkeypatch.setattr(module, attribute, call)

    counted("tree", kept_tree, "prefix_tree")
    counted("choice", shared_plan, "Chooser")
    batch, planner = Batch(), SharedPlanner(PAGES, PAGE, SHAPE, ALWAYS)
    batch.join(None, 0, 400)
    batch.join(0, 100, 10)
    for _ in range(200):
        for row in range(2):
            batch.grow(row, 1)
        planner.step(*batch.tables(wider=0))
    assert made["tree"] == 1
    assert made["choice"] == 3  # the first, and for the third piece of each, from token 513 on
