"""Tests of prompts: they are the same tokens every time and share exactly what their ids share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.live.client import DEFAULT_VOCABULARY, FIRST_TOKEN_ID, prompt_tokens

IDS = st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=6)


def test_prompt_tokens_never_change() -> None:
    """The tokens of a prompt never change: a change would make every recorded run incomparable."""
    assert prompt_tokens([0, 1], 4, 0, block_tokens=2).tolist() == [4535, 9465, 3110, 2053]


@given(ids=IDS, cut=st.integers(1, 64), serial=st.integers(0, 10**6), seed=st.integers(0, 1 << 70))
def test_the_same_request_has_the_same_tokens(
    ids: list[int], cut: int, serial: int, seed: int
) -> None:
    length = len(ids) * 64 - cut + 1
    first = prompt_tokens(ids, length, serial, 64, seed=seed)
    assert first.dtype == np.int32
    assert len(first) == length
    assert first.min() >= FIRST_TOKEN_ID
    assert first.max() < DEFAULT_VOCABULARY
    assert np.array_equal(first, prompt_tokens(ids, length, serial, 64, seed=seed))


@given(ids=IDS)
def test_a_partial_block_is_the_beginning_of_the_full_one(ids: list[int]) -> None:
    whole = prompt_tokens(ids, len(ids) * 512, 1)
    assert np.array_equal(prompt_tokens(ids, len(ids) * 512 - 100, 2), whole[:-100])


def test_prefixes_are_shared_up_to_the_first_different_id() -> None:
    one, two = prompt_tokens([5, 6, 7], 1536, 0), prompt_tokens([5, 6, 8], 1536, 1)
    assert np.array_equal(one[:1024], two[:1024])
    assert not np.array_equal(one[1024:1040], two[1024:1040])
    assert not np.array_equal(one, prompt_tokens([5, 6, 7], 1536, 0, seed=1))


def test_tails_without_an_id_are_private() -> None:
    one, two = prompt_tokens([5], 600, 0), prompt_tokens([5], 600, 1)
    assert np.array_equal(one[:512], two[:512])
    assert not np.array_equal(one[512:], two[512:])


def test_a_too_small_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        prompt_tokens([1], 10, 0, vocabulary=FIRST_TOKEN_ID)
