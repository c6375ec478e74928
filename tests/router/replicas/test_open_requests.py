"""Tests of what a router tells its successor about its open requests: they are charged in the
successor's core until they end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from policies.facts import Finish, FirstToken, LoadReport, Progress
from router.core.core import RequestListener, take
from router.replicas.former import FormerRouters, OpenRequestReporter
from router.restart.hot_restart import HEAD
from tests.router.core.core_world import World
from tests.router.waiting import until


def clock() -> float:
    return asyncio.get_running_loop().time()


def former_of(world: World, shares: str = "") -> FormerRouters:
    return FormerRouters(world.core, lambda fact: take(world.core, fact), clock, shares)


def requests(world: World) -> list[int]:
    """Return the number of requests charged to each worker."""
    return [int(world.core.columns.requests[w.slot]) for w in world.core.workers]


def dispatched(world: World, blocks: list[int]) -> int:
    arrival = world.arrival(blocks, stream=True)
    take(world.core, arrival)
    return arrival.request_id


def finished(world: World, request_id: int) -> None:
    take(world.core, Finish(world.now_s, request_id, 8, 0, 4))


@asynccontextmanager
async def reporting(world: World) -> AsyncIterator[tuple[OpenRequestReporter, socket.socket]]:
    """Yield a router's started `OpenRequestReporter`, which reports its open requests, and the
    other end of its connection.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    teller = OpenRequestReporter(ours, world.core, clock)
    teller.start()
    try:
        yield teller, theirs
    finally:
        await teller.aclose()


def charges_agree(old: World, new: World) -> bool:
    names = ("requests", "waiting", "context_tokens")
    ours, theirs = ([getattr(w.core.columns, name) for name in names] for w in (old, new))
    return all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))


async def test_open_requests_are_charged_at_the_successor_until_they_end() -> None:
    old, new = World(), World()
    first, second = (dispatched(old, [n, n + 1]) for n in (1, 5))
    take(old.core, FirstToken(0.1, first))
    take(old.core, Progress(0.2, first, 90))
    async with reporting(old) as (teller, line):
        former = former_of(new)
        await former.follow(line, "")
        assert (len(former), former.requests) == (1, 2)
        assert charges_agree(old, new)
        third = dispatched(old, [9, 10])
        take(old.core, FirstToken(0.3, second))
        await until(lambda: charges_agree(old, new), "a new request and a first token")
        await teller.handed()
        await former.wait_until_gone()
        former.serve(())
        for request_id in (first, second):
            finished(old, request_id)
        await until(lambda: charges_agree(old, new), "two ends")
        assert sum(requests(new)) == 1
    assert type(old.core.listener) is RequestListener
    await until(lambda: len(former) == 0, "its end")
    assert requests(new) == [0, 0, 0], "what it had left is released with it"
    finished(old, third)


async def test_a_successor_with_shared_state_does_not_count_requests_twice() -> None:
    old, new = World(), World()
    dispatched(old, [1, 2])
    async with reporting(old) as (teller, line):
        former = former_of(new, shares="fleet redis://r")
        await former.follow(line, "fleet redis://r")
        await teller.handed()
        await former.wait_until_gone()
        assert (len(former), former.requests, requests(new)) == (1, 0, [0, 0, 0])
        await former.aclose()


async def test_the_third_router_continues_the_firsts_requests_after_the_second() -> None:
    old, second, third = World(), World(), World()
    dispatched(old, [1, 2])
    async with reporting(old) as (teller, line):
        former = former_of(second)
        await former.follow(line, "")
        await teller.handed()
        former.serve(())
        dispatched(old, [5, 6])
        await until(lambda: charges_agree(old, second), "both at the second")
        passed_on = [(one.dup(), shares) for one, shares in former.lines()]
        for n in range(200):  # many messages are on their way
            finished(old, dispatched(old, [n, n + 1]))
        await former.leave()
        assert (len(former), requests(second)) == (0, [0, 0, 0])
        last = former_of(third)
        last.serve(passed_on)
        await until(lambda: charges_agree(old, third), "both at the third")
        assert last.requests == 2
        finished(old, 1)
        await until(lambda: sum(requests(third)) == 1, "an end")
        await last.aclose()


async def test_requests_in_a_workers_load_report_are_not_counted_twice() -> None:
    old, new = World(workers=1), World(workers=1)
    for n in range(3):
        dispatched(old, [n, n + 1])
    slot = next(iter(new.core.workers)).slot
    take(new.core, LoadReport(0.0, 0, 3, 2, 0.0))
    columns = new.core.columns
    assert columns.foreign_running[slot] + columns.foreign_waiting[slot] == 5
    async with reporting(old) as (_, line):
        former = former_of(new)
        await former.follow(line, "")
        assert columns.requests[slot] == 3
        assert columns.foreign_running[slot] + columns.foreign_waiting[slot] == 2
        dispatched(old, [7, 8])
        await until(lambda: columns.requests[slot] == 4, "a request of now")
        assert columns.foreign_running[slot] + columns.foreign_waiting[slot] == 2
        await former.aclose()


async def test_an_unreadable_message_ends_the_link_and_releases_all_requests(caplog) -> None:
    caplog.set_level("INFO")
    for bad, why in (
        (HEAD.pack(3) + b"abc", "Expected"),
        (HEAD.pack(1 << 30), f"a message of {1 << 30} bytes"),
        (HEAD.pack(9) + b"a", "it hung up within a message"),
    ):
        old, new = World(), World()
        dispatched(old, [1, 2])
        ours, theirs = socket.socketpair()
        teller = OpenRequestReporter(ours, old.core, clock)
        ours.setblocking(False)
        teller.start()
        former = former_of(new)
        await former.follow(theirs, "")
        assert sum(requests(new)) == 1
        other = ours.dup()
        await teller.aclose()
        other.setblocking(True)
        other.sendall(bad)
        other.close()
        await until(lambda former=former: len(former) == 0, "its end")
        assert requests(new) == [0, 0, 0]
        assert why in caplog.text


async def test_a_successor_that_missed_a_message_requests_the_full_state() -> None:
    old, new = World(), World()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    teller = OpenRequestReporter(ours, old.core, clock)
    dispatched(old, [1, 2])
    teller.start()
    first = await asyncio.to_thread(theirs.recv, 1 << 16)  # this message is lost
    assert first
    await teller.handed()
    former = former_of(new)
    former.serve([(theirs, "")])
    await until(partial(charges_agree, old, new), "all to be known")
    await teller.aclose()
    await until(lambda: len(former) == 0, "its end")
    assert requests(new) == [0, 0, 0]
