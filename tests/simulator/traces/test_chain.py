"""Tests of the way from a source's ids to the hashes of an engine's blocks: equal prefixes, and
only those, get equal names.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.traces.job import Job
from simulator.workloads.open import Chainer, TraceError
from tests.effort import examples


def job(prompt_tokens: int, ids: list[int], answer: tuple[int, ...] = (), output: int = 1) -> Job:
    return Job(
        0,
        prompt_tokens,
        output,
        np.array(ids, dtype=np.uint64),
        np.array(answer, dtype=np.uint64),
    )


def names(chainer: Chainer, one: Job, serial: int = 0) -> list[int]:
    chain = chainer.chain(one, serial)
    assert chain.dtype == np.uint64
    return [int(value) for value in chain]


def test_equal_block_sizes_give_one_name_per_full_block() -> None:
    chainer = Chainer(512, 512)
    listed, full_only = job(1300, [1, 2, 3]), job(1300, [1, 2])
    assert len(names(chainer, listed)) == 2
    assert names(chainer, listed) == names(chainer, full_only)
    assert 1 not in names(chainer, listed)


def test_names_of_an_answer_are_those_of_the_next_turn() -> None:
    first = job(1300, [1, 2, 3], answer=(4, 5), output=800)
    second = job(2200, [1, 2, 4, 5, 6])
    for engine in (512, 1024, 64, 256):
        chainer = Chainer(512, engine)
        before, after = names(chainer, first), names(chainer, second, 1)
        assert len(before) == 2048 // engine
        assert before == after[: len(before)]


def test_smaller_blocks_cover_the_whole_prompt() -> None:
    chainer = Chainer(512, 64)
    one = names(chainer, job(1300, [1, 2, 3]))
    assert len(one) == 1300 // 64
    assert len(set(one)) == len(one)
    full_only = names(chainer, job(1300, [1, 2]))
    assert full_only[:16] == one[:16]
    assert set(full_only[16:]).isdisjoint(one)
    assert names(chainer, job(1300, [1, 2]), serial=1)[16:] != full_only[16:]


@pytest.mark.parametrize("step", [1, 512, 1 << 22, 1 << 32])
def test_derived_names_do_not_collide(step: int) -> None:
    """Names derived from the ids that sources have do not collide, whether ids are consecutive or
    numbered by part and block.
    """
    chainer = Chainer(512, 16)
    many = job(512 * 20_000, [step * i for i in range(20_000)])
    chain = chainer.chain(many, 0)
    assert len(np.unique(chain)) == len(chain) == 640_000
    low = np.bincount((chain & np.uint64(0xFFF)).astype(np.int64), minlength=4096)
    assert low.max() < 2 * low.mean()  # tables that index by low bits stay even


def test_larger_blocks_are_every_kth_id() -> None:
    chainer = Chainer(512, 1024)
    finer = names(Chainer(512, 512), job(2600, [1, 2, 3, 4, 5]))
    assert names(chainer, job(2600, [1, 2, 3, 4, 5])) == [finer[1], finer[3]]


@pytest.mark.parametrize("engine", [256, 512, 1024])
def test_an_id_used_twice_behind_different_prefixes_gets_two_names(engine: int) -> None:
    chainer = Chainer(512, engine)
    one, other = (names(chainer, job(2048, [first, 8, 9, 10])) for first in (1, 2))
    assert set(one).isdisjoint(other)


def test_without_ids_every_block_is_private() -> None:
    chainer = Chainer(16, 64)
    seen = [name for serial in range(50) for name in names(chainer, job(1000, []), serial)]
    assert len(seen) == len(set(seen)) == 50 * 15


@pytest.mark.parametrize(("source", "engine"), [(512, 48), (64, 100), (0, 16), (16, 0)])
def test_block_sizes_that_do_not_divide_are_refused(source: int, engine: int) -> None:
    with pytest.raises(TraceError, match="block size"):
        Chainer(source, engine)


@settings(max_examples=examples(100), deadline=None)
@given(
    data=st.data(),
    source=st.sampled_from([4, 8]),
    engine=st.sampled_from([1, 2, 4, 8, 16, 24]),
)
def test_names_are_equal_exactly_where_texts_agree(
    data: st.DataObject, source: int, engine: int
) -> None:
    """Names are equal exactly where the texts agree; prompts are lists of tokens with an id for
    each distinct prefix of full blocks.
    """
    texts = data.draw(st.lists(st.text("ab", min_size=1, max_size=80), min_size=2, max_size=6))
    ids: dict[str, int] = {}
    jobs = []
    for text in texts:
        ends = range(source, len(text) + 1, source)
        jobs.append(job(len(text), [ids.setdefault(text[:end], len(ids)) for end in ends]))
    chainer = Chainer(source, engine)
    chains = [names(chainer, one, serial) for serial, one in enumerate(jobs)]
    for text, chain in zip(texts, chains, strict=True):
        assert len(chain) == len(text) // engine
        for other_text, other in zip(texts, chains, strict=True):
            if chain is other:
                continue
            for index in range(min(len(chain), len(other))):
                end = (index + 1) * engine
                # Tokens beyond the last full block of the source are shared with no other prompt.
                told = end <= len(text) // source * source and end <= len(other_text)
                told = told and end <= len(other_text) // source * source
                covers = -(-end // source) * source  # the id that names this block's tokens
                same = text[:covers] == other_text[:covers] if told else False
                assert (chain[index] == other[index]) == same
