"""Tests of batches that are lost, late, duplicated or out of order between a replay and the live
stream.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass

import pytest
import zmq

from policies.facts import KvEvents
from router.events import resync as asking_module
from router.events.sources import ZmqSource
from tests.router.events.feed_payloads import holds, payload, until_known
from tests.router.events.feed_wire import (
    END,
    Publisher,
    followed_publisher,
    publisher,
    rig,
    source_of,
    until,
)


async def test_batches_dropped_by_a_full_send_queue_are_replayed() -> None:
    """Batches that a full send queue drops are replayed; beyond the publisher's high-water mark,
    they vanish silently.
    """
    batches = 600
    async with rig(backlog_batches=20, timeout_s=5.0) as one, publisher(one.context) as keeper:
        pub = zmq.Context(one.context).socket(zmq.PUB)  # sends at once, or drops
        pub.setsockopt(zmq.SNDHWM, 5)
        pub.setsockopt(zmq.SNDBUF, 1 << 16)
        live = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"

        def send(seq: int, padding: int) -> None:
            keeper.kept[seq] = payload(seq, padding)
            pub.send_multipart([b"", struct.pack(">Q", seq), keeper.kept[seq]])

        try:
            async with one.following(ZmqSource(live, keeper.replay)) as feed:
                await until(lambda: feed.counters.replays == 1, lambda: "the first replay")
                sent = 0
                while not one.kv().counters.batches:  # it subscribes at some time
                    send(sent, 0)
                    sent += 1
                    await asyncio.sleep(0.01)
                await until_known(one, sent)
                gaps = one.kv().counters.gaps
                for seq in range(sent, sent + batches):
                    send(seq, padding=50_000)
                sent += batches
                for _ in range(100):  # the next one to arrive shows what is missing
                    send(sent, 0)
                    sent += 1
                    await asyncio.sleep(0.01)
                assert one.kv().counters.gaps > gaps, "nothing was lost"
                await until_known(one, sent)
                assert feed.counters.replays >= 2
        finally:
            pub.close(linger=0)


async def test_a_replay_that_begins_later_than_requested_leaves_the_gap_open() -> None:
    async with followed_publisher() as (one, engine, _):
        await engine.send(0, payload(0))
        await until_known(one, 1)
        for seq in range(1, 6):
            await engine.send(seq, payload(seq), lost=True)
        for seq in (0, 1, 2):
            del engine.kept[seq]  # no room for them any more
        await engine.send(6, payload(6))
        await until(lambda: holds(one, range(3, 7)), lambda: "what is left")
        assert not one.kv().known
        assert not holds(one, [0])
        assert not one.kv().resyncing


async def test_a_late_joiner_whose_replay_begins_late_knows_only_a_part() -> None:
    async with rig() as one, publisher(one.context) as engine:
        for seq in range(5, 8):
            await engine.send(seq, payload(seq), lost=True)
        async with one.following(source_of(engine)):
            await until(lambda: holds(one, range(5, 8)), lambda: "the replay")
            assert not one.kv().known
            await engine.until_subscribed()
            await engine.send(8, payload(8))
            await until(lambda: holds(one, range(5, 9)), lambda: "what is live")
            assert not one.kv().known


async def test_a_restarted_publisher_has_an_empty_cache() -> None:
    async with followed_publisher() as (one, engine, _):
        for seq in range(4):
            await engine.send(seq, payload(seq))
        await until_known(one, 4)
        engine.kept.clear()
        await engine.send(0, payload(9))
        await until(lambda: holds(one, [9]), lambda: "the first batch of the new one")
        assert one.kv().known
        assert not holds(one, [0])
        assert one.kv().counters.restarts == 1


async def test_a_restart_with_lost_first_batches_is_noticed_by_batch_numbers() -> None:
    """A restart of a publisher whose first batches were lost is noticed: the first received batch
    shows a gap after the publisher's own start.
    """
    async with followed_publisher() as (one, engine, _):
        for seq in range(4):
            await engine.send(seq, payload(seq))
        await until_known(one, 4)
        engine.kept.clear()
        await engine.send(0, payload(10), lost=True)
        await engine.send(1, payload(11), lost=True)
        await engine.send(2, payload(12))
        await until(lambda: one.kv().known and holds(one, [10, 11, 12]), lambda: "the new ones")
        assert not holds(one, [0])


@dataclass
class PausedReplay:
    """A publisher whose replay stops after each batch until the test lets it continue."""

    engine: Publisher
    go: asyncio.Semaphore

    async def answer(self) -> None:
        identity, _, start = await self.engine.router.recv_multipart()
        self.engine.asked.append(first := struct.unpack(">Q", start)[0])
        kept = sorted(self.engine.kept.items())  # as of now: what comes later is live
        for seq, batch in kept:
            if seq >= first:
                await self.go.acquire()
                frames = [identity, b"", b"", struct.pack(">Q", seq), batch]
                await self.engine.router.send_multipart(frames)
        await self.go.acquire()
        await self.engine.router.send_multipart([identity, b"", b"", END, b""])


async def test_live_batches_between_those_of_a_replay_are_put_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = asyncio.Semaphore(0)
    monkeypatch.setattr(
        Publisher, "answer", lambda engine: answer_forever(PausedReplay(engine, go))
    )
    async with rig(timeout_s=5.0) as one, publisher(one.context) as engine:
        for seq in range(3):
            await engine.send(seq, payload(seq), lost=True)
        async with one.following(source_of(engine)):
            await engine.until_subscribed()
            await until(lambda: engine.asked == [0], lambda: "the replay to be asked for")
            await engine.send(3, payload(3))
            await one.until_seq(3)
            assert not holds(one, [3])  # it waits
            go.release()
            await until(lambda: holds(one, [0]), lambda: "the first of the replay")
            await engine.send(4, payload(4))
            await engine.send(4, payload(4))  # twice: a restart, were it not for its content
            await one.until_seq(4)
            for _ in range(3):
                go.release()
            await until(lambda: holds(one, range(3, 5)), lambda: "the live ones")


async def answer_forever(held: PausedReplay) -> None:
    while True:
        await held.answer()


async def test_batches_both_replayed_and_live_count_once() -> None:
    async with rig() as one, publisher(one.context) as engine:
        for seq in range(3):
            await engine.send(seq, payload(seq), lost=True)
        async with one.following(source_of(engine)) as feed:
            await until(lambda: feed.counters.replays == 1, lambda: "the replay")
            await until_known(one, 3)
            feed.resync(0)
            await until(lambda: feed.counters.replays == 2, lambda: "the second replay")
            assert one.kv().counters.duplicates == 3
            assert one.kv().resident_blocks == 3
            assert one.kv().known


async def test_batches_dropped_from_a_replay_are_requested_again() -> None:
    """If a replay loses batches, the rest is requested: a ROUTER socket drops what its send queue
    has no room for, also the end mark.
    """

    async with rig() as one, publisher(one.context) as engine:
        for seq in range(6):
            await engine.send(seq, payload(seq), lost=True)
        real, drops = engine.router.send_multipart, {2, 4}

        async def dropping(frames: list[bytes]) -> None:
            seq = struct.unpack(">Q", frames[-2])[0]
            if seq in drops:
                drops.discard(seq)
            else:
                await real(frames)

        engine.router.send_multipart = dropping  # type: ignore[method-assign]
        async with one.following(source_of(engine)) as feed:
            await until_known(one, 6)
            assert engine.asked == [0, 2]
            await until(lambda: feed.counters.replays == 1, lambda: "the replay's end")


async def test_a_replay_without_an_end_mark_ends_by_timeout() -> None:
    async with rig(timeout_s=0.2) as one, publisher(one.context) as engine:
        for seq in range(3):
            await engine.send(seq, payload(seq), lost=True)
        real, lost_marks = engine.router.send_multipart, [END]

        async def dropping(frames: list[bytes]) -> None:
            if frames[-2] in lost_marks:
                lost_marks.clear()
            else:
                await real(frames)

        engine.router.send_multipart = dropping  # type: ignore[method-assign]
        async with one.following(source_of(engine)) as feed:
            await until(lambda: feed.counters.replays == 1, lambda: "the replay's end")
            assert engine.asked == [0, 3]
            await until_known(one, 3)


async def test_a_slow_replay_has_a_total_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow replay is waited for only so long as a whole, even if each of its batches comes in
    time.
    """
    monkeypatch.setattr(asking_module, "_REPLAY_MAX_S", 0.2)
    go = asyncio.Semaphore(2)
    monkeypatch.setattr(
        Publisher, "answer", lambda engine: answer_forever(PausedReplay(engine, go))
    )
    async with rig(timeout_s=5.0) as one, publisher(one.context) as engine:
        for seq in range(5):
            await engine.send(seq, payload(seq), lost=True)
        async with one.following(source_of(engine)) as feed:
            await until(lambda: feed.counters.failed_syncs >= 1, lambda: "it to be given up")
            assert holds(one, [0, 1])
            assert not any(isinstance(f, KvEvents) and f.seq > 1 for f in one.told)


async def test_a_replay_that_makes_progress_is_waited_for_without_limit() -> None:
    """A replay is waited for as long as it brings later batches, here one every twenty seconds,
    which is much longer than a replay may pause.
    """
    async with rig() as one, publisher(one.context) as engine:
        for seq in range(5):
            await engine.send(seq, payload(seq), lost=True)
        one.clock = lambda: 20.0 * len(one.told)
        async with one.following(source_of(engine)) as feed:
            await until_known(one, 5)
            assert (engine.asked, feed.counters.failed_syncs) == ([0], 0)


async def test_the_cache_is_known_at_the_replays_end_without_a_second_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = asyncio.Semaphore(2)
    monkeypatch.setattr(
        Publisher, "answer", lambda engine: answer_forever(PausedReplay(engine, go))
    )
    async with rig(timeout_s=5.0, subscribed_s=0.01) as one, publisher(one.context) as engine:
        for seq in range(5):
            await engine.send(seq, payload(seq), lost=True)
        async with one.following(source_of(engine)):
            await until(lambda: holds(one, [0, 1]), lambda: "a part of it")
            await asyncio.sleep(0.05)  # the second look, for what came before the subscription
            assert not one.kv().known
            for _ in range(10):
                go.release()
            await until_known(one, 5)
            assert engine.asked == [0, 5]
            assert one.kv().counters.duplicates == 0
