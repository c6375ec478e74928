"""Tests of shared decode's plan against brute force: which prefixes it shares, what that saves, and
what it costs.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.ops.calibration import ALWAYS, NEVER
from kvkernels.ops.shared_costs import AttentionShape, Costs, Work, fit, padded_rows
from kvkernels.ops.shared_decode import SharedPlan, Step, most_items, most_slots, plan_shared, words
from kvkernels.ops.shared_runs import LARGEST_CHUNK, LEAST_CHUNK, LEVELS, chunks_of, prefix_tree
from tests.effort import examples
from tests.kernels.shared_cases import Request, Tables, tables

SHAPE = AttentionShape(8, 2, 64, layers=3)
PAGE = 16
REQUESTS = st.lists(
    st.builds(
        Request,
        st.lists(st.sampled_from(["a", "b", "c" * 9, "d" * 40]), max_size=6).map("".join),
        st.integers(0, 400),
    ),
    min_size=1,
    max_size=9,
)
COSTS = st.builds(Costs, *[st.sampled_from([0.0, 1.0, 233.0, 5000.0])] * 5, sharing=st.just(0.0))


def step_of(requests: list[Request], costs: Costs = ALWAYS, shape: AttentionShape = SHAPE) -> Step:
    return plan_shared(*tables(requests, PAGE)[:3], PAGE, shape, costs)


def items_of(plan: SharedPlan) -> list[list[int]]:
    return plan.items[: int(plan.item_count), :5].tolist()  # type: ignore[no-any-return]


def prefixes(made: Tables) -> dict[tuple[int, ...], set[int]]:
    """Return every prefix of full pages that at least two requests have, with its requests. Of
    prefixes with the same requests only the longest counts.
    """
    owners: dict[tuple[int, ...], set[int]] = {}
    for row, length in enumerate(made.context_tokens.tolist()):
        pages = made.page_table[row, : length // PAGE].tolist()
        for count in range(1, len(pages) + 1):
            owners.setdefault(tuple(pages[:count]), set()).add(row)
    longest = {frozenset(rows): prefix for prefix, rows in owners.items() if len(rows) > 1}
    return {prefix: set(rows) for rows, prefix in longest.items()}  # later ones are longer


@settings(deadline=None)
@given(REQUESTS, COSTS, st.sampled_from([1, 4, 16]))
def test_a_plan_covers_every_token_of_every_request_once(
    requests: list[Request], costs: Costs, group: int
) -> None:
    made = tables(requests, PAGE)
    shape = AttentionShape(2 * group, 2, 64)
    plan = plan_shared(*made[:3], PAGE, shape, costs).plan
    assert sorted(plan.members.tolist()) == list(range(len(requests)))
    seen: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(len(requests))}
    for first, count, begin, end, slot in items_of(plan):
        rows = plan.members[first : first + count].tolist()
        assert len(rows) == count <= shape.requests_of_item
        assert begin % PAGE == 0
        for number, row in enumerate(rows):
            seen[row].append((begin, end, slot + number if slot >= 0 else -1))
            if count > 1:  # whole pages, the same for all
                assert end % PAGE == 0
                pages = made.page_table[[row, rows[0]], begin // PAGE : end // PAGE]
                assert torch.equal(*pages)
        assert count == 1 or slot >= 0
    used = []
    for row, length in enumerate(made.context_tokens.tolist()):
        parts = sorted(seen[row])
        assert parts[0][0] == 0
        assert parts[-1][1] == length
        assert all(a[1] == b[0] for a, b in pairwise(parts))
        begin, end = plan.merge_starts[row : row + 2].tolist()
        slots = plan.merge_slots[begin:end].tolist()
        if parts[0][2] < 0:
            assert len(parts) == 1
            assert slots == []
        else:
            assert slots == [slot for _, _, slot in parts]
        used += slots
    assert sorted(used) == list(range(len(plan.merge_slots)))


@settings(deadline=None)
@given(REQUESTS)
def test_groups_and_bytes_equal_those_of_brute_force(requests: list[Request]) -> None:
    """If only bytes cost time, every shared prefix is read exactly once, as brute force finds."""
    made = tables(requests, PAGE)
    step = step_of(requests)
    known = prefixes(made)
    twice = 0
    for prefix, rows in known.items():
        above = max((len(p) for p in known if len(p) < len(prefix) and prefix[: len(p)] == p),
                    default=0)  # fmt: skip
        twice += (len(prefix) - above) * PAGE * (len(rows) - 1)
    assert step.saving.shared_prefix_groups == len(known)
    assert step.saving.kv_bytes_saved == twice * SHAPE.token_bytes * SHAPE.layers
    read = sum(end - begin for _, _, begin, end, _ in items_of(step.plan))
    assert read == int(made.context_tokens.sum()) - twice
    assert step.work.first_bytes == read * SHAPE.token_bytes
    assert step.work.repeated_bytes == 0


def cost_of(made: Tables, shared: tuple[tuple[int, ...], ...], costs: Costs) -> float:
    """Return the cost of a plan that shares exactly these prefixes, by the definition of `Work` and
    without its code.
    """
    runs: dict[tuple[tuple[int, ...], int], set[int]] = {}  # (prefix, begin): whose
    for row, length in enumerate(made.context_tokens.tolist()):
        pages = tuple(made.page_table[row, : length // PAGE].tolist())
        ends = sorted(len(p) for p in shared if pages[: len(p)] == p)
        for begin, end in zip([0, *ends], ends, strict=False):
            runs.setdefault((pages[:end], begin * PAGE), set()).add(row)
        done = ends[-1] * PAGE if ends else 0
        runs[((-1 - row, length), done)] = {row}
    total = [0] * 5
    for (prefix, begin), rows in runs.items():
        end = prefix[1] if prefix[:1] and prefix[0] < 0 else len(prefix) * PAGE
        tokens = end - begin
        chunk = min(max(-(-tokens // 512) * 64, 256), 1024)
        pieces = -(-tokens // chunk)
        most = 128 // SHAPE.group
        tiles = [min(most, len(rows) - at) for at in range(0, len(rows), most)]
        total[1] += tokens * SHAPE.token_bytes * len(tiles)
        for count in tiles:
            computed = int(padded_rows(np.array(count * SHAPE.group)))
            total[2] += 4 * 64 * SHAPE.kv_heads * tokens * computed
        is_whole = begin == 0 and pieces <= 1 and len(rows) == 1
        total[3] += 0 if is_whole else 8 * SHAPE.heads * 65 * len(rows) * pieces
        total[4] += pieces * len(tiles) * SHAPE.kv_heads
    return costs.of(Work(*total))


@settings(max_examples=examples(60), deadline=None)
@given(REQUESTS, COSTS)
def test_the_chosen_plan_is_the_cheapest(requests: list[Request], costs: Costs) -> None:
    """The choice is the cheapest among all subsets of prefixes, and never costs more than plain
    decode.
    """
    made = tables([one._replace(own=max(one.own, 1)) for one in requests], PAGE)
    known = sorted(prefixes(made))[:6]
    if len(prefixes(made)) > 6:
        return
    step = plan_shared(*made[:3], PAGE, SHAPE, costs)
    even = costs._replace(first_mb=costs.repeated_mb)  # first reads are the same for all
    subsets = [s for count in range(len(known) + 1) for s in combinations(known, count)]
    best = min(cost_of(made, subset, even) for subset in subsets)
    assert even.of(step.work) == pytest.approx(best, rel=1e-9)
    assert step.saving.plan_ns <= step.saving.plain_ns * (1 + 1e-12)
    plain_repeated = step.saving.plain_ns - costs.of(step.work) + even.of(step.work)
    assert plain_repeated == pytest.approx(cost_of(made, (), even), rel=1e-9)


def test_default_costs_share_only_where_sharing_pays() -> None:
    """The default costs share a long prefix of many requests, and not a short one of two, as the
    prediction says.
    """
    many = [Request("p" * 256, 256)] * 32
    assert step_of(many, Costs(), AttentionShape(32, 8, 128)).saving.shared_prefix_groups == 1
    few = [Request("p", 2000)] * 2
    assert step_of(few, Costs(), AttentionShape(32, 8, 128)).saving.shared_prefix_groups == 0


def test_requests_that_share_nothing_are_cut_by_their_own_length() -> None:
    requests = [Request("abc", 3000), Request("abc", 10), Request("x", 0), Request("", 0)]
    made = tables(requests, PAGE)
    for costs, own in ((NEVER, requests), (ALWAYS, requests[1:])):
        made = tables(own, PAGE)
        plan = plan_shared(*made[:3], PAGE, SHAPE, costs).plan
        planned = sorted([int(plan.members[i[0]]), i[2], i[3], i[4] >= 0] for i in items_of(plan))
        assert planned == [
            [row, begin, min(begin + chunk, tokens), chunk < tokens]
            for row, tokens in enumerate(made.context_tokens.tolist())
            for chunk in [int(chunks_of(np.array(tokens)))]
            for begin in range(0, max(tokens, 1), chunk)
        ]


def test_the_piece_size_is_an_eighth_of_a_run_within_bounds() -> None:
    tokens = np.array([0, 1, 256, 257, 2048, 2049, 4096, 8192, 100_000])
    wanted = [LEAST_CHUNK] * 5 + [320, 512, LARGEST_CHUNK, LARGEST_CHUNK]
    assert chunks_of(tokens).tolist() == wanted


def test_a_tree_that_is_too_deep_is_cut_off() -> None:
    """A tree of prefixes that is deeper than the plan considers is cut off: each request reads the
    remaining levels for itself.
    """
    names = "abcdefghijklmnop"
    requests = [Request(names[: level + 1], 40) for level in range(len(names))]
    made = tables(requests, PAGE)
    tree = prefix_tree(made.page_table.numpy(), made.context_tokens.numpy() // PAGE)
    assert int(tree.depth.max()) == LEVELS
    assert step_of(requests).saving.shared_prefix_groups == LEVELS


def test_a_plan_that_needs_too_many_slots_shares_nothing() -> None:
    """A plan that would need more slots for partial results than there are shares nothing: eight
    levels of 2,048 tokens need 65 slots a request, and 40 are available.
    """
    levels = ["".join(name * 128 for name in "abcdefgh"[:depth]) for depth in range(9)]
    for requests in (levels[1:] + levels[-1:] * 20, levels[7:] * 5):
        made = tables([Request(names, 1) for names in requests], PAGE)
        step = plan_shared(*made[:3], PAGE, SHAPE, ALWAYS)
        counted = most_slots(len(requests), int(made.context_tokens.sum()))
        assert len(step.plan.merge_slots) <= counted
        assert bool(step.saving.shared_prefix_groups) == (len(requests) == 10)


def test_a_page_that_only_some_requests_have_filled_is_not_shared() -> None:
    made = tables([Request("a", 16), Request("a", 9), Request("a", 16)], PAGE)
    made.page_table[:, 1] = made.page_table[0, 1]
    step = plan_shared(*made[:3], PAGE, SHAPE, ALWAYS)
    shared = {(i[1], i[2], i[3]) for i in items_of(step.plan) if i[1] > 1}
    assert shared == {(3, 0, 16), (2, 16, 32)}


def test_plans_fit_into_fixed_buffers() -> None:
    requests = [Request("a" * 30, 5)] * 4
    made = tables(requests, PAGE)
    tokens = int(made.context_tokens.sum())
    room = most_items(4, tokens), most_slots(4, tokens)
    step = plan_shared(*made[:3], PAGE, SHAPE, ALWAYS, room)
    assert step.saving.shared_prefix_groups == 1
    assert len(step.plan.all) == words(4, *room)
    assert (len(step.plan.items), len(step.plan.merge_slots)) == room
    needed = int(plan_shared(*made[:3], PAGE, SHAPE, NEVER).plan.item_count)
    tight = plan_shared(*made[:3], PAGE, SHAPE, ALWAYS, (needed, needed))
    assert tight.saving[:2] == (0, 0)
    assert tight.saving.plan_ns == pytest.approx(tight.saving.plain_ns)
    with pytest.raises(ValueError, match=r"8 items, 8 slots do not fit into a plan of \(7, 8\)"):
        plan_shared(*made[:3], PAGE, SHAPE, ALWAYS, (7, 8))


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=20))
def test_the_room_of_fixed_buffers_is_enough(lengths: list[int]) -> None:
    table = torch.zeros(len(lengths), 1250, dtype=torch.int32)
    room = most_items(len(lengths), sum(lengths)), most_slots(len(lengths), sum(lengths))
    plan_shared(torch.tensor(lengths), table, 1, PAGE, SHAPE, NEVER, room)


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
def test_the_error_names_the_bad_table_entry(
    context: list[int], table: list[list[int]], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        plan_shared(torch.tensor(context), torch.tensor(table), 4, PAGE, SHAPE)


def test_pages_beyond_the_context_are_ignored() -> None:
    plan = plan_shared(torch.tensor([16]), torch.tensor([[3, 99]]), 4, PAGE, SHAPE).plan
    assert plan.item_count == 1


def test_all_tensors_of_a_plan_are_moved() -> None:
    plan = step_of([Request("ab", 5), Request("ab", 6)]).plan
    for ours, theirs in zip(plan, plan.on("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def test_the_fit_recovers_the_costs() -> None:
    """The fit recovers the costs from times that the model itself makes, and gives no negative cost
    for random times.
    """
    draw = np.random.default_rng(3)
    works = [Work(*(int(x) for x in draw.integers(1, 10**9, 4)), int(draw.integers(1, 10**4)))
             for _ in range(20)]  # fmt: skip
    true = Costs(250.0, 120.0, 3000.0, 90.0, 11.0)
    assert fit(works, [true.of(work) for work in works]) == pytest.approx(true, rel=1e-6)
    noisy = fit(works, draw.uniform(1.0, 2.0, 20).tolist())
    assert min(noisy) >= 0
    with pytest.raises(ValueError, match="4 plans and 4 times"):
        fit(works[:4], [1.0] * 4)
    with pytest.raises(ValueError, match="above 0"):
        fit(works, [0.0] * 20)
