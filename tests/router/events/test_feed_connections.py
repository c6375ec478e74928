"""Tests of publishers that go away and come back: the same ones, and others with the same batch
numbers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import zmq
import zmq.asyncio

from engine.wire.events import encode_batch
from policies.facts import KvHeard, LoadReport
from router.events import zmq_feed as zmq_feed_module
from router.events.delivery import FeedContext, LoopYield
from router.events.sources import ZmqSource
from router.events.zmq_sockets import opened
from tests.router.core.core_world import stored
from tests.router.events.feed_endpoints import bound, connecting, free_endpoint
from tests.router.events.feed_payloads import holds, payload, until_known
from tests.router.events.feed_support import feed_line, wire
from tests.router.events.feed_wire import Publisher, Rig, followed_publisher, publisher, rig, until


@pytest.fixture(autouse=True)
def reconnect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_feed_module, "_BETWEEN_CONNECTIONS_S", 0.0)


async def reconnect(one: Rig, engine: Publisher) -> None:
    """Close the engine's live socket, and open another one at the same address."""
    engine.pub.close(linger=0)
    engine.pub = one.context.socket(zmq.XPUB)
    engine.pub.setsockopt(zmq.LINGER, 0)

    await until(lambda: bind_if_free(engine.pub, engine.live), lambda: f"{engine.live} to be free")
    await engine.until_subscribed()


def bind_if_free(pub: zmq.asyncio.Socket, live: str) -> bool:
    """Bind the socket if the address is free; return whether it was."""
    try:
        pub.bind(live)
    except zmq.ZMQError:
        return False
    return True


@asynccontextmanager
async def feed_with_four_batches() -> AsyncIterator[tuple[Rig, Publisher]]:
    """Yield a feed and its publisher, four batches of which are known."""
    async with followed_publisher(subscribed_s=0.01) as (one, engine, _):
        for seq in range(4):
            await engine.send(seq, payload(seq))
        await until_known(one, 4)
        yield one, engine


@pytest.mark.parametrize("batches", [2, 4, 5, 9], ids=["fewer", "as many", "one more", "more"])
async def test_another_publisher_is_noticed_although_it_publishes_nothing(batches: int) -> None:
    async with feed_with_four_batches() as (one, engine):
        engine.kept = {seq: payload(20 + seq) for seq in range(batches)}
        await reconnect(one, engine)
        new = range(20, 20 + batches)
        await until(lambda: one.kv().known and holds(one, new), lambda: "the new one's cache")
        assert not any(holds(one, [n]) for n in range(4))
        assert one.kv().counters.restarts in (1, 2)  # by another digest, by what it lacks, or both


async def test_another_publisher_with_the_next_batch_number_is_noticed() -> None:
    async with feed_with_four_batches() as (one, engine):
        engine.kept = {seq: payload(20 + seq) for seq in range(4)}
        await reconnect(one, engine)
        await engine.send(4, payload(24))
        await until(
            lambda: one.kv().known and holds(one, range(20, 25)), lambda: "the new one's cache"
        )
        assert not any(holds(one, [n]) for n in range(4))


async def test_another_publisher_without_batches_has_an_empty_cache() -> None:
    async with feed_with_four_batches() as (one, engine):
        engine.kept = {}
        await reconnect(one, engine)
        await until(lambda: one.kv().counters.restarts == 1, lambda: "it to be noticed")
        await until(lambda: one.kv().known, lambda: "it to be known")
        assert one.kv().resident_blocks == 0


async def test_batches_published_during_a_lost_connection_are_replayed() -> None:
    async with feed_with_four_batches() as (one, engine):
        engine.pub.close(linger=0)
        engine.kept |= {seq: payload(seq) for seq in range(4, 7)}
        await reconnect(one, engine)
        await until_known(one, 7)
        assert one.kv().counters.restarts == 0


def test_tcp_keepalive_is_on_to_notice_a_lost_machine() -> None:
    """TCP keep-alive, which notices that a publisher's machine is gone, is on; a test cannot cut a
    connection silently.
    """
    with zmq.asyncio.Context() as context:
        feed = cast(FeedContext, SimpleNamespace(zmq=context))
        options = (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT)
        with opened(feed, zmq.SUB, 8) as socket:
            assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
            idle_s, between_s, tries = (socket.getsockopt(option) for option in options)
        assert 0 < idle_s + between_s * tries <= 30


async def test_the_cache_is_unknown_while_the_connection_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with feed_with_four_batches() as (one, engine):
        feed = one.feeds[0]
        engine.pub.close(linger=0)
        await until(lambda: not one.kv().known, lambda: "the loss to be noticed")
        assert holds(one, range(4))  # as of then: hits go on to count
        assert (feed.counters.disconnects, feed.counters.heard) == (1, False)
        assert f"the connection to its KV events at {engine.live} is lost" in caplog.text
        feed.resync(3)  # the replay answers all the while, and says nothing of what follows
        replays = feed.counters.replays
        await until(lambda: feed.counters.replays > replays, lambda: "the replay")
        await until(lambda: isinstance(one.told[-1], KvHeard), lambda: "its end")
        assert not one.kv().known
        engine.kept |= {4: payload(4)}
        await reconnect(one, engine)
        await until_known(one, 5)
        assert feed.counters.heard


async def test_a_batch_queued_before_the_connection_loss_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch that waited in the router's queue when the connection was lost proves nothing: it has
    the next number, but it is delivered after the loss is noticed.
    """
    async with feed_with_four_batches() as (one, engine):
        slowly = asyncio.Event()

        async def waits(_: LoopYield) -> None:
            await slowly.wait()

        monkeypatch.setattr(LoopYield, "over", waits)
        await engine.send(4, payload(4))
        await engine.send(5, payload(5))
        engine.pub.close(linger=1000)  # what was sent arrives
        await until(lambda: not one.kv().known, lambda: "the loss to be noticed")
        slowly.set()
        await one.until_seq(5)
        assert holds(one, range(6))
        assert not one.kv().known


async def test_without_a_replay_the_next_number_proves_nothing() -> None:
    """Without a replay, the next batch number proves nothing: a restarted engine may have published
    as many batches as before.
    """
    for missed in (False, True):
        async with followed_publisher(replay=False, subscribed_s=0.01) as (one, engine, feed):
            await engine.send(0, payload(0))
            await until(lambda one=one: one.kv().known, lambda: "its first batch")
            engine.pub.close(linger=0)
            await until(lambda one=one: not one.kv().known, lambda: "the loss")
            await reconnect(one, engine)
            await until(lambda feed=feed: feed.counters.heard, lambda: "it to be back")
            assert not one.kv().known
            await engine.send(1 + missed, payload(1))
            await one.until_seq(1 + missed)
            await until(lambda one=one: not one.kv().resyncing, lambda: "what is missing")
            assert not one.kv().known
            assert holds(one, [0]) is not missed


async def test_without_a_replay_an_unchanged_process_start_proves_no_restart() -> None:
    for later, known in ((0.0, True), (5.0, False)):
        async with followed_publisher(replay=False, subscribed_s=0.01) as (one, engine, feed):
            tell = partial(report_process_start, one)
            tell(1_000.0)
            await engine.send(0, payload(0))
            await until(lambda one=one: one.kv().known, lambda: "its first batch")
            await reconnect(one, engine)
            await until(lambda one=one: one.kv().severed, lambda: "its return")
            tell(1_000.0 + later)  # may have been asked for before
            await engine.send(1, payload(1))
            await one.until_seq(1)
            assert not one.kv().known
            tell(1_000.0 + later)
            assert one.kv().known is known
            assert feed.counters.disconnects == 1


def report_process_start(one: Rig, started_s: float) -> None:
    one.world.core.on_load_report(LoadReport(0.0, 0, 0, 0, math.nan, started_s=started_s))


async def test_a_snapshot_alone_restores_the_cache_after_a_connection_loss() -> None:
    async with feed_line(replay=False, snapshot=True, subscribed_s=0.05) as one:
        await one.subscribed()
        await one.settled()
        taken = one.publisher.snapshots
        live = one.publisher.pub.getsockopt_string(zmq.LAST_ENDPOINT)
        context = one.publisher.pub.context
        one.publisher.pub.close(linger=0)
        await until(lambda: one.feed.counters.disconnects == 1, lambda: "the loss")
        one.publisher.next_seq = 1  # another life, which has published less
        one.publisher.others[0] = encode_batch(9.0, [wire(stored([0]))])
        one.publisher.pub = context.socket(zmq.PUB)
        await until(lambda: bind_if_free(one.publisher.pub, live), lambda: f"{live} to be free")
        await until(lambda: one.publisher.snapshots > taken, lambda: "the question")
        await until(lambda: one.kv.known and one.kv.resident_blocks == 1, lambda: "its cache")


async def test_at_a_bound_endpoint_a_loss_makes_all_caches_unknown_until_replayed() -> None:
    live = free_endpoint()
    async with rig(subscribed_s=0.01) as one, publisher(one.context, b"a") as replaying:
        source = bound(live, "a", replaying.replay)
        async with one.following(source) as feed, connecting(one, live, b"a") as engine:
            for seq in range(4):
                replaying.kept[seq] = payload(seq)
                await engine.send(seq, payload(seq))
            await until_known(one, 4)
            async with connecting(one, live, b"b") as another:
                await another.send(0, payload(0))
            await until(lambda: feed.counters.disconnects == 1, lambda: "the loss")
            await until_known(one, 4)
            assert holds(one, range(4))


async def test_without_a_replay_a_reconnect_forgets_no_block() -> None:
    async with followed_publisher(replay=False, subscribed_s=0.01) as (one, engine, feed):
        await engine.send(0, payload(0))
        await until(lambda: holds(one, [0]), lambda: "the block")
        await until(lambda: feed.counters.failed_syncs == 2, lambda: "the second look")
        await reconnect(one, engine)
        await engine.send(1, payload(1))
        await one.until_seq(1)
        assert holds(one, [0, 1])


async def test_a_publisher_that_starts_after_its_feed_is_asked_for_a_replay(
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


async def test_at_a_bound_endpoint_a_reconnect_replays_every_worker() -> None:
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


async def test_the_first_connection_is_not_a_reconnect() -> None:
    async with followed_publisher(subscribed_s=0.01) as (_, engine, feed):
        await until(lambda: feed.counters.replays == 2, lambda: "both looks")
        assert engine.asked == [0, 0]
