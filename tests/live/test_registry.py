"""Tests of workers that announce themselves in a real Redis, and of routers that discover them
there.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from engine.wire.announcement import (
    Announcement,
    encode_announcement,
    entry_key,
    names_key,
)
from router.discovery import redis_source
from router.discovery.redis_source import RedisSource
from router.fleet.sources import Report
from router.redis.url import parse_redis_url
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.live.stack import MODEL, engine_arguments, running, until

pytestmark = needs_redis

FLEET = "default"
A, B = "http://127.0.0.1:11", "http://127.0.0.1:12"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(autouse=True)
def empty(server: RedisServer) -> None:
    server.client().flushall()


def announce(server: RedisServer, url: str, lease_ms: int = 60_000, **more) -> None:
    client = server.client()
    client.set(entry_key(FLEET, url), encode_announcement(Announcement(url, **more)), px=lease_ms)
    client.sadd(names_key(FLEET), url)


@asynccontextmanager
async def looking(url: str) -> AsyncIterator[AsyncIterator[Report]]:
    """Yield the reports of a router's Redis source, one for each time that it reads Redis; each
    must come within ten seconds.
    """
    reports = RedisSource(lambda: parse_redis_url(url), FLEET, look_s=0.01).reports()

    async def next_reports() -> AsyncIterator[Report]:
        while True:
            yield await asyncio.wait_for(anext(reports), 10.0)

    try:
        yield next_reports()
    finally:
        await reports.aclose()  # type: ignore[attr-defined]


def names(report: Report) -> list[str]:
    assert report.workers is not None, report.trouble
    return [str(one.spec) + ("!" if one.stopping else "") for one in report.workers]


async def test_entries_are_workers_until_redis_expires_them(server):
    async with looking(server.url) as told:
        assert names(await anext(told)) == []
        announce(server, A, kv_tokens=4096, block_size=16, options={"weight": 2, "kind": "vllm"})
        announce(server, B, lease_ms=300, state="stopping")
        await anext(told)
        found = names(await anext(told))
        assert found == [f"{A},kind=vllm,block_size=16,kv_tokens=4096,weight=2", f"{B}!"]
        while B + "!" in found:
            found = names(await anext(told))
        assert len(found) == 1


async def test_invalid_entries_are_named_in_the_report_and_affect_no_other_worker(server):
    announce(server, A)
    client = server.client()
    key = names_key(FLEET)
    bad = {
        "http://garbage": b"\xff\x00",
        "http://else": encode_announcement(Announcement("http://another")),
        "not-a-url": encode_announcement(Announcement("not-a-url")),
        "http://ranked": encode_announcement(Announcement("http://ranked", options={"rank": 1})),
        "http://option": encode_announcement(Announcement("http://option", options={"wieght": 1})),
        "http://events": encode_announcement(
            Announcement("http://events", options={"events": "tcp://10.9.9.9:5557"})
        ),
        "http://huge": b"x" * 100_000,
    }
    for name, entry in bad.items():
        client.sadd(key, name)
        client.set(entry_key(FLEET, name), entry)
    client.sadd(key, "http://list", "http://expired", "x" * 3_000)
    client.lpush(entry_key(FLEET, "http://list"), "x")
    async with looking(server.url) as told:
        report = await anext(told)
    assert names(report) == [A]
    said = "\n".join(report.refused)
    for name in (*bad, "http://list"):
        assert f"'{name}'" in said
    assert "names another url" in said
    assert "did you mean weight?" in said
    assert "events is 'tcp://10.9.9.9:5557', not at its own host (event_hosts)" in said
    assert "larger than 8192" in said
    assert "1 names longer than 2048 bytes" in said
    assert "http://expired" not in said


async def test_a_key_of_another_type_and_too_many_names_are_reported(server, monkeypatch):
    server.client().set(names_key(FLEET), "mine")
    async with looking(server.url) as told:
        report = await anext(told)
        assert report.workers is None
        assert "has something else under a key of this fleet" in report.trouble
        server.client().delete(names_key(FLEET))
        monkeypatch.setattr(redis_source, "MAX_NAMES", 2)
        server.client().sadd(names_key(FLEET), A, B, "http://c")
        while "has 3 names; at most 2 fit" not in report.trouble:
            report = await anext(told)


async def test_names_without_entries_are_removed_after_a_while(server, monkeypatch):
    monkeypatch.setattr(redis_source, "_FORGOTTEN_S", 0.05)
    announce(server, A)
    server.client().sadd(names_key(FLEET), B)
    async with looking(server.url) as told:
        while server.client().scard(names_key(FLEET)) > 1:
            assert names(await anext(told)) == [A]


async def test_a_killed_paused_or_locked_redis_is_reported_and_recovered_from(tmp_path):
    with redis_server(tmp_path / "own") as own:
        announce(own, A)
        async with looking(own.url) as told:
            assert names(await anext(told)) == [A]
            own.kill()
            report = await anext(told)
            while report.workers is not None:
                report = await anext(told)
            assert f"{own.url} " in report.trouble
            own.start()
            while report.workers is None:
                report = await anext(told)
            assert names(report) == []  # an empty Redis after a restart
            own.pause()
            while report.workers is not None:
                report = await anext(told)
            assert "does not answer" in report.trouble
            own.go_on()
            own.client().config_set("requirepass", "secret")
            while "password" not in report.trouble:
                report = await anext(told)
            assert "secret" not in report.trouble


async def test_engines_announce_themselves_and_deregister_before_they_end(server, tmp_path):
    """Engines of two models join a router through Redis, and an engine that stops gets no new
    requests before it ends.
    """
    state = ["--state", server.url, "--discover", "redis"]
    async with running(tmp_path, workers=0, router=state) as stack:
        engines = []
        for number, model in enumerate((MODEL, MODEL, "other")):
            arguments = engine_arguments(
                **{"model-name": model, "announce": f"{server.url},lease=2"}
            )
            engines.append(await stack.programs.start(f"e{number}", "engine", arguments))

        async def ready() -> bool:
            return [row["state"] for row in await stack.rows()] == ["ready"] * 3

        await until(ready, "three workers")
        rows = await stack.rows()
        assert {row["named_by"] for row in rows} == {"redis"}
        assert sorted(row["url"] for row in rows) == sorted(one.url for one in engines)
        assert (await stack.complete([1, 2]))[0] == 200
        assert (await stack.complete([1, 2], model="other"))[0] == 200
        assert (await stack.complete([1, 2], model="nobody"))[0] == 404

        async def asking() -> list[int]:
            return [(await stack.complete([n, 7]))[0] for n in range(200)]

        load = asyncio.create_task(asking())
        engines[0].process.send_signal(signal.SIGTERM)
        assert set(await load) == {200}
        assert await engines[0].process.wait() == 0
        log = stack.router.log.read_text()
        assert f"({engines[0].url}) is draining, by redis, to be removed when idle" in log
        assert "is down" not in log

        engines[1].process.kill()  # probes notice at once, and the lease ends later

        async def one_left() -> bool:
            return [row["url"] for row in await stack.rows()] == [engines[2].url]

        await until(one_left, "the end of a lease")
        assert await stack.metric("warmroute_discovery_up") == 1


async def test_a_lost_registry_empties_no_pool(server, tmp_path):
    state = ["--state", server.url, "--discover", "redis", "--discovery-grace-s", "0.5"]
    async with running(tmp_path, workers=0, router=state) as stack:
        arguments = engine_arguments()
        engine = await stack.programs.start("e", "engine", arguments)
        announce(server, engine.url)
        announce(server, A)  # no engine is there

        async def two() -> bool:
            return {row["state"] for row in await stack.rows()} == {"ready", "joining"}

        await until(two, "one worker and one address")
        server.client().delete(names_key(FLEET))

        async def only_live_engine() -> bool:
            return [row["url"] for row in await stack.rows()] == [engine.url]

        await until(only_live_engine, "the end of the grace")
        assert (await stack.complete([1]))[0] == 200
        assert await stack.metric("warmroute_discovery_up") == 0
        announce(server, engine.url)

        async def well() -> bool:
            return await stack.metric("warmroute_discovery_up") == 1

        await until(well, "the registry's return")
