"""Leases by a real Redis: one holder at a time, whatever becomes of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from router.replicas.peers import Keys
from tests.frozen import freeze
from tests.live.lease_holder import LeaseHolder
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.router.replica_support import Replica, fleet, until

pytestmark = needs_redis
KEY = Keys("default").lease("it")


@pytest.fixture
def server(tmp_path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


class Wish:
    """What a replica is told of its lease. Lifetime: test."""

    def __init__(self, replica: Replica) -> None:
        self.told: list[int | None] = []
        self.leases = replica.link.place.leases
        self.lease = self.leases.want("it", self.told.append)


async def test_one_has_it_and_the_next_one_gets_it_at_once_after_a_goodbye(server):
    async with fleet(server.url, "a", "b", "c") as replicas:
        wishes = [Wish(replica) for replica in replicas]
        tokens = []
        for left in (3, 2, 1):
            await until(lambda: any(wish.lease.fence is not None for wish in wishes))
            (holder,) = [n for n, wish in enumerate(wishes) if wish.lease.fence is not None]
            tokens.append(wishes[holder].lease.fence)
            assert server.client().get(KEY).decode().endswith(f" {tokens[-1]}")
            wish, replica = wishes.pop(holder), replicas.pop(holder)
            await replica.link.aclose()
            assert wish.told == [tokens[-1], None]
            assert len(wishes) == left - 1
        assert tokens == sorted(set(tokens))
        assert server.client().get(KEY) is None


async def test_it_goes_on_over_many_times_its_length(server):
    async with fleet(server.url, "a", "b", lease_s=1.0) as (a, b):
        first = Wish(a)
        await until(lambda: first.lease.fence is not None)
        second = Wish(b)
        beats = b.link.place.beats
        await until(lambda: b.link.place.beats >= beats + 6)
        assert (len(first.told), second.told) == (1, [])


async def test_redis_away_takes_it_and_redis_empty_gives_it_anew(server):
    async with fleet(server.url, "a", "b") as (a, b):
        wishes = [Wish(a), Wish(b)]
        await until(lambda: any(wish.lease.fence for wish in wishes))
        first = max(wish.lease.fence or 0 for wish in wishes)
        server.kill()
        await until(lambda: not any(wish.lease.fence for wish in wishes))
        assert sorted(map(len, (wish.told for wish in wishes))) == [0, 2]
        server.start()
        await until(lambda: any(wish.lease.fence for wish in wishes))
        again = max(wish.lease.fence or 0 for wish in wishes)
        assert again > first, "tokens grow though Redis forgot them"


async def test_a_holder_that_was_stopped_knows_at_once_that_it_lost_it(server):
    holder = await LeaseHolder.start(server.url, 1.5)
    _, first = await holder.says()
    assert first is not None
    freeze(holder.process.pid)
    async with fleet(server.url, "other") as (other,):
        wish = Wish(other)
        await until(lambda: wish.lease.fence is not None)
        holder.ask()  # it is asked before anything else, once it runs again
        holder.process.send_signal(signal.SIGCONT)
        said = [await holder.says() for _ in range(2)]
        assert sorted(said) == [("asked", None), ("told", None)]
        assert wish.lease.fence is not None
        assert wish.lease.fence > first
        await holder.end()
        assert holder.process.returncode == 0


async def test_a_key_of_another_type_is_nobodys_and_harms_nothing_else(server, caplog):
    server.client().hset(KEY, "x", "y")
    async with fleet(server.url, "a", "b") as (a, b):
        wish = Wish(a)
        await until(lambda: a.link.place.leases.refused > 0)
        assert wish.told == []
        a.say(b"goes on")
        await until(b.hears(b"goes on"))
        server.client().delete(KEY)
        await until(lambda: wish.lease.fence is not None)
    assert "nobody can have the lease of it" in caplog.text
