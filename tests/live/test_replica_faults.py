"""Tests of a Redis that goes away, comes back or refuses: links end with a named reason and
reconnect by themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.pauses import running_s
from tests.router.replicas.replica_support import Replica, all_present, fleet, until

pytestmark = needs_redis
DETECTED_S = 1.5
BACK_S = 2.0
SLACK_S = 4.0  # for a busy machine


@pytest.fixture
def server(tmp_path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


def all_part(*replicas: Replica):
    return lambda: not any(replica.link.up for replica in replicas)


async def until_messages_pass_both_ways(a: Replica, b: Replica) -> None:
    a.send(b"from a")
    b.send(b"from b")
    await until(b.received(b"from a"))
    await until(a.received(b"from b"))


async def test_replicas_reconnect_after_redis_was_killed_and_restarted_empty(server, caplog):
    caplog.set_level(logging.INFO)
    async with fleet(server.url, "a", "b") as (a, b):
        for times in (1, 2):
            server.kill()
            assert await running_s(until(all_part(a, b))) < DETECTED_S + SLACK_S
            assert a.has_peers(b)(), "what is known stays"
            assert a.link.stale_s >= 0.0
            server.start()
            assert await running_s(all_present(a, b)) < BACK_S + SLACK_S
            await until_messages_pass_both_ways(a, b)
            a.notes.heard.clear()
            b.notes.heard.clear()
            assert (a.notes.parts, a.notes.joins) == (times, times + 1)
        assert a.notes.presence_calls[1:] == [{b.identity}] * len(a.notes.presence_calls[1:])
    lost = [r for r in caplog.records if "continues with its last known state" in r.getMessage()]
    assert 4 <= len(lost) <= 12, "one line for each change, not for each attempt"


async def test_replicas_part_while_redis_is_paused_and_reconnect_afterwards(server):
    async with fleet(server.url, "a", "b") as (a, b):
        server.pause()
        assert await running_s(until(all_part(a, b))) < DETECTED_S + SLACK_S
        a.send(b"into the void")
        server.go_on()
        assert await running_s(all_present(a, b)) < BACK_S + SLACK_S
        await until_messages_pass_both_ways(a, b)


async def test_a_short_pause_is_not_noticed(server):
    async with fleet(server.url, "a", "b") as (a, b):
        server.pause()
        await asyncio.sleep(0.2)
        server.go_on()
        await until_messages_pass_both_ways(a, b)
        assert a.notes.parts + b.notes.parts == 0


async def test_replicas_connect_when_redis_starts_after_them(server, caplog):
    server.kill()
    a, b = Replica(server.url, "a"), Replica(server.url, "b")
    for replica in (a, b):
        await replica.link.agree()
        replica.link.start()
    await until(lambda: caplog.text.count("the connection is refused") == 2)
    assert a.link.down_since_s is not None
    server.start()
    await all_present(a, b)
    await until_messages_pass_both_ways(a, b)
    await asyncio.gather(a.link.aclose(), b.link.aclose())


async def test_a_required_or_changed_password_is_reported(server, caplog):
    client = server.client()
    client.config_set("requirepass", "first")
    url = server.url.replace("://", "://:{}@")
    wrong, right = Replica(url.format("wrong"), "w"), Replica(url.format("first"), "r")
    none = Replica(server.url, "n")
    for replica in (wrong, right, none):
        replica.link.start()
    await until(lambda: "refuses the user or password" in caplog.text)
    await until(lambda: "asks for a password" in caplog.text)
    await until(lambda: right.link.up)
    assert not wrong.link.up
    assert not none.link.up
    client = server.client(password="first")
    client.config_set("requirepass", "wrong")  # from now on this password is required
    await until(lambda: wrong.link.up)
    client.client_kill_filter(_type="normal", skipme=True)
    await until(lambda: not right.link.up)
    await until(lambda: wrong.link.up)
    assert "first" not in caplog.text.replace("first_", "")
    await asyncio.gather(*(one.link.aclose() for one in (wrong, right, none)))


async def test_a_password_for_a_redis_without_one_is_reported(server, caplog):
    a = Replica(server.url.replace("://", "://user:secret@"), "a")
    await a.link.agree()
    assert "refuses the user or password" in caplog.text
    b = Replica(server.url.replace("://", "://:secret@"), "b")
    await b.link.agree()
    assert "has no password, and one is given" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("spoil", "mend", "told"),
    [
        (["replicaof", "127.0.0.1", "1"], ["replicaof", "no", "one"], "read-only replica"),
        (["config", "set", "maxmemory", "1"], ["config", "set", "maxmemory", "0"], "maxmemory"),
        (
            ["acl", "setuser", "default", "-xadd"],
            ["acl", "setuser", "default", "+xadd"],
            "lets this user not do",
        ),
        (
            ["acl", "setuser", "default", "resetkeys"],
            ["acl", "setuser", "default", "allkeys"],
            "lets this user not do",
        ),
    ],
)
async def test_refused_writes_take_the_link_down_and_are_logged(server, caplog, spoil, mend, told):
    async with fleet(server.url, "a", "b") as (a, b):
        client = server.client()
        client.execute_command(*spoil)
        a.send(b"refused")
        b.send(b"refused")
        await until(all_part(a, b))
        assert told in caplog.text
        reconnects = a.link.counters.reconnects
        client.execute_command(*mend)
        await all_present(a, b)
        await until_messages_pass_both_ways(a, b)
        assert a.link.counters.reconnects == reconnects + 1


@pytest.mark.parametrize("key", ["replicas", "arrivals"])
async def test_a_key_of_another_type_is_reported(server, caplog, key):
    client = server.client()
    client.set(f"warmroute:{{default}}:{key}", "a text")
    a = Replica(server.url, "a")
    await a.link.agree()
    a.link.start()
    await until(lambda: "has something else under a key of this fleet" in caplog.text)
    client.delete(f"warmroute:{{default}}:{key}")
    await until(lambda: a.link.up)
    await a.link.aclose()


async def test_a_stream_whose_message_numbers_go_back_is_still_read(server):
    """A stream is read on when its message numbers go back, as after Redis lost all data and its
    clock was set back.
    """
    async with fleet(server.url, "a", "b") as (a, b):
        client = server.client()
        said = f"warmroute:{{default}}:stream:{b.identity}"
        client.xadd(said, {"m": "of the future"}, id="99999999999999-0")
        await until(a.received(b"of the future"))
        client.delete(said)
        b.send(b"unheard at first")
        await until(a.received(b"unheard at first"))
        assert (a.notes.joins, a.notes.parts) == (1, 0)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":1\r\n" * 9, b"*-1\r\n" * 9, b"$9" * 99, b""]
)
async def test_a_server_that_is_not_redis_is_reported(caplog, answer):
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(100):
            if not answer:
                break
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    a = Replica(f"redis://127.0.0.1:{port}", "a")
    await a.link.agree()
    assert "continues with its last known state" in caplog.text
    caplog.clear()
    tried = a.link._attempts
    a.link.start()
    await until(lambda: a.link._attempts >= tried + 3)
    assert not a.link._running.done()
    assert not a.link.up
    await a.link.aclose()
    server.close()


async def test_closing_the_link_is_quick_while_redis_is_paused_or_down(server):
    async with fleet(server.url, "a", "b") as (a, b):
        server.pause()
        assert await running_s(a.link.aclose()) < 1.0 + SLACK_S
        server.kill()
        assert await running_s(b.link.aclose()) < 1.0 + SLACK_S


async def test_the_link_does_not_busy_loop_while_redis_is_down(server):
    server.kill()
    a = Replica(server.url, "a")
    a.link.start()
    calls = 0
    begun_s = asyncio.get_running_loop().time()
    stretch = a.link._stretch

    async def counted() -> None:
        nonlocal calls
        calls += 1
        await stretch()

    a.link._stretch = counted
    await until(lambda: calls >= 8)
    # Pauses of 25 ms and more, then of 250 ms and more.
    assert asyncio.get_running_loop().time() - begun_s > 0.9
    await a.link.aclose()
