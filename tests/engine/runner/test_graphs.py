"""Tests of decodes that are padded to fixed sizes; graphs are called on the same buffers here, not
replayed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.backends import KVKERNELS
from engine.model.batch import FlatBatch, Piece, Plan, Planner, Span, fixed_batch, flat_batch
from engine.model.tiny import TinySettings
from engine.runner.graphs import DecodeGraphs, graph_rows
from engine.runner.needs import StepSettings
from engine.sampling.params import SamplingParams
from kvkernels.cuda.library import LaunchError
from tests.effort import examples
from tests.engine.real import BLOCK_SIZE, COMPLETIONS, computing, greedy, loaded
from tests.engine.runner.arrivals import BLOCKS, Arrival, served
from tests.engine.runner.failing import breaking, failing
from tests.engine.tiny_models import cache, some_ids, written
from tests.engine.tiny_models import loaded as model_of

SIZE, PAGES = 8, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model"), TinySettings("qwen3"))


@settings(max_examples=examples(10), deadline=None)
@given(
    contexts=st.lists(st.integers(1, SIZE * PAGES - 1), min_size=1, max_size=5),
    padding=st.integers(0, 3),
    kv_dtype=st.sampled_from(["auto", "int8"]),
)
def test_a_padded_row_has_the_same_bits_as_an_unpadded_row(
    contexts: list[int], padding: int, kv_dtype: str, folder: Path
) -> None:
    """A padded row has the same bits as in an unpadded step, and the other rows and blocks are
    unchanged.
    """
    model = model_of(folder, torch.float32)
    kv = cache(model, len(contexts) * PAGES, SIZE, kv_dtype)
    if kv_dtype == "auto":
        kv.pool.fill_(float("nan"))
    blocks = [list(range(row * PAGES, (row + 1) * PAGES)) for row in range(len(contexts))]
    prompts = [some_ids(context + row)[row:] for row, context in enumerate(contexts)]
    fill = [Piece(ids, 0, own) for ids, own in zip(prompts, blocks, strict=True)]
    model.forward(flat_batch(fill, SIZE), kv)
    decodes = [
        Piece([7 + row], context, own)
        for row, (context, own) in enumerate(zip(contexts, blocks, strict=True))
    ]
    plain = model.forward(flat_batch(decodes, SIZE), kv)
    before = kv.pool[: kv.blocks].clone()
    fixed = fixed_batch(decodes, len(decodes) + padding, PAGES, SIZE)
    made = model.forward(fixed, kv)
    assert made.shape[0] == len(decodes) + padding
    assert torch.equal(made[: len(decodes)], plain)
    assert torch.equal(kv.pool[: kv.blocks].nan_to_num(), before.nan_to_num())


def test_batches_beyond_the_limits_use_no_graph(folder: Path) -> None:
    model = model_of(folder, torch.float32)
    kv = cache(model, 8, SIZE)
    said: list[str] = []
    graphs = DecodeGraphs(
        lambda batch: model.forward(batch, kv), 3, 20, SIZE, 264, torch.float32, report=said.append
    )
    assert said[0].startswith("3 graphs of 1..3 decodes with up to 24 tokens each, 72 together")
    short, long = Piece([1], 23, [0, 1, 2]), Piece([1], 24, [0, 1, 2, 3])
    assert graphs.use([short], False) == "hit"
    assert graphs.use([short], True) == "chunks"
    assert graphs.use([short, long], False) == "graph_limit"
    assert graphs.use([short] * 4, False) == "graph_limit"
    with pytest.raises(ValueError, match="beyond 3 pages"):
        graphs.lay_out([long])
    for pieces in ([short, short], [Piece([1, 2], 0, [0])]):
        with pytest.raises(ValueError, match="at most 1 of one token"):
            fixed_batch(pieces, 1, 3, SIZE)


def test_graph_sizes_are_powers_of_two_up_to_the_limit() -> None:
    assert graph_rows(1) == [1]
    assert graph_rows(7) == [1, 2, 4, 7]
    assert graph_rows(40) == [1, 2, 4, 8, 16, 32, 40]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_the_same_with_and_without_graphs(folder: Path, overlap: bool) -> None:
    model = loaded(folder, kv_tokens=BLOCKS * BLOCK_SIZE, max_num_tokens=24, max_batch_size=6)
    samplings = [SamplingParams(temperature=1.0, seed=n, frequency_penalty=0.5) for n in range(9)]
    arrivals: Sequence[Arrival] = [
        Arrival((n % 2,) * 9 + (n,), 18 + n, one, frozenset(range(0, 264, 20)), 2 * n, None)
        for n, one in enumerate(samplings)
    ]
    plain = asyncio.run(served(model, arrivals))
    with_graphs = replace(model, steps=StepSettings(overlap=overlap, cuda_graphs=True))
    replayed = asyncio.run(served(with_graphs, arrivals))
    assert replayed.tokens == plain.tokens
    assert replayed.ended == plain.ended


async def test_step_records_show_the_use_of_graphs(folder: Path) -> None:
    model = loaded(folder, steps=StepSettings(cuda_graphs=True), max_batch_size=8)
    async with computing(model) as worker:
        bodies = [greedy([n] * 9, 6) for n in range(3)]
        await asyncio.gather(*(worker.post(COMPLETIONS, body) for body in bodies))
        steps = json.loads(await worker.get("/debug/steps"))["steps"]
        uses = Counter(one["graph"] for one in steps)
        assert uses["hit"]
        assert uses["chunks"]
        assert uses.total() == len(steps)
        sizes = {1: 1, 2: 2, 3: 4}
        for one in steps:
            padded = (
                sizes[one["decode_tokens"]] - one["decode_tokens"] if one["graph"] == "hit" else 0
            )
            assert one["padded_rows"] == padded
        metrics = (await worker.get("/metrics")).decode()
        labels = f'{{engine="0",model_name="tiny",use="hit"}} {uses["hit"]}.0'
        assert f"warmroute_engine_graph_steps_total{labels}" in metrics


@dataclass(frozen=True)
class NoGraphs:
    """A planner that fails while graphs are captured; a graph is captured without requests."""

    inner: Planner

    def __call__(
        self, spans: Sequence[Span], page_table: torch.Tensor, room_tokens: int | None
    ) -> Plan:
        if not spans:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.inner(spans, page_table, room_tokens)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("failed", ["capture", "replay", "replay and kernels"])
async def test_a_failed_graph_fails_no_request(
    failed: str, overlap: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A CUDA graph that fails costs no request: steps continue without graphs, and with torch if
    the kernels have failed, too.
    """
    bodies = [greedy(list(range(n, n + 20)), 9) for n in range(3)]
    settings: dict[str, Any] = {"attention": KVKERNELS, "max_batch_size": 4}
    settings["steps"] = StepSettings(overlap=overlap, cuda_graphs=False)
    async with computing(loaded(folder, **settings)) as worker:
        wanted = [await worker.post(COMPLETIONS, body) for body in bodies]
    settings["steps"] = StepSettings(overlap=overlap, cuda_graphs=True)
    # Calls of the model are counted: of the first request's prompt, of a graph, of the step again.
    model = breaking(folder, {2} if "replay" in failed else set(), **settings)
    if failed == "capture":
        assert model.planner is not None
        model = replace(model, planner=NoGraphs(model.planner))
    kernels: AbstractContextManager[object] = nullcontext()
    if failed == "replay and kernels":
        layers = model.config.layers
        kernels = failing("shared_decode", layers, LaunchError("invalid device function"))
    async with computing(model) as worker:
        with kernels:
            made = [await worker.post(COMPLETIONS, body) for body in bodies]
        told = json.loads(await worker.get("/debug/steps"))["steps"]
    for (status, answer), (_, plain) in zip(made, wanted, strict=True):
        assert status == 200
        assert answer["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    why = "capture that failed: operation not permitted when stream is capturing"
    if failed != "capture":
        why = "replay that failed: out of memory, say"
    message = f"graphs: steps go without from here on, because of a {why}"
    assert caplog.messages.count(message) == 1
    assert told[-1]["graph"] == "fallback"
    assert ("hit" in {one["graph"] for one in told}) == (failed != "capture")
    assert bool(model.model.fell_back) == (failed == "replay and kernels")


def test_a_lost_device_ends_the_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ends when its device is lost, and computes nothing on it again. The test sets the
    device's answer, without a device.
    """
    monkeypatch.setattr("engine.runner.graphs.device_lost", lambda device: "an illegal address")
    calls: list[FlatBatch] = []

    def forward(batch: FlatBatch) -> torch.Tensor:
        calls.append(batch)
        raise LaunchError("an illegal memory access was encountered")

    graphs = DecodeGraphs(forward, 1, SIZE, SIZE, 264, torch.float32)
    batch = graphs.lay_out([Piece([1], 0, [0])])
    with pytest.raises(LaunchError, match="illegal memory access"):
        graphs.logits(batch, lambda _: None)
    assert len(calls) == 1
    assert not graphs.failed
