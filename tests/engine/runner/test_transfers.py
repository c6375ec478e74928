"""Tests of transfers of real KV between workers of any two shapes: answers stay the same."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.batch import FlatBatch, Piece, flat_batch
from engine.model.config import ModelConfig, Quantization, Shard
from engine.model.kv_cache import KvCache, KvMemory, RankMemory
from engine.model.tiny import TinySettings, make_tiny
from engine.runner.load import Loaded, fingerprint
from engine.wire.kv_transfer import Form, Place, Pool, Welcome
from kvkernels.ops.relayout import AXES, PoolLayout
from tests.effort import QUICK, examples
from tests.engine import tiny_models
from tests.engine.harness import DEADLINE_S, Running, eventually
from tests.engine.real import COMPLETIONS, computing, greedy, ids_of, loaded
from tests.engine.split import computed, prefilled, split, until_idle

LAYERS, HEADS = 4, 4
PAIRS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (8, 1)]  # TP, PP


def shards(ranks: tuple[int, int], base: PoolLayout) -> list[PoolLayout]:
    """Return the layout of every rank's pool. Ranks share a head if there are more ranks than
    heads.
    """
    tp_size, pp_size = ranks
    all_layers, all_heads = len(base.layers), len(base.heads)
    found = []
    for rank in range(tp_size * pp_size):
        stage, place = divmod(rank, tp_size)
        shard = Shard(place, tp_size, stage, pp_size)
        heads = shard.kv_heads(all_heads)
        found.append(
            replace(base, layers=shard.layers(all_layers), heads=range(heads.start, heads.stop))
        )
    return found


def memory(
    draw: random.Random, ranks: tuple[int, int], block_tokens: int, form: Form, blocks: int = 12
) -> KvMemory:
    """Return the memory of a worker with a random order of axes, all bytes 0."""
    order = tuple(draw.sample(AXES, len(AXES)))
    sides = range(form.layers), range(form.heads)
    base = PoolLayout(*sides, blocks, block_tokens, form.row_bytes, order)
    made = []
    for layout in shards(ranks, base):
        scales = replace(layout, row_bytes=4)
        made.append(
            RankMemory(
                layout,
                torch.zeros(layout.bytes, dtype=torch.int8),
                torch.zeros(scales.bytes, dtype=torch.int8) if form.scale_bytes else None,
            )
        )
    return KvMemory(form, made)


def tag(tokens: range, row_bytes: int, salt: int) -> torch.Tensor:
    """Return int32[token, head, layer, kv, elements] in which every element encodes its own
    position.
    """
    axes = [torch.tensor(list(tokens)), torch.arange(HEADS), torch.arange(LAYERS), torch.arange(2)]
    token, head, layer, kv = torch.meshgrid(*axes, indexing="ij")
    row = ((token * HEADS + head) * LAYERS + layer) * 2 + kv
    elements = torch.arange(row_bytes // 4)
    return (row.unsqueeze(-1) * 64 + elements + salt).to(torch.int32)


def views(store: KvMemory, part: int) -> Iterator[tuple[PoolLayout, torch.Tensor]]:
    """Yield each rank's pool (or its scales) as int32[block, head, layer, kv, token, elements]."""
    for rank in store._ranks:
        layout, raw = rank.parts()[part]
        shaped = raw.view(torch.int32).view(*layout.shape(), layout.row_bytes // 4)
        yield layout, shaped.permute(*(layout.order.index(axis) for axis in AXES), 5)


def fill(store: KvMemory, block_ids: list[int], tokens: int) -> None:
    """Write the position tags of a prompt into its blocks, in all ranks."""
    for part in range(2 if store.form.scale_bytes else 1):
        for layout, view in views(store, part):
            tags = tag(range(tokens), layout.row_bytes, part)
            own = tags[:, layout.heads.start : layout.heads.stop]
            own = own[:, :, layout.layers.start : layout.layers.stop]
            for token in range(tokens):
                block = block_ids[token // store.block_tokens]
                view[block, :, :, :, token % store.block_tokens] = own[token]


def check(store: KvMemory, block_ids: list[int], tokens: range) -> None:
    """Assert that the tags of `tokens` are in their places and that other blocks are empty."""
    others = [block for block in range(12) if block not in block_ids]
    for part in range(2 if store.form.scale_bytes else 1):
        for layout, view in views(store, part):
            tags = tag(tokens, layout.row_bytes, part)
            own = tags[:, layout.heads.start : layout.heads.stop]
            own = own[:, :, layout.layers.start : layout.layers.stop]
            for number, token in enumerate(tokens):
                block = block_ids[token // store.block_tokens]
                got = view[block, :, :, :, token % store.block_tokens]
                assert torch.equal(got, own[number]), f"token {token} of {layout}"
            assert not view[others].any()


def sent(source: KvMemory, target: KvMemory, ids: list[int], place: Place, each: int) -> None:
    """Send the blocks of the source in parts of whole blocks, as a transfer does."""
    size = source.block_tokens
    first, last = place.start // size, -(-place.stop // size)
    for start in range(first, last, each):
        stop = min(start + each, last)
        data = source.pack(ids[start:stop])
        assert len(data) == source.size(stop - start)
        part = Place(place.block_ids, max(start * size, place.start), min(stop * size, place.stop))
        target.put(bytes(data), size, start, stop - start, part)


def test_every_kv_element_arrives_in_its_place() -> None:
    """Every element of the KV arrives in its place, with random TP, PP, page size, axis order and
    dtype at both ends, behind the blocks that the target has cached.
    """
    for seed in range(examples(200)):
        draw = random.Random(seed)
        form = Form("m", LAYERS, HEADS, draw.choice([8, 16, 64]), "x", draw.choice([0, 4]))
        pages = [draw.choice([4, 6, 8, 16, 48]) for _ in range(2)]
        source = memory(draw, draw.choice(PAIRS), pages[0], form)
        target = memory(draw, draw.choice(PAIRS), pages[1], form)
        tokens = draw.randint(2, 12 * min(pages))
        ids = [draw.sample(range(12), -(-tokens // page)) for page in pages]
        fill(source, ids[0], tokens)
        start = pages[1] * draw.randrange(0, (tokens - 1) // pages[1] + 1)
        stop = draw.randint(start + 1, tokens)
        sent(source, target, ids[0], Place(ids[1], start, stop), draw.randint(1, 4))
        check(target, ids[1], range(start, stop))


def config(kv_heads: int = HEADS) -> ModelConfig:
    from dataclasses import replace as changed

    made: ModelConfig = changed(TINY, layers=LAYERS, kv_heads=kv_heads, head_dim=16)
    return made


TINY = ModelConfig(
    Path("config.json"), "llama", 264, 64, 128, LAYERS, HEADS, HEADS, 16, 2048, 1e-5,
    None, True, False, False, False, False, "float32", (), (), None,  # type: ignore[arg-type]
)  # fmt: skip


def shared_worker(ranks: tuple[int, int], block_size: int, kv: str) -> tuple[KvMemory, list[Any]]:
    """Return a worker's memory that other processes can map, and the objects that must live as long
    as the memory.
    """
    tp_size, pp_size = ranks
    made, kept = [], []
    for rank in range(tp_size * pp_size):
        stage, place = divmod(rank, tp_size)
        shard = Shard(place, tp_size, stage, pp_size)
        cache = KvCache(config(), 11, block_size, shard=shard, kv=kv, shared=True)
        kept.append(cache)
        made.append(RankMemory.of(config(), cache, shard))
    item = 4 if kv == "auto" else 1
    form = Form("m", LAYERS, HEADS, 16 * item, "x", 0 if kv == "auto" else 4)
    return KvMemory(form, made, shows_files=True), kept


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("ranks", [((1, 1), (1, 1)), ((2, 2), (4, 1)), ((8, 1), (1, 2))], ids=str)
def test_kv_is_copied_correctly_through_mapped_memory(kv: str, ranks: Any) -> None:
    source, kept = shared_worker(ranks[0], 8, kv)
    target, also = shared_worker(ranks[1], 12, kv)
    fill(source, [3, 1, 7, 2], 30)
    welcome = Welcome(8, 1.0, [3, 1, 7, 2], list(source.pools))
    assert target.copy(welcome, Place([5, 9, 4], 12, 29)) > 0
    check(target, [5, 9, 4], range(12, 29))
    assert kept is not also


def test_only_kv_memory_can_be_mapped() -> None:
    target, _kept = shared_worker((1, 1), 8, "auto")
    pool = target.pools[0]
    another = f"{pool.file[:-4]}beef"
    gone = f"/proc/99999999/fd/3#{pool.file.partition('#')[2]}"
    for file in ("/etc/passwd", "/proc/self/fd/0", "/proc/1/fd/0", another, gone, ""):
        told = Pool(pool.layers, pool.heads, pool.blocks, pool.order, file)
        with pytest.raises((ValueError, OSError)):
            target.copy(Welcome(8, 1.0, [1], [told]), Place([1], 0, 8))
    wrong = Pool(pool.layers, pool.heads, pool.blocks + 1, pool.order, pool.file)
    with pytest.raises(ValueError, match="were told of"):
        target.copy(Welcome(8, 1.0, [1], [wrong]), Place([1], 0, 8))
    with pytest.raises(ValueError, match="the pool has"):
        target.copy(Welcome(8, 1.0, [12], [pool]), Place([1], 0, 8))


def test_kv_parts_of_a_wrong_size_are_refused() -> None:
    target, _kept = shared_worker((1, 1), 8, "auto")
    with pytest.raises(ValueError, match="are not the KV"):
        target.put(b"xx", 8, 0, 1, Place([1], 0, 8))


def test_models_with_different_weights_have_different_fingerprints(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_tiny(tmp_path / str(seed), TinySettings(seed=seed))
    make_tiny(tmp_path / "again", TinySettings(seed=1))
    one, other, again = (fingerprint(tmp_path / name) for name in ("1", "2", "again"))
    assert one == again != other


class Moves:
    """A model whose KV is computed in one cache and moved into another. Lifetime: test."""

    def __init__(self, folder: Path, dtype: str, kv: str, pages: tuple[int, int]) -> None:
        self.model = tiny_models.loaded(folder, getattr(torch, dtype))
        self.config, self.pages, self.kv = self.model.config, pages, kv
        item = 1 if kv != "auto" else self.model.dtype.itemsize
        self.form = Form(
            *("m", self.config.layers, self.config.kv_heads, self.config.head_dim * item, dtype),
            0 if kv == "auto" else 4,
        )

    def cache(self, side: int) -> KvCache:
        kept = {"dtype": self.model.dtype, "kv": self.kv}
        return KvCache(self.config, 40, self.pages[side], **kept)  # type: ignore[arg-type]

    def through(self, draw: random.Random, source: KvCache, target: KvCache, place: Place) -> None:
        """Move the KV from `source` to `target` through two workers with random ranks, stages,
        block sizes and axis order.
        """
        hops = [KvMemory(self.form, [RankMemory.of(self.config, source)])]
        for _ in range(2):
            ranks = draw.choice([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
            hops.append(memory(draw, ranks, draw.choice([4, 8, 10, 16]), self.form, 60))
        hops.append(KvMemory(self.form, [RankMemory.of(self.config, target)]))
        ids: list[int] = list(range(40))
        for one, other in pairwise(hops):
            is_last = other is hops[-1]
            theirs = draw.sample(range(60), -(-place.stop // other.block_tokens))
            # Every hop moves everything, except the last, which begins where the target lacks
            # tokens.
            into = place if is_last else Place(theirs, 0, place.stop)
            sent(one, other, ids, into, draw.randint(1, 4))
            ids = theirs

    def say(self, kv: KvCache, prompt: list[int], start: int, side: int) -> list[torch.Tensor]:
        """Return the logits of a prompt's last token, with its first `start` tokens already cached,
        and those of six more tokens, each the likeliest.
        """
        tokens, found = prompt[start:], list[torch.Tensor]()
        for _ in range(7):
            piece = Piece(tokens, start, range(40))
            found.append(self.model.forward(flat_batch([piece], self.pages[side]), kv)[0])
            start += len(tokens)
            tokens = [int(torch.argmax(found[-1]))]
        return found


def test_logits_have_the_same_bits_after_any_kv_transfer(tmp_path: Path) -> None:
    """Logits have the same bits after KV was transferred between 200 random pairs of ranks, stages,
    blocks, order and dtype (with TEST_EFFORT). The target has none, a part, or all of the prompt
    already.
    """
    make_tiny(tmp_path / "model", TinySettings(layers=4))
    for seed in range(examples(10)):
        draw = random.Random(seed)
        dtype, kv = draw.choice([("float32", "auto"), ("float32", "int8"), ("bfloat16", "auto")])
        pages = draw.choice([4, 8, 12, 16]), draw.choice([4, 6, 8, 16, 24])
        moved = Moves(tmp_path / "model", dtype, kv, pages)
        prompt = [draw.randrange(3, 260) for _ in range(draw.randint(2, 120))]
        alone = moved.say(moved.cache(1), prompt, 0, 1)
        source, target = moved.cache(0), moved.cache(1)
        moved.say(source, prompt, 0, 0)
        stop = len(prompt) - 1
        cached = draw.choice([0, stop // 2, stop]) // pages[1] * pages[1]
        if cached:
            piece = Piece(prompt[:cached], 0, range(40))
            moved.model.forward(flat_batch([piece], pages[1]), target)
        if cached < stop:
            moved.through(draw, source, target, Place(list(range(40)), cached, stop))
        got = moved.say(target, prompt, stop, 1)
        assert all(torch.equal(a, b) for a, b in zip(alone, got, strict=True)), f"seed {seed}"


def request_body(seed: int, tokens: int = 60, output: int = 12) -> dict[str, Any]:
    """Return the body of a request, which is greedy for odd seeds and sampled with the seed for
    even ones.
    """
    prompt = [random.Random(seed).randrange(3, 260) for _ in range(tokens)]
    body = greedy(prompt, output)
    return body if seed % 2 else body | {"temperature": 1.0, "seed": seed}


def token_ids_of(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def pair(
    one: Loaded, other: Loaded, **changes: Any
) -> AsyncIterator[tuple[Running, Running]]:
    try:
        async with computing(one, **changes) as prefill, computing(other, **changes) as decode:
            yield prefill, decode
    finally:
        for model in (one, other):
            model.model.close()


async def same_answers(prefill: Running, decode: Running, alone: Running, seeds: range) -> None:
    """Assert that a prefill and a decode worker together give the answers of a single worker. None,
    a part, or all of a prompt is cached at the decode worker.
    """
    for seed in seeds:
        body = request_body(seed, random.Random(seed).randint(1, 90))
        expected = await ids_of(alone, body)
        cached = random.Random(seed).choice([0, len(body["prompt"]) // 2, len(body["prompt"])])
        if cached:
            await decode.post(COMPLETIONS, body | {"prompt": body["prompt"][:cached]})
        before = computed(decode)
        assert token_ids_of(await split(prefill, decode, body)) == expected, f"seed {seed}"
        assert computed(decode) == before + 1
    await until_idle(prefill, decode)
    assert decode.worker.transfers is not None
    importer = decode.worker.transfers.importer
    assert not importer.failed
    mapped = decode.worker.settings.kv_transport == "shm"
    assert importer.received_total
    assert bool(importer.mapped_total) is mapped


SHAPES: list[dict[str, Any]] = [
    {"page": (16, 8), "kv": "int8"},
    {"page": (4, 24), "transport": "shm"},
]
MORE_SHAPES: list[dict[str, Any]] = [
    {"page": (8, 8)},
    {"page": (6, 4), "kv": "int8", "transport": "shm"},
]
GROUPS: list[dict[str, Any]] = [
    {"page": (8, 16), "ranks": ((2, 1), (1, 1))},
    {"page": (8, 8), "ranks": ((1, 1), (1, 2)), "transport": "shm"},
]
MORE_GROUPS: list[dict[str, Any]] = [{"page": (16, 8), "ranks": ((1, 1), (2, 1)), "kv": "int8"}]


def with_more(some: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[Any]:
    """Return `some` as pytest parameters, and `more` as parameters that only the full run uses."""
    return [*some, *(pytest.param(one, marks=pytest.mark.full) for one in more)]


@pytest.mark.parametrize("shape", with_more(SHAPES, MORE_SHAPES), ids=str)
async def test_split_answers_equal_those_of_one_worker(shape: dict[str, Any], folder: Path) -> None:
    await _same(shape, folder, range(8))


@pytest.mark.parametrize("shape", with_more(GROUPS, MORE_GROUPS), ids=str)
async def test_split_answers_with_several_ranks_equal_those_of_one_worker(
    shape: dict[str, Any], folder: Path
) -> None:
    await _same(shape, folder, range(6))


async def _same(shape: dict[str, Any], folder: Path, seeds: range) -> None:
    pages, ranks = shape["page"], shape.get("ranks", ((1, 1), (1, 1)))
    transport = shape.get("transport", "tcp")
    quantization = Quantization(kv=shape.get("kv", "auto"))
    made = [
        loaded(
            folder,
            quantization=quantization,
            ranks=ranks[side],
            block_size=pages[side],
            shares_kv=transport == "shm",
        )
        for side in (0, 1)
    ]
    # The single worker is the one that decodes, computing the whole prompt itself.
    alone = loaded(folder, quantization=quantization, block_size=pages[1])
    async with (
        pair(*made, kv_transport=transport) as (one, other),
        computing(alone) as by_itself,
    ):
        await same_answers(one, other, by_itself, seeds)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_answers_are_the_same_if_kv_is_sent_early(transport: str, folder: Path) -> None:
    """Answers are the same if KV is sent before its prompt is finished: blocks that are not
    computed yet are not read, and such KV is never mapped.
    """
    shares = {"shares_kv": transport == "shm"}
    chunks = {"max_num_tokens": 32, "max_batch_size": 8}
    made = loaded(folder, **shares, **chunks), loaded(folder, **shares)
    early = {"kv_overlap": True, "kv_transport": transport}
    async with pair(*made, **early) as (one, other), computing(loaded(folder)) as alone:
        for seed in range(4):
            body = request_body(seed, 600, 4)
            assert token_ids_of(await split(one, other, body)) == await ids_of(alone, body)
        await until_idle(one, other)
        assert other.worker.transfers is not None
        assert other.worker.transfers.importer.received_total == 4
        assert not other.worker.transfers.importer.failed


async def test_kv_arrives_before_its_prompt_is_finished(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV arrives before its prompt is finished: the rest is computed only after a part has come.
    `python -m tests.bench.early_kv` measures it.
    """
    made = loaded(folder, max_num_tokens=64, max_batch_size=8), loaded(folder)
    came, steps, compute = threading.Event(), itertools.count(), made[0].model.logits

    def waiting(batch: FlatBatch) -> torch.Tensor:
        assert next(steps) < 2 or came.wait(DEADLINE_S)
        return compute(batch)

    monkeypatch.setattr(made[0].model, "logits", waiting)
    async with pair(*made, kv_overlap=True, kv_transport="tcp") as (one, other):
        store = other.worker.served.store
        assert isinstance(store, KvMemory)
        put = store.put
        monkeypatch.setattr(store, "put", lambda *given: (came.set(), put(*given)))
        body = request_body(1, 900, 1)
        assert token_ids_of(await split(one, other, body)) == await ids_of(one, body)
        assert came.is_set()
        await until_idle(one, other)


async def test_kv_that_cannot_be_mapped_is_sent(folder: Path) -> None:
    """KV that cannot be mapped is sent, as between two hosts where the same path names other
    memory.
    """
    made = [loaded(folder, shares_kv=True) for _ in range(2)]
    async with pair(made[0], made[1], kv_transport="shm") as (one, other):
        store = one.worker.served.store
        assert isinstance(store, KvMemory)
        pool = store.pools[0]
        file = f"{pool.file[:-4]}beef"
        store.pools[0] = Pool(pool.layers, pool.heads, pool.blocks, pool.order, file)
        body = request_body(1)
        answer = await split(one, other, body)
        assert token_ids_of(answer) == await ids_of(one, body)
        assert other.worker.transfers is not None
        importer = other.worker.transfers.importer
        assert (importer.mapped_total, importer.received_total) == (0, 1)
        await until_idle(one, other)


async def test_kv_of_another_dtype_is_refused_with_a_reason(folder: Path) -> None:
    made = [loaded(folder, quantization=Quantization(kv=kv)) for kv in ("auto", "int8")]
    async with pair(made[0], made[1]) as (one, other):
        body = request_body(1)
        alone = await ids_of(other, body | {"prompt": [5, *body["prompt"]]})
        split_answer = await split(one, other, body | {"prompt": [5, *body["prompt"]]})
        assert token_ids_of(split_answer) == alone
        assert other.worker.transfers is not None
        assert other.worker.transfers.importer.failed == {"model": 1}


async def test_an_interrupted_transfer_of_real_kv_leaves_nothing_behind(folder: Path) -> None:
    """A transfer of real KV that is cut off leaves nothing behind, whether the client or the
    sending worker leaves at any stage; the next prompt is right.
    """
    model = loaded(folder, max_num_tokens=512)
    async with pair(model, loaded(folder), kv_gbytes_per_s=0.002) as (one, other):
        scheduler = other.worker.runner.scheduler
        for seed in range(6):
            body = request_body(seed, 400)
            params = await prefilled(one, body)
            leg = asyncio.create_task(
                other.post(COMPLETIONS, body | {"kv_transfer_params": params})
            )
            if seed % 3:
                await eventually(lambda: scheduler.reading == 1, "it reads")
                await asyncio.sleep(0.01 * seed)
            leg.cancel()
            await asyncio.gather(leg, return_exceptions=True)
            await eventually(lambda: not other.worker.pool.used_blocks, "its blocks")
        body = request_body(100, 300)
        assert token_ids_of(await split(one, other, body)) == await ids_of(one, body)


LIVES = 40 if QUICK else 1_000


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_random_transfers_of_real_kv_leave_nothing_behind(
    transport: str, folder: Path
) -> None:
    """Random histories of transfers leave nothing behind: clients leave during prefill or decode,
    in caches too small for all of them.
    """
    draw = random.Random(3)
    terms = {"max_batch_size": 6, "max_num_tokens": 64, "export_lease_s": 1.0}
    shares = transport == "shm"
    made = [loaded(folder, kv_tokens=640, shares_kv=shares, **terms) for _ in range(2)]
    turns = asyncio.Semaphore(8)
    async with (
        pair(*made, kv_transport=transport, kv_gbytes_per_s=0.02) as (one, other),
        computing(loaded(folder)) as alone,
    ):
        expected = {
            seed: await ids_of(alone, request_body(seed, 10 + 9 * seed)) for seed in range(12)
        }

        async def life(serial: int) -> bool:
            seed = serial % 12
            body = request_body(seed, 10 + 9 * seed)
            async with turns:
                params = await prefilled(one, body)
                if draw.random() < 0.1:
                    return False
                leg = asyncio.create_task(
                    other.post(COMPLETIONS, body | {"kv_transfer_params": params})
                )
                if draw.random() < 0.3:
                    await asyncio.sleep(draw.random() * 0.1)
                    leg.cancel()
                await asyncio.gather(leg, return_exceptions=True)
            if leg.cancelled():
                return False
            status, answer = leg.result()
            assert (status, token_ids_of(answer)) == (200, expected[seed])
            return True

        answered = await asyncio.gather(*(life(serial) for serial in range(LIVES)))
        assert sum(answered) > LIVES / 2
        await asyncio.sleep(1.0)
        for worker in (one, other):
            await worker.get("/metrics")
        await until_idle(one, other)
        assert other.worker.transfers is not None
        assert other.worker.transfers.importer.received_total > LIVES / 4
