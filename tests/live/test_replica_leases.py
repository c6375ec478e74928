"""Tests of leases in a real Redis: at most one replica holds a lease, whatever happens to Redis or
the holder.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from router.replicas.membership import Keys
from tests.frozen import freeze
from tests.live.lease_holder import LeaseHolder
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.router.replicas.replica_support import Replica, fleet, until

pytestmark = needs_redis
KEY = Keys("default").lease("it")


@pytest.fixture
def server(tmp_path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


class Loan:
    """Records what a lease reports to its replica. Lifetime: test."""

    def __init__(self, replica: Replica) -> None:
        self.told: list[int | None] = []
        self.leases = replica.link.leases
        self.lease = self.leases.acquire("it", self.told.append)


async def test_the_next_replica_gets_the_lease_at_once_when_its_holder_leaves(server):
    async with fleet(server.url, "a", "b", "c") as replicas:
        wishes = [Loan(replica) for replica in replicas]
        tokens = []
        for left in (3, 2, 1):
            await until(lambda: any(loan.lease.fence is not None for loan in wishes))
            (holder,) = [n for n, loan in enumerate(wishes) if loan.lease.fence is not None]
            tokens.append(wishes[holder].lease.fence)
            assert server.client().get(KEY).decode().endswith(f" {tokens[-1]}")
            loan, replica = wishes.pop(holder), replicas.pop(holder)
            await replica.link.aclose()
            assert loan.told == [tokens[-1], None]
            assert len(wishes) == left - 1
        assert tokens == sorted(set(tokens))
        assert server.client().get(KEY) is None


async def test_a_lease_is_renewed_many_times(server):
    async with fleet(server.url, "a", "b", lease_s=1.0) as (a, b):
        first = Loan(a)
        await until(lambda: first.lease.fence is not None)
        second = Loan(b)
        beats = b.link.beats
        await until(lambda: b.link.beats >= beats + 6)
        assert (len(first.told), second.told) == (1, [])


async def test_a_lease_ends_while_redis_is_down_and_is_granted_again_afterwards(server):
    async with fleet(server.url, "a", "b") as (a, b):
        wishes = [Loan(a), Loan(b)]
        await until(lambda: any(loan.lease.fence for loan in wishes))
        first = max(loan.lease.fence or 0 for loan in wishes)
        server.kill()
        await until(lambda: all(loan.told[-1:] in ([], [None]) for loan in wishes))
        assert not any(loan.lease.fence for loan in wishes)
        # Each is told once, also if a pause before the end of Redis took the lease and gave it
        # again.
        told = [word for loan in wishes for word in loan.told]
        assert first in told
        assert [word is None for word in told] == [False, True] * (len(told) // 2)
        server.start()
        await until(lambda: any(loan.lease.fence for loan in wishes))
        again = max(loan.lease.fence or 0 for loan in wishes)
        assert again > first, "tokens grow though Redis forgot them"


async def test_a_holder_that_was_stopped_knows_at_once_that_its_lease_is_lost(server):
    holder = await LeaseHolder.start(server.url, 1.5)
    _, first = await holder.next_line()
    assert first is not None
    freeze(holder.process.pid)
    async with fleet(server.url, "other") as (other,):
        loan = Loan(other)
        await until(lambda: loan.lease.fence is not None)
        holder.ask()  # the question comes first when it runs again
        holder.process.send_signal(signal.SIGCONT)
        said = [await holder.next_line() for _ in range(2)]
        assert sorted(said) == [("asked", None), ("told", None)]
        assert loan.lease.fence is not None
        assert loan.lease.fence > first
        await holder.end()
        assert holder.process.returncode == 0


async def test_a_lease_key_of_another_type_has_no_holder_and_does_no_other_harm(server, caplog):
    server.client().hset(KEY, "x", "y")
    async with fleet(server.url, "a", "b") as (a, b):
        loan = Loan(a)
        await until(lambda: a.link.leases.refused > 0)
        assert loan.told == []
        a.send(b"goes on")
        await until(b.received(b"goes on"))
        server.client().delete(KEY)
        await until(lambda: loan.lease.fence is not None)
    assert "no replica can get the lease of it" in caplog.text
