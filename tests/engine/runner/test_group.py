"""Tests of a model that several processes compute together: its tokens, and the end of
one process.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model.batch import FlatBatch, Piece, flat_batch
from engine.model.kv_cache import KvCache
from engine.model.tiny import TinySettings, make_tiny
from engine.runner.group import Group, GroupLost
from engine.runner.needs import StepSettings
from engine.runner.ranks import RankSpec, batch_bytes, read_batch
from engine.runner.runner import MAX_FAILED_STEPS, EngineFailed
from tests.engine import real
from tests.engine.real import Reference, computing
from tests.engine.tiny_models import loaded, some_ids, written
from tests.frozen import freeze
from tests.oracles.block_pool import check_pool

BLOCKS, BLOCK_SIZE = 12, 8
IDS = some_ids(40)


def spec(folder: Path, tp_size: int, pp_size: int, dtype: str = "float64") -> RankSpec:
    return RankSpec(
        str(folder), 0, tp_size, pp_size, "cpu", dtype, 64, BLOCKS, BLOCK_SIZE, 0, threads=1
    )


@contextmanager
def group(folder: Path, tp_size: int, pp_size: int, dtype: str = "float64") -> Iterator[Group]:
    made = Group(spec(folder, tp_size, pp_size, dtype))
    try:
        yield made
    finally:
        made.close()


def steps() -> list[list[Piece]]:
    """Return batches: a prompt in two chunks next to another prompt, a step that samples nothing,
    then decodes.
    """
    first, second = (0, 2, 4, 6), (1, 3, 5)
    return [
        [Piece(IDS[:9], 0, first, wants_logits=False), Piece(IDS[5:17], 0, second)],
        [Piece(IDS[9:15], 9, first, wants_logits=False)],
        [Piece(IDS[15:20], 15, first), Piece(IDS[17:18], 12, second)],
        [Piece(IDS[20:21], 20, first), Piece(IDS[18:19], 13, second)],
    ]


@pytest.mark.parametrize(
    ("tp_size", "pp_size"),
    # The worker's tests below use stages, too.
    [(2, 1), *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((1, 2), (2, 2)))],
)
def test_a_group_of_processes_gives_the_logits_of_the_full_model(
    tp_size: int, pp_size: int, tmp_path: Path
) -> None:
    """A group of processes gives the logits of the whole model, even if all steps begin before the
    first has ended. Stages then work on several steps at a time, one of which samples nothing.
    """
    folder = written(tmp_path, TinySettings("qwen3"))
    model = loaded(folder)
    kv = KvCache(model.config, BLOCKS, BLOCK_SIZE, dtype=torch.float64)
    batches = [flat_batch(pieces, BLOCK_SIZE) for pieces in steps()]
    with group(folder, tp_size, pp_size) as ranks:
        one_by_one = [ranks.logits(batch) for batch in batches]
        for batch, logits in zip(batches, one_by_one, strict=True):
            torch.testing.assert_close(logits, model.forward(batch, kv), rtol=0, atol=1e-10)
        if pp_size > 1:
            ends = [ranks.begin(batch) for batch in batches]
            for end, logits in zip(ends, one_by_one, strict=True):
                assert torch.equal(end(), logits)


def test_a_row_has_the_same_bits_alone_and_a_lost_rank_fails_every_step(tmp_path: Path) -> None:
    folder = written(tmp_path, TinySettings("llama"))
    with group(folder, 2, 1, "float32") as ranks:
        together = [ranks.logits(flat_batch(pieces, BLOCK_SIZE)) for pieces in steps()]
        alone = [
            ranks.logits(flat_batch([piece], BLOCK_SIZE)) for pieces in steps() for piece in pieces
        ]
        assert torch.equal(torch.cat(together), torch.cat(alone))
        (other,) = ranks._others
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        for _ in range(2):
            with pytest.raises(GroupLost):
                ranks.logits(flat_batch(steps()[0], BLOCK_SIZE))


async def test_a_worker_of_two_ranks_serves_the_models_tokens(tmp_path: Path) -> None:
    """A worker of two ranks gives the model's tokens. When one rank is killed, the worker answers
    all requests and ends.
    """
    make_tiny(tmp_path)
    expected = Reference(tmp_path).greedy(list(range(30, 60)), 12)
    model = real.loaded(tmp_path, ranks=(2, 1))
    body = {"prompt": list(range(30, 60)), "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}

    async def serve_until_it_fails() -> None:
        async with computing(model) as worker:
            status, answer = await worker.post("/v1/completions", body)
            assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
            assert isinstance(model.model, Group)
            (other,) = model.model._others
            os.kill(other.pid, signal.SIGKILL)
            for _ in range(MAX_FAILED_STEPS):
                status, answer = await worker.post("/v1/completions", body)
                assert status == 500, answer
            await asyncio.Event().wait()  # the worker's end cancels this

    try:
        with pytest.raises(ExceptionGroup) as ended:
            await serve_until_it_fails()
        assert ended.value.subgroup(EngineFailed) is not None
    finally:
        model.model.close()


@pytest.mark.parametrize("is_large", [False, True])
def test_a_stopped_rank_is_reported_and_not_waited_for(is_large: bool, tmp_path: Path) -> None:
    """A stopped rank is reported and not waited for, whether it should compute or receive a batch
    larger than its pipe.
    """
    folder = written(tmp_path, TinySettings("llama"))
    ranks = Group(replace(spec(folder, 2, 1), step_s=8.0, blocks=400, max_tokens=2048))
    (other,) = ranks._others
    pieces = steps()[0]
    if is_large:
        pieces = [Piece(some_ids(1500), 0, range(200)), Piece(some_ids(1500), 0, range(200, 400))]
        ranks._step_s = 0.5
    try:
        freeze(other.pid)
        for _ in range(2):
            with pytest.raises(GroupLost, match="rank 1 took no batch" if is_large else "together"):
                ranks.logits(flat_batch(pieces, BLOCK_SIZE))
    finally:
        ranks.close()
    assert other.poll() == -signal.SIGKILL


async def test_a_worker_of_two_stages_serves_the_models_tokens(tmp_path: Path) -> None:
    """A worker of two pipeline stages gives the model's tokens to many requests at once, which are
    spread over two steps in flight.
    """
    make_tiny(tmp_path)
    prompts = [list(range(30 + n, 45 + 2 * n)) for n in range(7)]
    reference = Reference(tmp_path)
    together = StepSettings(overlap=True)
    model = real.loaded(tmp_path, ranks=(1, 2), steps=together, max_num_tokens=32, max_batch_size=8)
    sizes: list[int] = []
    try:
        async with computing(model) as worker:

            async def ask(prompt: list[int]) -> list[int]:
                body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
                _, answer = await worker.post("/v1/completions", body | {"return_token_ids": True})
                return answer["choices"][0]["token_ids"]

            said = await asyncio.gather(*(ask(prompt) for prompt in prompts))
            steps = json.loads(await worker.get("/debug/steps"))["steps"]
            sizes = [one["decode_tokens"] for one in steps if not one["prefill_tokens"]]
            scheduler = worker.worker.runner.scheduler
            assert scheduler.kv_used_blocks == 0
            check_pool(scheduler.pool)
        assert said == [reference.greedy(prompt, 12) for prompt in prompts]
        assert max(sizes) <= 4, "half of them a step"
    finally:
        model.model.close()


def test_a_rank_that_cannot_load_fails_the_group_at_once(tmp_path: Path) -> None:
    folder = written(tmp_path, TinySettings("llama"))
    broken = spec(folder, 2, 1)
    (folder / "config.json").unlink()
    with pytest.raises((GroupLost, OSError, ValueError)):
        Group(broken)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 20), st.booleans()), min_size=1, max_size=6
    )
)
def test_a_batch_survives_encoding_and_decoding(pieces: list[tuple[int, int, bool]]) -> None:
    batch = flat_batch(
        [Piece(IDS[:count], start, list(range(4)), wants) for count, start, wants in pieces],
        BLOCK_SIZE,
    )
    whole = batch_bytes(batch)
    again = read_batch(io.BytesIO(whole), "cpu")
    assert isinstance(again, FlatBatch)
    assert again.spans == batch.spans
    for name in ("token_ids", "positions", "slots", "query_starts", "context_tokens"):
        assert torch.equal(getattr(again, name), getattr(batch, name))
        assert getattr(again, name).dtype == getattr(batch, name).dtype
    assert torch.equal(again.page_table, batch.page_table)
    assert torch.equal(again.sample_rows, batch.sample_rows)
    assert read_batch(io.BytesIO(), "cpu") is None
    for size in (1, 39, len(whole) - 1):
        with pytest.raises(EOFError):
            read_batch(io.BytesIO(whole[:size]), "cpu")
    with pytest.raises(EOFError, match="should"):
        read_batch(io.BytesIO(b"\1" * len(whole)), "cpu")
