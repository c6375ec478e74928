"""Tests of KV events over real sockets: live, replayed after a gap, and in a snapshot."""

from __future__ import annotations

import asyncio
import json

import pytest
import zmq
import zmq.asyncio
from numpy import array, int32

from engine.block_pool import BlockPool
from engine.server.events import EventLog
from engine.wire.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Live,
    decode_batch,
    decode_snapshot,
    replay_request,
)
from kvkernels import chain_hashes, chain_seed
from tests.engine.harness import DEADLINE_S, Running, drain_live, replay, running, subscriber

PROMPT = list(range(100, 150))
Held = dict[int | bytes, tuple[int, ...]]  # a consumer's view: block hash -> tokens


async def complete(worker: Running, prompt: list[int], tokens: int = 1, **fields: object) -> None:
    status, answer = await worker.post(
        "/v1/completions", {"prompt": prompt, "max_tokens": tokens} | fields
    )
    assert status == 200, answer


def contents(batches: list[Live], held: Held | None = None) -> Held:
    """Return the blocks that a subscriber knows after `batches`, as hash -> tokens."""
    held = {} if held is None else held
    for batch in batches:
        for event in decode_batch(batch.payload).events:
            if isinstance(event, BlockStored):
                assert event.parent is None or event.parent in held
                for number, name in enumerate(event.hashes):
                    size = event.block_size
                    held[name] = event.tokens[number * size : (number + 1) * size]
            elif isinstance(event, BlockRemoved):
                for name in event.hashes:
                    del held[name]
            else:
                held.clear()
    return held


async def test_each_step_publishes_one_batch_with_chain_hashes() -> None:
    async with running() as worker, subscriber(worker.worker) as socket:
        await complete(worker, PROMPT)
        (batch,) = await drain_live(socket, worker.worker.kv_seq)
        (event,) = decode_batch(batch.payload).events
        assert isinstance(event, BlockStored)
        expected = chain_hashes(array(PROMPT, dtype=int32).data, 16)
        assert event.hashes == tuple(map(int, expected))
        assert (event.parent, event.block_size, event.medium) == (None, 16, "GPU")
        assert event.tokens == tuple(PROMPT[:48])
        # The answer's blocks continue the chain; cached blocks are not reported again.
        await complete(worker, PROMPT, tokens=40)
        later = await drain_live(socket, worker.worker.kv_seq)
        first = decode_batch(later[0].payload).events[0]
        assert isinstance(first, BlockStored)
        assert first.parent == event.hashes[-1]


async def test_only_the_first_salted_block_has_the_salt() -> None:
    async with running() as worker, subscriber(worker.worker) as socket:
        await complete(worker, PROMPT, cache_salt="tenant-a")
        (batch,) = await drain_live(socket, worker.worker.kv_seq)
        (event,) = decode_batch(batch.payload).events
        assert isinstance(event, BlockStored)
        assert event.salt == "tenant-a"
        seed = chain_seed("warmroute-timed", None, "tenant-a")
        expected = chain_hashes(array(PROMPT, dtype=int32).data, 16, seed)
        assert event.hashes == tuple(map(int, expected))
        snapshot = decode_snapshot(await worker.get("/kv_snapshot"))
        (again,) = snapshot.batches[0].events
        assert isinstance(again, BlockStored)
        assert again.salt == "tenant-a"


async def test_replay_fills_a_gap_and_ends() -> None:
    async with running() as worker:
        for start in range(5):
            await complete(worker, list(range(start * 100, start * 100 + 20)))
        assert worker.worker.kv_seq == 4
        everything = await replay(worker.worker, 0)
        assert [batch.seq for batch in everything] == [0, 1, 2, 3, 4]
        assert [batch.seq for batch in await replay(worker.worker, 3)] == [3, 4]
        assert await replay(worker.worker, 5) == []
        assert len(contents(everything)) == 5


async def test_replay_works_after_malformed_requests() -> None:
    async with running() as worker:
        await complete(worker, PROMPT)
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(worker.worker.publisher.replay_endpoint)
        for garbage in ([b""], [b"x", b"y"], [b"", b"short"], [b"", b"12345678", b"more"]):
            await socket.send_multipart(garbage)
        await socket.send_multipart(replay_request(0))
        async with asyncio.timeout(DEADLINE_S):
            assert len(await socket.recv_multipart()) == 4
        context.destroy(linger=0)


async def test_a_snapshot_and_later_batches_equal_the_full_event_stream() -> None:
    # A small cache, so that blocks are evicted all the time, and requests in flight.
    async with running(kv_tokens=1024, speed=20.0) as worker, subscriber(worker.worker) as socket:
        first_seq = worker.worker.kv_seq + 1
        tail = 0
        snapshots = []

        async def client(number: int) -> None:
            for turn in range(4):
                base = (number % 3) * 1000
                prompt = [*range(base, base + 64), *[number * 10 + turn] * 40]
                await complete(worker, prompt, tokens=20)

        async def look() -> None:
            for _ in range(10):
                snapshots.append(decode_snapshot(await worker.get("/kv_snapshot")))
                await asyncio.sleep(0.002)

        await asyncio.gather(look(), *(client(number) for number in range(6)))
        snapshots.append(decode_snapshot(await worker.get("/kv_snapshot")))
        tail = worker.worker.kv_seq
        stream = await drain_live(socket, tail)
        assert [batch.seq for batch in stream] == list(range(first_seq, tail + 1))
        kinds = {type(event) for b in stream for event in decode_batch(b.payload).events}
        assert kinds == {BlockStored, BlockRemoved}, "the test must see evictions"
        final = contents(stream)
        for snapshot in snapshots:
            held: Held = {}
            for batch in snapshot.batches:
                for event in batch.events:
                    assert isinstance(event, BlockStored)
                    assert event.parent is None or event.parent in held, "parents come first"
                    for number, name in enumerate(event.hashes):
                        held[name] = event.tokens[number * 16 : (number + 1) * 16]
            upto = [batch for batch in stream if batch.seq <= snapshot.seq]
            assert held == contents(upto)
            after = [batch for batch in stream if batch.seq > snapshot.seq]
            assert contents(after, held) == final


async def test_a_cache_reset_is_published_at_once() -> None:
    async with running() as worker, subscriber(worker.worker) as socket:
        await complete(worker, PROMPT)
        async with worker.http.post(worker.url + "/reset_prefix_cache") as reply:
            assert reply.status == 200
        *_, last = await drain_live(socket, worker.worker.kv_seq)
        assert decode_batch(last.payload).events == (AllBlocksCleared(),)
        snapshot = decode_snapshot(await worker.get("/kv_snapshot"))
        assert snapshot.batches == ()
        assert snapshot.seq == last.seq


async def test_kv_event_sources_lists_the_endpoints() -> None:
    async with running() as worker:
        sources = json.loads(await worker.get("/kv_event_sources"))
        assert sources["0"]["endpoint"] == worker.worker.publisher.endpoint
        assert sources["0"]["replay_endpoint"] == worker.worker.publisher.replay_endpoint
        assert sources["0"]["endpoint"].startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(("batches", "size"), [(3, 1 << 20), (100, 1)])
def test_the_replay_buffer_is_bounded_in_batches_and_bytes(batches: int, size: int) -> None:
    pool = BlockPool(64, 2)
    log = EventLog(pool, lambda: 1.0, buffer_batches=batches, buffer_bytes=size)
    for number in range(10):
        tokens = array([number, number], dtype=int32)
        (block,) = pool.allocate(1) or []
        pool.publish([block], [number + 1], None, tokens)
        batch = log.flush()
        assert batch is not None
        assert batch.seq == number
    assert log.flush() is None
    kept = [batch.seq for batch in log.since(0)]
    assert kept == ([7, 8, 9] if batches == 3 else [9])
