"""Publishers that go away and come back: the same ones, and others that no number tells apart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from router.events import zmq_feed as zmq_feed_module
from router.events.sources import ZmqSource
from tests.router.feed_wire import Publisher, Rig, followed, publisher, rig, until
from tests.router.test_feed_bound import bound, connecting, free_endpoint
from tests.router.test_feed_loss import holds, payload, until_known


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_feed_module, "_BETWEEN_CONNECTIONS_S", 0.0)


async def gone_and_back(one: Rig, engine: Publisher) -> None:
    """Its live socket closes, and another one is there at the same address."""
    engine.pub.close(linger=0)
    engine.pub = one.context.socket(zmq.XPUB)
    engine.pub.setsockopt(zmq.LINGER, 0)

    def free() -> bool:
        try:
            engine.pub.bind(engine.live)
        except zmq.ZMQError:
            return False
        return True

    await until(free, lambda: f"{engine.live} to be free")
    await engine.heard()


@asynccontextmanager
async def following_four() -> AsyncIterator[tuple[Rig, Publisher]]:
    """A publisher four batches of which are known."""
    async with followed(subscribed_s=0.01) as (one, engine, _):
        for seq in range(4):
            await engine.send(seq, payload(seq))
        await until_known(one, 4)
        yield one, engine


@pytest.mark.parametrize("batches", [2, 4, 5, 9], ids=["fewer", "as many", "one more", "more"])
async def test_another_one_is_noticed_though_it_says_nothing(batches: int) -> None:
    async with following_four() as (one, engine):
        engine.kept = {seq: payload(20 + seq) for seq in range(batches)}
        await gone_and_back(one, engine)
        new = range(20, 20 + batches)
        await until(lambda: one.kv().known and holds(one, new), lambda: "the new one's cache")
        assert not any(holds(one, [n]) for n in range(4))
        assert one.kv().counters.restarts in (1, 2)  # by another digest, by what it lacks, or both


async def test_another_one_that_goes_on_with_the_next_number_is_noticed() -> None:
    async with following_four() as (one, engine):
        engine.kept = {seq: payload(20 + seq) for seq in range(4)}
        await gone_and_back(one, engine)
        await engine.send(4, payload(24))
        await until(
            lambda: one.kv().known and holds(one, range(20, 25)), lambda: "the new one's cache"
        )
        assert not any(holds(one, [n]) for n in range(4))


async def test_another_one_that_published_nothing_holds_nothing() -> None:
    async with following_four() as (one, engine):
        engine.kept = {}
        await gone_and_back(one, engine)
        await until(lambda: one.kv().counters.restarts == 1, lambda: "it to be noticed")
        await until(lambda: one.kv().known, lambda: "it to be known")
        assert one.kv().resident_blocks == 0


async def test_the_same_one_tells_what_it_published_meanwhile() -> None:
    async with following_four() as (one, engine):
        engine.pub.close(linger=0)
        engine.kept |= {seq: payload(seq) for seq in range(4, 7)}
        await gone_and_back(one, engine)
        await until_known(one, 7)
        assert one.kv().counters.restarts == 0


async def test_without_a_replay_nothing_is_asked_and_nothing_forgotten() -> None:
    async with followed(replay=False, subscribed_s=0.01) as (one, engine, feed):
        await engine.send(0, payload(0))
        await until(lambda: holds(one, [0]), lambda: "the block")
        await until(lambda: feed.counters.failed_syncs == 2, lambda: "the second look")
        await gone_and_back(one, engine)
        await engine.send(1, payload(1))
        await one.until_seq(1)
        assert holds(one, [0, 1])


async def test_one_that_comes_later_than_its_follower_is_asked_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    live, replay = free_endpoint(), free_endpoint()
    async with (
        rig(subscribed_s=0.01, timeout_s=0.05) as one,
        one.following(ZmqSource(live, replay)) as feed,
    ):
        await until(lambda: feed.counters.failed_syncs >= 1, lambda: "the first questions")
        assert not one.kv().known
        assert f"no publisher at {live}" in caplog.text
        async with publisher(one.context) as engine:
            engine.pub.bind(live)
            engine.router.bind(replay)
            engine.kept = {0: payload(0), 1: payload(1)}
            await until_known(one, 2)


async def test_at_an_endpoint_that_we_bind_everybody_is_asked() -> None:
    live = free_endpoint()
    async with rig(subscribed_s=0.01) as one, publisher(one.context, b"a") as replaying:
        source = bound(live, "a", replaying.replay)
        async with one.following(source), connecting(one, live, b"a") as engine:
            for seq in range(4):
                replaying.kept[seq] = payload(seq)
                await engine.send(seq, payload(seq))
            await until_known(one, 4)
            replaying.kept = {seq: payload(20 + seq) for seq in range(4)}
            async with connecting(one, live, b"a"):
                await until(
                    lambda: one.kv().known and holds(one, range(20, 24)), lambda: "the new one"
                )
                assert not holds(one, [0])


async def test_the_first_connection_is_no_return() -> None:
    async with followed(subscribed_s=0.01) as (_, engine, feed):
        await until(lambda: feed.counters.replays == 2, lambda: "both looks")
        assert engine.asked == [0, 0]
