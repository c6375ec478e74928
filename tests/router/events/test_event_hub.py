"""Tests of one reader of sockets for several feeds: how feeds are registered, limits, and a reader
that fails.
"""

from __future__ import annotations

import asyncio

import pytest

from router.events.delivery import ReaderQueue, SharedReader, SharedReaders

ADDRESS = "tcp://127.0.0.1:5557"


class Reader:
    """Gives feeds the messages that the test puts into its queue. Lifetime: test."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[str, object] | Exception] = asyncio.Queue()
        self.started = 0
        self.cancelled = 0

    async def read(self, hub: SharedReader) -> None:
        self.started += 1
        try:
            while True:
                message = await self.messages.get()
                if isinstance(message, Exception):
                    raise message
                hub.give(*message)
                self.messages.task_done()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def give(self, key: str, *messages: object) -> None:
        for message in messages:
            self.messages.put_nowait((key, message))
        await self.messages.join()


async def receive_until_error(seat: ReaderQueue) -> None:
    while True:
        await seat.receive()


def fail_if_dropped() -> None:
    raise AssertionError("there was room")


async def test_each_feed_gets_its_own_messages() -> None:
    hubs, reader = SharedReaders(), Reader()
    async with (
        hubs.joined(ADDRESS, "a", 5, fail_if_dropped, reader.read) as a,
        hubs.joined(ADDRESS, "b", 5, fail_if_dropped, reader.read) as b,
    ):
        await reader.give("a", 1, 2)
        await reader.give("b", 3)
        assert [await a.receive(), await a.receive(), await b.receive()] == [1, 2, 3]
        assert reader.started == len(hubs) == 1
    assert (reader.cancelled, len(hubs)) == (1, 0)


async def test_a_slow_feed_drops_messages_above_its_limit_and_delays_no_other() -> None:
    hubs, reader, dropped = SharedReaders(), Reader(), []
    async with (
        hubs.joined(ADDRESS, "slow", 2, lambda: dropped.append(1), reader.read) as slow,
        hubs.joined(ADDRESS, "quick", 2, fail_if_dropped, reader.read) as quick,
    ):
        await reader.give("slow", *range(5))
        await reader.give("quick", "x")
        assert await quick.receive() == "x"
        assert len(dropped) == 3
        assert [await slow.receive(), await slow.receive()] == [0, 1]


async def test_unassigned_messages_are_logged_at_powers_of_two(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hubs, reader = SharedReaders(), Reader()
    async with hubs.joined(ADDRESS, "a", 5, fail_if_dropped, reader.read):
        await reader.give("b" * 500, *range(9))
    told = [record.getMessage() for record in caplog.records]
    assert [line.split()[1] for line in told] == ["1", "2", "4", "8"]
    assert all(ADDRESS in line and len(line) < 300 for line in told)


@pytest.mark.parametrize("waiting", [0, 2], ids=["empty", "full"])
async def test_a_failed_reader_ends_its_feeds_and_the_next_feed_starts_a_new_one(
    waiting: int,
) -> None:
    hubs, reader = SharedReaders(), Reader()
    async with hubs.joined(ADDRESS, "a", 2, fail_if_dropped, reader.read) as seat:
        await reader.give("a", *range(waiting))
        reader.messages.put_nowait(OSError("broken on purpose"))
        with pytest.raises(OSError, match="broken on purpose"):
            await receive_until_error(seat)
        async with hubs.joined(ADDRESS, "a", 2, fail_if_dropped, reader.read) as again:
            reader.messages.put_nowait(("a", 7))
            assert await again.receive() == 7
    assert reader.started == 2
    assert len(hubs) == 0


async def test_two_feeds_cannot_share_a_topic() -> None:
    hubs, reader = SharedReaders(), Reader()
    async with hubs.joined(ADDRESS, "a", 5, fail_if_dropped, reader.read):
        with pytest.raises(ValueError, match=f"two workers take the events of 'a' at {ADDRESS}"):
            async with hubs.joined(ADDRESS, "a", 5, fail_if_dropped, reader.read):
                pass
        async with hubs.joined("ipc:///elsewhere", "a", 5, fail_if_dropped, reader.read):
            assert len(hubs) == 2


async def test_a_reader_that_returns_makes_receive_fail() -> None:
    async def nothing(hub: SharedReader) -> None:
        return

    hubs = SharedReaders()
    async with hubs.joined(ADDRESS, "a", 5, fail_if_dropped, nothing) as seat:
        with pytest.raises(RuntimeError, match="nobody reads"):
            await seat.receive()
