"""Tests of hostile publishers, and of feeds that end early: memory is bounded, and all
tasks end.
"""

from __future__ import annotations

import asyncio
import struct
import time

import pytest

from policies.facts import WorkerChange
from router.core.workers import kv_state as backlog_module
from tests.router.events.feed_endpoints import bound, connecting, free_endpoint
from tests.router.events.feed_payloads import holds, payload, until_known
from tests.router.events.feed_wire import (
    END,
    Publisher,
    chain_of,
    followed_publisher,
    pack,
    publisher,
    rig,
    source_of,
    until,
)

CLEARED = {"type": "AllBlocksCleared"}


@pytest.mark.parametrize("seq", [1 << 63, (1 << 64) - 2, (1 << 64) - 1])
async def test_impossibly_large_batch_numbers_are_refused(seq: int) -> None:
    """Batch numbers near the end of 8 bytes, which no publisher counts to, are refused."""
    async with followed_publisher() as (one, engine, feed):
        await engine.send(0, payload(0))
        await engine.send(seq, payload(7), lost=False)
        del engine.kept[seq]
        await engine.send(1, payload(1))
        await until_known(one, 2)
        assert feed.counters.malformed_frames == 1
        assert one.kv().counters.restarts == 0


async def test_the_highest_batch_number_is_handled() -> None:
    highest = (1 << 63) - 1
    async with followed_publisher(subscribed_s=0.01) as (one, engine, feed):
        await engine.send(highest, payload(0))
        await until(lambda: holds(one, [0]), lambda: "the block")
        feed.resync(one.kv().next_seq)
        engine.kept.clear()
        await engine.send(0, payload(1))  # it begins anew
        await until(lambda: one.kv().known and holds(one, [1]), lambda: "the new one")


async def test_a_flood_of_clears_does_not_block_the_event_loop() -> None:
    async with followed_publisher() as (one, engine, _):
        batches, clears = 20, 60_000
        for seq in range(batches):
            await engine.send(seq, pack(*[CLEARED] * clears))
        await engine.send(batches, payload(1))
        turns = 0
        while not holds(one, [1]):
            await asyncio.sleep(0)
            turns += 1
        assert one.kv().counters.clears == batches * clears
        assert one.kv().known
        assert turns >= batches  # others had theirs between any two batches


async def test_repeated_gaps_are_requested_at_a_limited_rate() -> None:
    async with followed_publisher() as (one, engine, feed):
        began_s = time.monotonic()
        for n in range(12):
            await engine.send(10 + 3 * n, payload(n))
            await asyncio.sleep(0)
        await one.until_seq(10 + 3 * 11)
        await until(lambda: not one.kv().resyncing, lambda: "it to be given up")
        assert not one.kv().known
        took_s = time.monotonic() - began_s
        assert feed.counters.replays <= 3 + took_s / 0.1
        assert (
            len(engine.asked) <= 2 * feed.counters.replays
        )  # once more where it leaps, not for each
        assert one.kv().backlog_batches == 0


async def test_waiting_batches_are_limited_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog_module, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(Publisher, "answer", never_answer)
    async with (
        rig(timeout_s=60.0) as one,
        publisher(one.context) as engine,
        one.following(source_of(engine)),
    ):
        await engine.until_subscribed()
        for n in range(40):
            await engine.send(5 + n, payload(n, padding=100_000))
        await one.until_seq(44)
        assert one.kv().backlog_batches == 10
        assert one.kv().counters.dropped_batches == 30


async def never_answer(engine: Publisher) -> None:
    await asyncio.Event().wait()


async def test_a_flood_of_unknown_topics_is_dropped_and_rarely_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    live = free_endpoint()
    async with (
        rig() as one,
        one.following(bound(live, "a")) as feed,
        connecting(one, live, b"a") as engine,
    ):
        for n in range(2_000):
            topic = b"a%d" % n if n % 2 else b"\xff" * 1000
            await engine.pub.send_multipart([topic, struct.pack(">Q", n), b"x" * 1000])
        await engine.send(0, payload(0))
        await until(lambda: holds(one, [0]), lambda: "the block")
        strays = [r for r in caplog.records if "no worker is to have" in r.getMessage()]
        assert len(strays) <= 12
        assert all(len(record.getMessage()) < 600 for record in strays)
        assert feed.counters.malformed_frames == 0
        assert one.kv().known


async def test_events_of_a_worker_removed_during_a_replay_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that leaves in the middle of a replay is gone: what its feed still delivers belongs
    to no worker, also not to the next one in its slot.
    """
    monkeypatch.setattr(Publisher, "answer", endless_replay)
    async with rig(timeout_s=5.0) as one, publisher(one.context) as engine:
        feed = one.opened(source_of(engine))
        task = asyncio.create_task(feed.run())
        await until(lambda: holds(one, range(5)), lambda: "some of the replay")
        one.world.core.on_worker(WorkerChange(1.0, 0, "gone"))
        one.world.join(1, block_size=2, models=("m",))
        told = len(one.told)
        await until(lambda: len(one.told) > told + 5, lambda: "more of it")
        assert one.hit(chain_of([0, 0], 2), worker_id=1) == 0
        task.cancel()
        began_s = time.monotonic()
        await asyncio.gather(task, return_exceptions=True)
        assert time.monotonic() - began_s < 2.0
        told = len(one.told)
        await asyncio.sleep(0)
        assert len(one.told) == told


async def endless_replay(engine: Publisher) -> None:
    while True:
        identity, _, start = await engine.router.recv_multipart()
        seq = struct.unpack(">Q", start)[0]
        while True:
            frames = [identity, b"", b"", struct.pack(">Q", seq), payload(seq % 50)]
            await engine.router.send_multipart(frames)
            seq += 1
            await asyncio.sleep(0)


async def test_replay_requests_run_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_way = most = 0

    async def answer(engine: Publisher) -> None:
        nonlocal under_way, most
        while True:
            identity, _, start = await engine.router.recv_multipart()
            under_way += 1
            most = max(most, under_way)
            first = struct.unpack(">Q", start)[0]
            engine.asked.append(first)
            for seq, batch in sorted(engine.kept.items()):
                if seq >= first:
                    await engine.router.send_multipart(
                        [identity, b"", b"", struct.pack(">Q", seq), batch]
                    )
                    await asyncio.sleep(0)
            under_way -= 1
            await engine.router.send_multipart([identity, b"", b"", END, b""])

    monkeypatch.setattr(Publisher, "answer", answer)
    async with followed_publisher() as (one, engine, feed):
        for seq in range(5):
            await engine.send(seq, payload(seq))
        await until_known(one, 5)
        asked = len(engine.asked)
        for seq in (3, 1, 2, 4, 5):
            feed.resync(seq)
        await until(lambda: feed.counters.replays >= 2, lambda: "the answer")
        await until(lambda: len(engine.asked) > asked, lambda: "the question")
        assert engine.asked[asked:] == [1]  # the earliest speaks for all
        assert most == 1
        assert one.kv().known
