"""Tests that an answer decoded from its middle on equals the rest of the text, for every kind of
tokenizer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.hf import HfTokenizer
from tests.effort import examples
from tests.engine.model_dirs import KINDS, write_model


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory) -> HfTokenizer:
    directory: Path = tmp_path_factory.mktemp(request.param)
    return HfTokenizer(write_model(directory, request.param))


IDS = st.lists(st.integers(0, 599), min_size=1, max_size=40)


@given(prompt=IDS, said=IDS, cut=st.integers(0, 40))
@settings(max_examples=examples(60))
def test_a_stream_resumed_after_any_text_continues_the_same(
    tokenizer: HfTokenizer, prompt: list[int], said: list[int], cut: int
) -> None:
    prompt, said = ([n % tokenizer.vocab for n in ids] for ids in (prompt, said))
    whole = [*map(tokenizer.stream(prompt).step, said)]
    cut = min(cut, len(said))
    while cut and not whole[cut - 1]:  # half a character, which is sent again
        cut -= 1
    rest = [*map(tokenizer.stream([*prompt, *said[:cut]]).step, said[cut:])]
    assert rest == whole[cut:]
