"""Arithmetic over columns: the native core, its twin and the policies' own formula agree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels import _native, column_twins
from policies.pricing import missing_tokens
from tests.effort import EFFORT

rows = st.integers(0, 40)
amounts = st.floats(0.0, 1e9)


@settings(max_examples=200 * EFFORT)
@given(
    hits=st.lists(st.one_of(st.integers(0, 5_000), st.sampled_from([0, 512, 4_096])), max_size=40),
    prompt_tokens=st.integers(1, 6_000),
)
def test_missing_tokens_agree_to_the_last_bit(hits: list[int], prompt_tokens: int) -> None:
    column = np.array(hits, dtype=np.int64)
    native = _native.missing_tokens(column, prompt_tokens).tolist()
    assert native == column_twins.missing_tokens(column, prompt_tokens).tolist()
    assert native == missing_tokens(column, prompt_tokens).tolist()


@settings(max_examples=200 * EFFORT)
@given(data=st.data(), size=rows, elapsed_s=st.floats(0.0, 1e3))
def test_queues_drain_alike(data: st.DataObject, size: int, elapsed_s: float) -> None:
    def column(values: st.SearchStrategy[float]) -> np.ndarray:
        return np.array(data.draw(st.lists(values, min_size=size, max_size=size)), dtype=float)

    rate, charged, drained = column(amounts), column(amounts), column(amounts)
    limit = column(st.one_of(amounts, st.just(np.inf)))
    twin = drained.copy()
    _native.drain_queues(drained, rate, charged, limit, elapsed_s)
    column_twins.drain_queues(twin, rate, charged, limit, elapsed_s)
    assert drained.tolist() == twin.tolist()


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
