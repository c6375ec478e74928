"""Tests of engines that connect to an endpoint which the router binds; the router tells them apart
by topic.
"""

from __future__ import annotations

import socket
import struct

import pytest

from tests.router.events.feed_endpoints import bound, connecting, free_endpoint
from tests.router.events.feed_wire import (
    chain_of,
    pack,
    publisher,
    rig,
    until,
)

TOKENS = [1, 2, 3, 4]
CHAIN = chain_of(TOKENS, 2)
OTHER = chain_of([9, 9], 2)


def stored(name: int, parent: int | None, tokens: list[int]) -> bytes:
    """Return a batch with one store event in the form of vLLM 0.20."""
    return pack(["BlockStored", [name], parent, tokens, 2, None, "GPU", None, None, 0])


async def test_two_engines_at_one_endpoint_are_distinguished_by_topic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    live = free_endpoint()
    async with (
        rig() as one,
        one.following(bound(live, "kv@10.0.0.1:8000@m"), 0),
        one.following(bound(live, "kv@10.0.0.1:8000@m2"), 1),
        connecting(one, live, b"kv@10.0.0.1:8000@m") as first,
        connecting(one, live, b"kv@10.0.0.1:8000@m2") as second,
        connecting(one, live, b"kv@10.0.0.1") as stranger,
    ):
        assert len(one.readers) == 1
        await stranger.send(0, stored(5, None, [9, 9]))
        await first.send(0, stored(11, None, TOKENS[:2]))
        await second.send(0, stored(11, None, [9, 9]))
        await first.send(1, stored(12, 11, TOKENS[2:]))
        await one.until_hit(CHAIN, 2, worker_id=0)
        await one.until_hit(OTHER, 1, worker_id=1)
        await until(lambda: "no worker is to have" in caplog.text, lambda: "a line")
        assert "kv@10.0.0.1'" in caplog.text
        assert one.hit(OTHER, worker_id=0) == one.hit(CHAIN, worker_id=1) == 0
        for worker_id in (0, 1):
            assert one.kv(worker_id).known
            assert one.kv(worker_id).counters.restarts == 0


async def test_a_gap_is_replayed_by_its_own_engine() -> None:
    live = free_endpoint()
    async with (
        rig() as one,
        publisher(one.context, b"b") as replaying,
        one.following(bound(live, "a"), 0),
        one.following(bound(live, "b", replaying.replay), 1) as feed,
        connecting(one, live, b"b") as engine,
    ):
        await until(lambda: feed.counters.replays == 1, lambda: "the first replay")
        for seq, payload in enumerate([stored(11, None, TOKENS[:2]), stored(12, 11, TOKENS[2:])]):
            replaying.kept[seq] = payload
        await engine.send(1, replaying.kept[1])
        await one.until_hit(CHAIN, 2, worker_id=1)
        assert one.kv(1).known


async def test_the_endpoint_is_bound_while_any_worker_uses_it() -> None:
    live = free_endpoint()
    async with rig() as one:
        async with one.following(bound(live, "a"), 0):
            async with one.following(bound(live, "b"), 1):
                await until(lambda: len(one.readers) == 1, lambda: "the endpoint")
            async with connecting(one, live, b"a") as engine:
                await engine.send(0, stored(11, None, TOKENS[:2]))
                await one.until_hit(CHAIN, 1)
        assert len(one.readers) == 0
        # And again, at once: the closed socket may hold the address for a moment yet.
        async with one.following(bound(live, "a"), 0), connecting(one, live, b"a") as engine:
            await engine.send(0, stored(11, None, TOKENS[:2]))
            await one.until_hit(CHAIN, 1)


async def test_binding_an_address_in_use_is_retried_until_it_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Not a socket of ZMQ: that closes some time after it is told to, and an engine that reaches it
    # meanwhile gives up, since publishers do not talk to each other.
    async with rig() as one:
        holder = socket.create_server(("127.0.0.1", 0))
        live = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        async with one.following(bound(live, "a"), 0):
            await until(lambda: "cannot bind" in caplog.text, lambda: "a line")
            assert live in caplog.text
            holder.close()
            async with connecting(one, live, b"a") as engine:
                await engine.send(0, stored(11, None, TOKENS[:2]))
                await one.until_hit(CHAIN, 1)


async def test_two_workers_cannot_have_the_same_topic() -> None:
    live = free_endpoint()
    async with rig() as one, one.following(bound(live, "a"), 0):
        await until(lambda: len(one.readers) == 1, lambda: "the endpoint")
        second = one.opened(bound(live, "a"), 1)
        with pytest.raises(ValueError, match=r"two workers take the events of 'a' at tcp://"):
            await second.run()


async def test_malformed_frames_are_counted() -> None:
    live = free_endpoint()
    async with (
        rig() as one,
        one.following(bound(live, "a"), 0) as feed,
        connecting(one, live, b"a") as engine,
    ):
        for frames in ([b"a"], [b"a", b"short", b""], [b"\xff\xfe", b"", b""], [b""] * 9):
            await engine.pub.send_multipart(frames)
        await engine.pub.send_multipart([b"a", struct.pack(">Q", 0), stored(1, None, TOKENS[:2])])
        await one.until_hit(CHAIN, 1)
        assert feed.counters.malformed_frames == 2  # the others name no worker
