"""Tests of the link between replicas over a real Redis: messages arrive, and replicas know which
others are present.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from router.replicas.link import KEPT_ENTRIES, MAX_MESSAGE_BYTES
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.router.replicas.replica_support import Replica, all_present, fleet, until

pytestmark = needs_redis


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(autouse=True)
def empty(server: RedisServer) -> None:
    server.client().flushall()


async def test_a_message_reaches_all_other_replicas_once_and_in_order(server):
    async with fleet(server.url, "a", "b", "c") as (a, b, c):
        words = [b"%d" % number for number in range(100)]
        a.send(*words)
        c.send(b"other")
        await until(lambda: len(b.notes.heard) >= 101 and len(c.notes.heard) >= 100)
        assert [word for peer, word in b.notes.heard if peer == a.identity] == words
        assert c.notes.heard == [(a.identity, word) for word in words]
        assert a.notes.heard == [(c.identity, b"other")]
        assert [one.notes.joins for one in (a, b, c)] == [1, 1, 1]


async def test_a_single_replica_has_no_peers_and_no_errors(server):
    async with fleet(server.url, "a") as (a,):
        a.send(b"x")
        await until(lambda: a.link.counters.sent_messages == 1)
        assert a.notes.presence_calls == [frozenset()]


async def test_replicas_of_different_fleets_do_not_see_each_other(server):
    async with fleet(server.url, "a") as (a,), fleet(server.url, "b", fleet="other") as (b,):
        a.send(b"x")
        await until(lambda: a.link.counters.sent_messages == 1)
        beats = a.link.beats, b.link.beats
        await until(lambda: a.link.beats > beats[0] and b.link.beats > beats[1])
        assert [one.notes.peers for one in (a, b)] == [frozenset()] * 2
        assert not b.notes.heard


async def test_a_new_replica_is_seen_at_once_and_receives_later_messages(server):
    async with fleet(server.url, "a") as (a,):
        a.send(b"before")
        await until(lambda: a.link.counters.sent_messages == 1)
        a.link.membership.look = lambda *_: None  # only arrivals are noticed, since nothing looks
        b = Replica(server.url, "b")
        b.link.start()
        await until(b.has_peers(a))
        await until(a.has_peers(b))
        a.send(b"after")
        await until(b.received(b"after"))
        assert b.notes.messages() == [b"after"]
        await b.link.aclose()


async def test_a_replicas_goodbye_arrives_at_once_and_leaves_no_state(server):
    async with fleet(server.url, "a", "b") as (a, b):
        a.link.membership.look = lambda *_: None  # no peer lapses
        b.send(b"last")
        await b.link.aclose()
        await until(a.has_peers())
        assert a.received(b"last")()
        assert b.notes.leaves == 1
        client = server.client()
        assert client.hkeys("warmroute:{default}:replicas") == [a.identity.encode()]
        assert 0 < client.pttl(f"warmroute:{{default}}:stream:{b.identity}") <= 1_500
        assert a.link.membership.returned == 0


async def test_two_replicas_of_one_name_are_separate_peers(server):
    async with fleet(server.url, "a", "a") as (old, new):
        old.send(b"drains")
        new.send(b"serves")
        await until(old.received(b"serves"))
        await until(new.received(b"drains"))


async def test_a_dead_replica_is_removed_after_its_lease(server):
    async with fleet(server.url, "a", "b") as (a, b):
        b.link._running.cancel()  # as a kill does, without a goodbye
        assert await until(a.has_peers()) > 0.9
        client = server.client()
        await until(lambda: client.hlen("warmroute:{default}:replicas") == 1)
        assert a.link.membership.returned == 0


async def test_a_stream_keeps_a_bounded_number_of_entries(server):
    async with fleet(server.url, "a", flush_s=0.001) as (a,):
        a.send(*[b"x"] * (KEPT_ENTRIES * 2))
        await until(lambda: a.link.counters.sent_messages == KEPT_ENTRIES * 2)
        length = server.client().xlen(f"warmroute:{{default}}:stream:{a.identity}")
        assert KEPT_ENTRIES <= length < KEPT_ENTRIES * 1.3


async def test_a_stream_keeps_a_bounded_number_of_bytes(server):
    async with fleet(server.url, "a", "b", flush_s=0.001) as (a, b):
        big = bytes(MAX_MESSAGE_BYTES)
        a.send(*[big] * 100, b"end")
        await until(b.received(b"end"))
        assert len(b.notes.heard) == 101
        # A pause of the machine may cost the connection; the next one counts what it keeps again.
        connections = a.link.counters.reconnects
        kept = server.client().xlen(f"warmroute:{{default}}:stream:{a.identity}")
        assert kept <= 70 * connections
        assert kept < 101 or connections > 1


async def test_a_message_over_the_size_limit_is_dropped(server, caplog):
    async with fleet(server.url, "a", "b") as (a, b):
        a.send(bytes(MAX_MESSAGE_BYTES + 1), b"next")
        await until(b.received(b"next"))
        assert len(b.notes.heard) == 1
        assert a.link.counters.dropped == 1
    assert "too long" in caplog.text


async def test_foreign_entries_are_counted_and_ignored(server, caplog):
    async with fleet(server.url, "a", "b") as (a, b):
        client = server.client()
        said = f"warmroute:{{default}}:stream:{a.identity}"
        client.xadd(said, {"x": "y"})
        client.xadd(said, {"m": bytes(MAX_MESSAGE_BYTES + 1)})
        client.xadd(said, {"m": b"foreign", "more": b"x"})
        client.xadd("warmroute:{default}:arrivals", {"x": "y"})
        client.hset("warmroute:{default}:replicas", "nobody", "nothing")
        client.hset("warmroute:{default}:replicas", "a@0123456789abcdef", "[" * 10_000)
        a.send(b"proper")
        await until(b.received(b"proper"))
        await until(lambda: b.link.counters.malformed >= 6)
        assert b.notes.messages() == [b"proper"]
        assert b.link.counters.reconnects == 1
        await all_present(a, b)
    assert caplog.text.count("no replica's") < 20


async def test_a_stream_key_of_another_type_stops_no_other_stream(server):
    async with fleet(server.url, "a", "b", "c") as (a, b, c):
        client = server.client()
        said = f"warmroute:{{default}}:stream:{c.identity}"
        c.link._running.cancel()
        await asyncio.wait([c.link._running])
        client.delete(said)
        client.set(said, "a text")
        d = Replica(server.url, "d")
        d.link.start()
        await until(lambda: d.link.counters.malformed > 0)
        a.send(b"goes on")
        await until(d.received(b"goes on"))
        await until(b.received(b"goes on"))
        assert d.link.counters.reconnects == 1
        await d.link.aclose()


async def test_a_lapsed_registry_entry_is_restored_without_harm(server):
    async with fleet(server.url, "a", "b", lease_s=20.0) as (a, b):
        told_before = len(b.notes.presence_calls)  # b may have been present before a
        for _ in range(3):
            lapses = b.link.counters.lapses
            server.client().delete("warmroute:{default}:replicas")
            await until(lambda lapses=lapses: b.link.counters.lapses > lapses)
        a.send(b"still")
        await until(b.received(b"still"))
        assert b.notes.presence_calls[-1] == {a.identity}
        assert len(b.notes.presence_calls) == told_before, "nobody was gone meanwhile"
        assert (a.notes.joins, a.notes.parts) == (1, 0)


async def test_a_flushed_redis_does_no_harm(server):
    async with fleet(server.url, "a", "b") as (a, b):
        client = server.client()
        for number in range(5):
            client.flushall()
            word = b"%d" % number
            a.send(word)
            beats = a.link.beats
            await until(lambda beats=beats: a.link.beats > beats)
        a.send(b"end")
        await until(b.received(b"end"))
        assert b.has_peers(a)()
        assert (b.notes.joins, b.notes.parts) == (1, 0)
