"""Tests of a computing worker's KV in host memory: an evicted block comes back bit for bit, or not
at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.capacity import Limits
from engine.cli import main as cli
from engine.model.config import Quantization
from engine.model.kv_cache import HostKv, KvCache, Moves
from engine.model.tiny import make_tiny
from engine.runner.group import Group, GroupLost
from engine.runner.load import Computing, Loaded
from engine.runner.needs import StepSettings
from engine.runner.ranks import moves_bytes, read_batch
from engine.sampling.params import SamplingParams
from engine.scheduler.types import Output, Step
from engine.wire.events import BlockStored, decode_batch, snapshot_payloads
from kvkernels import EventBatch, PrefixIndex, WorkerBlocks, chain_hashes
from tests.effort import examples
from tests.engine import tiny_models
from tests.engine.harness import DEADLINE_S, Running, drain_live, eventually, subscriber
from tests.engine.real import (
    BLOCK_SIZE,
    COMPLETIONS,
    Reference,
    computing,
    greedy,
    ids_of,
    loaded,
)
from tests.engine.runner.arrivals import BLOCKS, VOCAB, Arrival, Clients, run_until_all_end
from tests.engine.scheduling import array
from tests.engine.split import split, until_idle
from tests.oracles.block_pool import check_pool

SIZES = {"max_num_tokens": 24, "max_batch_size": 4, "min_chunk_tokens": 4}
DOCUMENTS = [[random.Random(n).randrange(VOCAB) for _ in range(60)] for n in range(4)]


def tiered(folder: Path, host_blocks: int, blocks: int = BLOCKS, **changes: Any) -> Loaded:
    """Load the model with `blocks` blocks on the device and `host_blocks` in host memory."""
    sizes = {"kv_tokens": blocks * BLOCK_SIZE, "host_kv_tokens": host_blocks * BLOCK_SIZE}
    return loaded(folder, **(sizes | SIZES | changes))


class CopyOmittingModel(Computing):
    """A model that omits the copies to host memory, or those from it."""

    def __init__(self, inner: Computing, to_host: bool) -> None:
        self._inner, self._to_host = inner, to_host
        self._transformer, self.kv, self._host = inner._transformer, inner.kv, inner._host

    def move(self, moves: Moves) -> None:
        if moves.to_host is not self._to_host:
            self._inner.move(moves)


class CheckingClients(Clients):
    """Checks after each step that every cached block still has its first bits. At the steps
    `resets` the cache is cleared.
    """

    def __init__(self, model: Loaded, arrivals: Sequence[Arrival], resets: Sequence[int]) -> None:
        self._seen: dict[tuple[int, int], torch.Tensor] = {}
        self._resets, self._step = resets, 0
        computing = model.model
        assert isinstance(computing, Computing)
        self._pairs = computing._host._pairs
        self._in_turns = not model.steps.overlaps("cpu")
        super().__init__(model, arrivals)

    def on_step(self, step: Step, outputs: list[Output], now_s: float) -> None:
        super().on_step(step, outputs, now_s)
        pool = self.runner.scheduler.pool
        for part, (cache, host) in enumerate(self._pairs):
            for block_hash, block in pool._by_hash.items():
                self._look((part, block_hash), cache[block])
            # While a step is in flight, copies to the host may be, too.
            for block_hash, place in pool.host._ids.items() if self._in_turns else ():
                self._look((part, block_hash), host[place])
        self._step += 1
        if self._step in self._resets:
            pool.clear()

    def _look(self, key: tuple[int, int], bits: torch.Tensor) -> None:
        assert torch.equal(self._seen.setdefault(key, bits.clone()), bits), "another block's KV"


ARRIVALS = st.builds(
    Arrival,
    prompt=st.builds(
        lambda document, tokens, tail: (*DOCUMENTS[document][:tokens], *tail),
        st.integers(0, 3),
        st.integers(0, 60),
        st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    ),
    output_tokens=st.integers(1, 16),
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 9),
        presence_penalty=st.sampled_from([0.0, 0.7]),
        logprobs=st.just(2),
    ),
    stops=st.sampled_from([frozenset[int](), frozenset(range(0, VOCAB, 9))]),
    at_step=st.integers(0, 30),
    leaves_at_step=st.none() | st.none() | st.integers(1, 40),
)


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Loaded]:
    kv = {"int8": Quantization(kv="int8"), "float32": Quantization()}
    return {name: tiered(folder, 40, quantization=made) for name, made in kv.items()}


def with_host(model: Loaded, host_blocks: int, overlap: bool = False) -> Loaded:
    capacity = replace(model.capacity, host_blocks=host_blocks)
    return replace(model, capacity=capacity, steps=StepSettings(overlap=overlap))


@settings(max_examples=examples(8), deadline=None)
@given(
    arrivals=st.lists(ARRIVALS, min_size=4, max_size=14),
    kv=st.sampled_from(["float32", "float32", "int8"]),
    host_blocks=st.sampled_from([1, 5, 16, 40]),
    resets=st.lists(st.integers(1, 40), max_size=2),
    overlap=st.booleans(),
)
def test_answers_are_the_same_with_and_without_host_memory(
    arrivals: list[Arrival],
    kv: str,
    host_blocks: int,
    resets: list[int],
    overlap: bool,
    models: dict[str, Loaded],
) -> None:
    """Answers are the same with host memory and without it, while requests come and leave, and the
    small cache is cleared now and then.
    """
    arrivals = sorted(arrivals, key=lambda one: one.at_step)
    plain, ours = (
        asyncio.run(
            run_until_all_end(CheckingClients(with_host(models[kv], *more), arrivals, resets))
        )
        for more in ((0, False), (host_blocks, overlap))
    )
    for number in range(len(arrivals)):
        one, other = ours.tokens[number], plain.tokens[number]
        shared = min(len(one), len(other))
        assert one[:shared] == other[:shared]
        if "left" not in (plain.ended[number], ours.ended[number]):
            assert len(one) == len(other)
            assert plain.ended[number] == ours.ended[number]
    assert ours.ended.keys() == ours.tokens.keys()
    assert ours.runner.scheduler.kv_used_blocks == 0
    assert not ours.runner._loads


def visits(rounds: int) -> list[Arrival]:
    """Return requests for four documents in turn, each of which needs more than half of
    the cache.
    """
    sampling = SamplingParams(logprobs=2)
    return [
        Arrival((*DOCUMENTS[n % 4], n), 3, sampling, frozenset(), 0, None)
        for n in range(4 * rounds)
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_evicted_blocks_are_loaded_from_host_memory_and_not_recomputed(
    models: dict[str, Loaded], overlap: bool
) -> None:
    for model in models.values():
        plain = asyncio.run(run_until_all_end(CheckingClients(with_host(model, 0), visits(3), ())))
        ours = asyncio.run(
            run_until_all_end(CheckingClients(with_host(model, 40, overlap), visits(3), ()))
        )
        assert ours.tokens == plain.tokens
        assert plain.runner.scheduler.host_hit_tokens_total == 0
        # Seven whole blocks of each document, in the second round and the third.
        hits = ours.runner.scheduler.prefix_hit_tokens_total
        assert ours.runner.scheduler.host_hit_tokens_total + hits == 8 * 7 * BLOCK_SIZE
        assert ours.runner.scheduler.host_hit_tokens_total >= 4 * 7 * BLOCK_SIZE


@pytest.mark.parametrize("to_host", [False, True])
def test_these_tests_detect_an_omitted_copy(folder: Path, to_host: bool) -> None:
    """The tests above fail if a copy is omitted, so they check the right things."""
    model = tiered(folder, 40)
    assert isinstance(model.model, Computing)
    for _, host in model.model._host._pairs:
        host.zero_()  # it may be memory that had the same blocks before
    slipping = replace(model, model=CopyOmittingModel(model.model, to_host))
    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(run_until_all_end(CheckingClients(slipping, visits(2), ())))
    assert failed.group_contains(AssertionError, match="another block's KV")
    slipped = asyncio.run(run_until_all_end(Clients(slipping, visits(2))))
    plain = asyncio.run(run_until_all_end(Clients(with_host(model, 0), visits(2))))
    assert plain.tokens != slipped.tokens


@contextlib.contextmanager
def held(
    model: Loaded, monkeypatch: pytest.MonkeyPatch, to_host: bool
) -> Iterator[threading.Event]:
    """Make copies in one direction (to or from the host) wait for the event that the context
    yields.
    """
    go, move = threading.Event(), model.model.move

    def waiting(moves: Moves) -> None:
        assert moves.to_host is not to_host or go.wait(DEADLINE_S)
        move(moves)

    monkeypatch.setattr(model.model, "move", waiting)
    try:
        yield go
    finally:
        go.set()


async def filled(worker: Running, documents: Sequence[Sequence[int]] = DOCUMENTS) -> None:
    """Request each document once, so that the first ones are in host memory at the end."""
    for document in documents:
        await ids_of(worker, greedy(document, 1))


async def test_blocks_being_loaded_stay_held_while_other_requests_run(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiered(folder, 40, blocks=24)
    async with computing(model) as worker:
        await filled(worker, [*DOCUMENTS, *(one[::-1] for one in DOCUMENTS)])
        scheduler = worker.worker.runner.scheduler
        with held(model, monkeypatch, False) as go:
            loading = asyncio.create_task(ids_of(worker, greedy(DOCUMENTS[0], 6)))
            leaving = asyncio.create_task(ids_of(worker, greedy([*DOCUMENTS[0][:40], 1], 6)))
            await eventually(lambda: scheduler.reading == 2, "both load")
            used = scheduler.kv_used_blocks
            assert await ids_of(worker, greedy([5, 6, 7], 4)) == reference.greedy([5, 6, 7], 4)
            leaving.cancel()
            await eventually(lambda: scheduler.reading == 1, "one has left")
            assert scheduler.kv_used_blocks == used, "nobody gets what is written"
            worker.worker.reset_cache()
            # Blocks evicted before the reset are still loading, so nothing may overwrite them.
            other = asyncio.create_task(filled(worker, DOCUMENTS[2:]))
            await asyncio.sleep(0.05)
            assert not other.done()
            go.set()
            await other
            assert await loading == reference.greedy(DOCUMENTS[0], 6)
        await eventually(lambda: scheduler.kv_used_blocks == 0, "its blocks are free")
        check_pool(scheduler.pool)


@pytest.mark.parametrize("to_host", [False, True])
async def test_a_failed_copy_clears_the_cache_and_fails_no_answer(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, to_host: bool
) -> None:
    model = tiered(folder, 40)
    move, failures = model.model.move, [1, 1, 1]

    def failing(moves: Moves) -> None:
        if moves.to_host is to_host and failures:
            failures.pop()
            raise RuntimeError("the device is gone, say")
        move(moves)

    async with computing(model) as worker:
        monkeypatch.setattr(model.model, "move", failing)
        scheduler = worker.worker.runner.scheduler
        for document in DOCUMENTS * 4:
            assert await ids_of(worker, greedy(document, 4)) == reference.greedy(document, 4)
        assert not failures
        assert scheduler.pool.epoch >= 1
        assert scheduler.host_hit_tokens_total > 0
        assert scheduler.kv_used_blocks == 0
        check_pool(scheduler.pool)


async def test_host_memory_is_reported_over_http_as_by_a_simulated_worker(folder: Path) -> None:
    """A computing worker reports its host memory over HTTP as a simulated one does: usage, metrics,
    events of the medium CPU, a snapshot that has the blocks, and a reset.
    """
    model = tiered(folder, 40)
    async with computing(model) as worker, subscriber(worker.worker) as socket:
        await filled(worker)
        status, answer = await worker.post(COMPLETIONS, greedy(DOCUMENTS[0], 4))
        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 56
        batches = await drain_live(socket, worker.worker.kv_seq)
        events = [one for batch in batches for one in decode_batch(batch.payload).events]
        media = {one.medium for one in events if isinstance(one, BlockStored)}
        assert media == {"GPU", "CPU"}
        index = PrefixIndex(1, 10_000, 1 << 24)
        late = WorkerBlocks(index, 0, BLOCK_SIZE, "m")
        for payload in snapshot_payloads(await worker.get("/kv_snapshot"))[1]:
            late.apply(EventBatch(payload))
        chain = chain_hashes(array(DOCUMENTS[1]), BLOCK_SIZE)
        assert index.longest_prefix_tiers(chain)[:, 0].tolist()[1] == 7
        metrics = (await worker.get("/metrics")).decode()
        assert 'external_prefix_cache_hits_total{engine="0",model_name="tiny"} 56.0' in metrics
        kept = len(worker.worker.pool.host)
        assert f'warmroute_engine_host_blocks{{engine="0",model_name="tiny"}} {kept}.0' in metrics
        status, _ = await worker.post("/reset_prefix_cache", {})
        assert (status, len(worker.worker.pool.host)) == (200, 0)
        _, answer = await worker.post(COMPLETIONS, greedy(DOCUMENTS[0], 4))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("ranks", [(1, 1), pytest.param((2, 1), marks=pytest.mark.full)])
async def test_transferred_kv_is_written_only_after_old_blocks_are_saved(
    folder: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    ranks: tuple[int, int],
) -> None:
    """KV from another worker is written only after the blocks in its place were copied to host
    memory. Of two workers on one machine, the decode worker evicts blocks for it.
    """
    source, model = loaded(folder), tiered(folder, 40, ranks=ranks)
    request.addfinalizer(model.model.close)
    async with computing(source) as prefill, computing(model) as decode:
        await filled(decode, DOCUMENTS[:2])
        new = [(7 * n + 3) % VOCAB for n in range(70)]
        with held(model, monkeypatch, True) as go:
            coming = asyncio.create_task(split(prefill, decode, greedy(new, 4)))
            transfers = decode.worker.transfers
            assert transfers is not None
            await eventually(lambda: transfers.importer.active == 1, "its KV comes")
            await asyncio.sleep(0.05)
            go.set()
            answer = await coming
        assert answer["choices"][0]["token_ids"] == reference.greedy(new, 4)
        assert transfers.importer.received_total == 1
        for document in DOCUMENTS[:2]:
            assert await ids_of(decode, greedy(document, 4)) == reference.greedy(document, 4)
        assert decode.worker.runner.scheduler.host_hit_tokens_total > 0
        await until_idle(prefill, decode)


@pytest.mark.parametrize("ranks", [(2, 1), pytest.param((1, 2), marks=pytest.mark.full)])
async def test_every_rank_keeps_its_part_in_host_memory(
    folder: Path, reference: Reference, ranks: tuple[int, int]
) -> None:
    steps = StepSettings(overlap=ranks[1] > 1)
    model = tiered(folder, 40, ranks=ranks, steps=steps)
    try:
        async with computing(model) as worker:
            for document in DOCUMENTS * 2:
                assert await ids_of(worker, greedy(document, 4)) == reference.greedy(document, 4)
            said = await asyncio.gather(*(ids_of(worker, greedy(one, 4)) for one in DOCUMENTS))
            assert said == [reference.greedy(one, 4) for one in DOCUMENTS]
            scheduler = worker.worker.runner.scheduler
            assert scheduler.host_hit_tokens_total >= 4 * 7 * BLOCK_SIZE
            assert scheduler.kv_used_blocks == 0
        assert isinstance(model.model, Group)
        (other,) = model.model._others
        other.kill()
        for _ in range(2):
            with pytest.raises(GroupLost):
                model.model.move(Moves(True, [1], [0]))
    finally:
        model.model.close()


def test_copy_orders_for_ranks_survive_encoding_and_decoding() -> None:
    for moves in (Moves(True, [3, 1, 7], [0, 2, 1]), Moves(False, [5], [9])):
        whole = moves_bytes(moves)
        assert read_batch(io.BytesIO(whole), "cpu") == moves
        for size in (1, 90, len(whole) - 1):
            with pytest.raises(EOFError):
                read_batch(io.BytesIO(whole[:size]), "cpu")


@pytest.mark.parametrize(("kv", "shared"), [("auto", False), ("int8", True), ("fp8", False)])
def test_blocks_return_from_host_memory_unchanged(tmp_path: Path, kv: str, shared: bool) -> None:
    make_tiny(tmp_path)
    config = tiny_models.loaded(tmp_path).config
    cache = KvCache(config, 6, BLOCK_SIZE, kv=kv, shared=shared)
    host = HostKv(cache, 3)
    assert host.nbytes * 7 == cache.nbytes * 3
    parts = [one.view(-1).view(torch.int8) for one in (cache.pool, cache.scales) if one is not None]
    for part in parts:
        part.copy_(torch.randint(-128, 128, part.shape, dtype=torch.int8))
    before = [part.clone().view(7, -1) for part in parts]
    host.move(Moves(True, [5, 0, 3], [0, 2, 1]))
    for part in parts:
        part.zero_()
    host.move(Moves(False, [1, 4], [2, 0]))
    for part, was in zip(parts, before, strict=True):
        now = part.view(7, -1)
        assert torch.equal(now[[1, 4]], was[[0, 5]])
        assert not now[[0, 2, 3, 5, 6]].any()


def test_a_host_memory_size_that_does_not_fit_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny(tmp_path)
    for few in (-1, 15):
        with pytest.raises(
            ValueError, match=f"must be 0, or at least one block of 16 .* got {few}"
        ):
            Limits(host_kv_tokens=few, block_size=16)
    assert cli.main(["serve", str(tmp_path), "--host-kv-tokens", str(1 << 50)]) == 1
    said = capsys.readouterr().err
    assert f"host_kv_tokens {1 << 50} take" in said
    assert "are available: lower it to" in said
    share = ["--memory-bytes", str(80 << 20)]
    assert cli.main(["serve", str(tmp_path), *share, "--host-kv-tokens", "200000"]) == 1
    said = capsys.readouterr().err
    assert "for host_kv_tokens) leave nothing of 80.00 MiB for the KV cache: lower" in said
    model = tiered(tmp_path, 3)
    assert "  evicted KV     12.00 KiB\n" in model.capacity.report()
    with pytest.raises(ValueError, match="4 host blocks were asked for, 3 loaded"):
        model.runner(BlockPool(4, BLOCK_SIZE, host_blocks=4), lambda *_: None, lambda *_: None)
