"""Property tests of leases: after any history of answers, losses and time there are never two
holders by anyone's clock.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from router.replicas.lease import MOST_LEASES, Lease, Leases
from router.replicas.membership import Keys
from tests.router.replicas.lease_support import LEASE_S, Server, Timers


class Holder:
    """A replica that wants one lease. Lifetime: one history."""

    def __init__(self, name: str, offset_s: float = 0.0) -> None:
        self.timers = Timers()
        self.timers.now_s = offset_s
        self.fences: list[int | None] = []
        clock, call_at = (lambda: self.timers.now_s), self.timers.call_at
        self.leases = Leases(Keys("f"), name, LEASE_S, clock, call_at)
        self.lease: Lease = self.leases.acquire("it", self.on_fence)

    def on_fence(self, token: int | None) -> None:
        assert self.lease.fence == token, "what is told is so"
        self.fences.append(token)

    def renew(self, server: Server, *, answered: bool = True) -> None:
        asked, commands = self.leases.commands()
        asked_s = self.timers.now_s
        replies = [server.run(command) for command in commands]
        if answered:
            self.leases.read_replies(asked, replies, asked_s)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "unheard", "stopped", "late", "drop"]),
        st.integers(0, 2),
        st.floats(0.0, 4.0),
    ),
    max_size=40,
)


@given(STEPS, st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3))
def test_a_lease_never_has_two_holders_and_tokens_only_grow(steps, offsets):
    server = Server()
    holders = [Holder(f"r{n}@{n:016x}", offset) for n, offset in enumerate(offsets)]
    greatest = 0
    for step, who, seconds in steps:
        holder = holders[who]
        if step in ("ask", "unheard"):
            holder.renew(server, answered=step == "ask")
        elif step == "drop" and holder.lease is not None:
            holder.leases.drop(holder.lease)
            holder.lease = holder.leases.acquire("it", holder.on_fence)
        elif step == "late":  # the answer comes after all that time
            asked, commands = holder.leases.commands()
            asked_s = holder.timers.now_s
            replies = [server.run(command) for command in commands]
            server.now_s += seconds
            for other in holders:
                if other is holder:
                    other.timers.now_s += seconds  # its timer is as late
                else:
                    other.timers.pass_s(seconds)
            holder.leases.read_replies(asked, replies, asked_s)
        server.now_s += seconds
        for other in holders:
            if step == "stopped" and other is holder:
                other.timers.now_s += seconds  # its clock advances, but its timer does not ring
            else:
                other.timers.pass_s(seconds)
        tokens = [one.lease.fence for one in holders if one.lease.fence is not None]
        assert len(tokens) <= 1
        for token in tokens:
            key = Keys("f").lease("it")
            assert server.held[key][1] == token
            assert server.held[key][2] > server.now_s
            assert token >= greatest
            greatest = token
    for holder in holders:
        taken = [token for token in holder.fences if token is not None]
        assert taken == sorted(taken)
        assert all(a is not None or b is not None for a, b in pairwise(holder.fences))


def test_a_lease_expires_on_time_even_if_redis_no_longer_answers():
    server, holder = Server(), Holder("a@0")
    holder.renew(server)
    assert holder.fences == [1]
    holder.timers.pass_s(2.69)
    assert holder.lease.fence == 1
    holder.timers.pass_s(0.02)
    assert holder.fences == [1, None]
    holder.renew(server)  # still no other replica has it
    assert holder.fences == [1, None, 1]


def test_a_lease_that_redis_refuses_has_no_holder(caplog):
    holder = Holder("a@0")
    asked, commands = holder.leases.commands()
    holder.leases.read_replies(asked, [ResponseError("WRONGTYPE ...")] * len(commands), 0.0)
    assert holder.fences == []
    assert holder.leases.refused == 1
    assert "no replica can get the lease of it: redis has something else" in caplog.text


def test_goodbye_releases_held_leases():
    server, holder, next_one = Server(), Holder("a@0"), Holder("b@0")
    holder.renew(server)
    for command in holder.leases.goodbye():
        server.run(command)
    assert holder.fences == [1, None]
    next_one.renew(server)
    assert next_one.fences == [2]


def test_invalid_or_too_many_leases_are_refused():
    holder = Holder("a@0")
    for what in ("it", "", "x" * 5_000):
        with pytest.raises(ValueError, match="wanted already, empty, or too long"):
            holder.leases.acquire(what, holder.fences.append)
    for number in range(MOST_LEASES - 1):
        holder.leases.acquire(str(number), holder.fences.append)
    with pytest.raises(ValueError, match="leases are wanted already"):
        holder.leases.acquire("more", holder.fences.append)
