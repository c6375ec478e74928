"""Tests that the native arithmetic over columns of worker data, its Python version and the
policies' own formulas agree.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels import _native
from policies.arrays import median
from policies.pick import pick
from policies.pricing import missing_tokens
from tests.effort import examples
from tests.oracles import columns as column_twins

rows = st.integers(0, 40)
amounts = st.floats(0.0, 1e9)


@settings(max_examples=examples(200))
@given(
    hits=st.lists(st.one_of(st.integers(0, 5_000), st.sampled_from([0, 512, 4_096])), max_size=40),
    prompt_tokens=st.integers(1, 6_000),
)
def test_native_and_python_missing_tokens_are_equal(hits: list[int], prompt_tokens: int) -> None:
    column = np.array(hits, dtype=np.int64)
    native = _native.missing_tokens(column, prompt_tokens).tolist()
    assert native == column_twins.missing_tokens(column, prompt_tokens).tolist()
    assert native == missing_tokens(column, prompt_tokens).tolist()


@settings(max_examples=examples(200))
@given(data=st.data(), size=rows, elapsed_s=st.floats(0.0, 1e3))
def test_native_and_python_queues_drain_equally(
    data: st.DataObject, size: int, elapsed_s: float
) -> None:
    def column(values: st.SearchStrategy[float]) -> np.ndarray:
        return np.array(data.draw(st.lists(values, min_size=size, max_size=size)), dtype=float)

    rate, charged, drained = column(amounts), column(amounts), column(amounts)
    limit = column(st.one_of(amounts, st.just(np.inf)))
    twin = drained.copy()
    _native.drain_queues(drained, rate, charged, limit, elapsed_s)
    column_twins.drain_queues(twin, rate, charged, limit, elapsed_s)
    assert drained.tolist() == twin.tolist()


@st.composite
def slots_and_columns(draw: st.DrawFn, columns: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draw rows in any order, and `columns` columns that have these rows."""
    workers = draw(st.integers(1, 24))
    rows = st.lists(st.integers(0, workers - 1), max_size=workers)
    column = st.lists(st.floats(1e-3, 1e9), min_size=workers, max_size=workers)
    made = [np.array(draw(column)) for _ in range(columns)]
    return np.array(draw(rows), dtype=np.int64), made


@settings(max_examples=examples(200))
@given(made=slots_and_columns(2), odd=st.sampled_from((0.0, np.inf, np.nan, None)))
def test_native_and_python_medians_of_products_are_equal(
    made: tuple[np.ndarray, list[np.ndarray]], odd: float | None
) -> None:
    slots, (a, b) = made
    if odd is not None:
        a[0] = odd
    native = _native.median_product(a, b, slots)
    assert repr(native) == repr(column_twins.median_product(a, b, slots))
    assert repr(native) == repr(float(median((a * b)[slots])))


@settings(max_examples=examples(200))
@given(made=slots_and_columns(4), step_tokens=st.floats(0.0, 1e4), worked=st.booleans())
def test_native_and_python_loads_are_equal_to_the_last_bit(
    made: tuple[np.ndarray, list[np.ndarray]], step_tokens: float, worked: bool
) -> None:
    slots, (charged, drained, work, requests) = made
    counts = requests.astype(np.int64)
    given_work = work if worked else None
    native = _native.load_tokens(charged, drained, given_work, counts, slots, step_tokens)
    twin = column_twins.load_tokens(charged, drained, given_work, counts, slots, step_tokens)
    assert native.tolist() == twin.tolist()


@settings(max_examples=examples(200))
@given(data=st.data(), block_size=st.integers(1, 512), most=st.integers(0, 100_000))
def test_native_and_python_hit_tokens_are_equal(
    data: st.DataObject, block_size: int, most: int
) -> None:
    blocks = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=24))
    slots = data.draw(st.lists(st.integers(0, len(blocks) - 1), max_size=24))
    arguments = (np.array(blocks, np.int32), np.array(slots, np.int64), block_size, most)
    native = _native.hit_tokens(*arguments)
    assert native.dtype == np.int64
    assert native.tolist() == column_twins.hit_tokens(*arguments).tolist()
    assert native.tolist() == [min(blocks[slot] * block_size, most) for slot in slots]


near = st.sampled_from([1.0, 1.0 + 5e-10, 1.0 + 1e-9, 1.0 + 2e-9, -3.0, 0.0, 1e12, 1e12 + 500.0])


@settings(max_examples=examples(400))
@given(
    costs=st.lists(st.one_of(near, st.floats(-1e9, 1e9), st.just(np.inf)), max_size=16),
    draw=st.floats(0.0, 1.0, exclude_max=True),
)
def test_the_cheapest_row_equals_the_policies_choice(costs: list[float], draw: float) -> None:
    column = np.array(costs, dtype=float)
    row = pick(column, draw)
    assert _native.cheapest(column, draw) == column_twins.cheapest(column, draw) == row


@pytest.mark.parametrize("module", [_native, column_twins])
def test_invalid_rows_and_costs_are_refused(module: Any) -> None:
    column, counts = np.zeros(3), np.zeros(3, np.int64)
    for beyond in (-1, 3):
        slots = np.array([0, beyond])
        with pytest.raises(ValueError, match="slots must lie within the columns"):
            module.median_product(column, column, slots)
        with pytest.raises(ValueError, match="slots must lie within the columns"):
            module.load_tokens(column, column, None, counts, slots, 1.0)
        with pytest.raises(ValueError, match="slots must lie within the columns"):
            module.hit_tokens(np.zeros(3, np.int32), slots, 16, 1)
    with pytest.raises(ValueError, match="slots must lie within the columns"):
        module.load_tokens(column, column, column[:1], counts, np.array([2]), 1.0)
    for bad in (np.nan, -np.inf):
        with pytest.raises(ValueError, match=r"a cost is finite or \+inf"):
            module.cheapest(np.array([1.0, bad]), 0.0)
    for bad in (-0.1, 1.0, np.nan):
        with pytest.raises(ValueError, match=r"draw must be in \[0, 1\)"):
            module.cheapest(column, bad)


def test_wrong_columns_are_refused() -> None:
    column = np.zeros(3)
    with pytest.raises(ValueError, match="the same length"):
        _native.drain_queues(column, np.zeros(2), column, column, 1.0)
    with pytest.raises(TypeError, match="rate must be a buffer of float64"):
        _native.drain_queues(column, np.zeros(3, np.float32), column, column, 1.0)
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="drained must be writable"):
        _native.drain_queues(frozen, column, column, column, 1.0)
    with pytest.raises(TypeError, match="hit_tokens must be a buffer of int64"):
        _native.missing_tokens(column, 5)


@settings(max_examples=examples(200))
@given(made=slots_and_columns(2), times=st.floats(0.5, 2.0), odd=st.sampled_from((np.inf, np.nan)))
def test_sums_are_rounded_as_in_numpy(
    made: tuple[np.ndarray, list[np.ndarray]], times: float, odd: float
) -> None:
    slots, (a, b) = made
    a[0] = odd
    slots = np.resize(slots, 300 if len(slots) else 0)  # more than one block of numpy's sums
    for rows in (slots, slots[:7], slots[:100]):
        alike = (
            (_native.sum_of(a, rows), column_twins.sum_of(a, rows)),
            (_native.sum_of(b, rows), column_twins.sum_of(b, rows)),
            (
                _native.sum_of_least(a, times, b, rows),
                column_twins.sum_of_least(a, times, b, rows),
            ),
        )
        for native, twin in alike:
            assert native == twin or np.isnan([native, twin]).all()
    for module in (_native, column_twins):
        with pytest.raises(ValueError, match="slots must lie within"):
            module.sum_of(a, np.array([len(a)]))


@settings(max_examples=examples(200))
@given(hits=st.lists(st.integers(0, 40), min_size=1, max_size=20))
def test_native_and_python_leaders_and_margins_are_equal(hits: list[int]) -> None:
    column = np.array(hits)
    assert _native.leading(column) == column_twins.leading(column)
    for module in (_native, column_twins):
        with pytest.raises(ValueError, match="hit_tokens must not be empty"):
            module.leading(np.zeros(0, dtype=np.int64))
