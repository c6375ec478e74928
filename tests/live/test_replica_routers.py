"""Tests of routers that share state, as real programs: each knows the requests that the other one
sends.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.replicas.membership import VERSION, ReplicaRefusedError
from simulator.live.processes import Program, Programs
from tests.live.metric_waits import until_metric
from tests.live.redis_server import RedisServer, needs_redis, redis_server
from tests.live.stack import MODEL, Stack, engine_arguments, metric_sum, until
from tests.router.replicas.replica_support import Replica

pytestmark = needs_redis
PAGE = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(warmroute_replicas_\w+)` \|([^|]*)\|", re.MULTILINE)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


class Place:
    """One worker, and a method that starts routers of it. Lifetime: test."""

    def __init__(self, programs: Programs, worker: Program, http: aiohttp.ClientSession) -> None:
        self.programs, self.worker, self.http = programs, worker, http

    def arguments(self, url: str | None, name: str, *more: str) -> list[str]:
        """Return a router's arguments; with `url` None the caller sets `state` in another way."""
        ports = ["--port", "0", "--admin-port", "0", "--worker", self.worker.url]
        state = [] if url is None else ["--state", url]
        return ["serve", *ports, *state, "--replicas-name", name, *more]

    async def router(self, url: str | None, name: str, *more: str) -> Stack:
        router = await self.programs.start(name, "router", self.arguments(url, name, *more))
        stack = Stack(self.programs, router, [self.worker], self.http)
        await stack.until_state(0, "ready")
        return stack


@contextlib.asynccontextmanager
async def place(folder: Path, speed: float = 20) -> AsyncIterator[Place]:
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        arguments = engine_arguments(speed=speed)
        yield Place(programs, await programs.start("worker", "engine", arguments), http)


async def shown(stack: Stack) -> dict[str, set[str]]:
    """Return the names of the router's metrics of shared state, with their labels."""
    async with stack.http.get(f"{stack.admin}/metrics") as reply:
        text = await reply.text()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        if "_replicas_" in family.name:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = {label for sample in family.samples for label in sample.labels}
    return found


async def test_each_router_knows_the_others_requests_until_the_other_dies(
    tmp_path: Path, server: RedisServer
) -> None:
    async with place(tmp_path, speed=0.2) as world:
        one = await world.router(server.url, "one")
        two = await world.router(server.url, "two")
        for stack in (one, two):
            await until_metric(stack, "replicas_peers", 1)
        await until_metric(two, "replicas_peer_in_sync", 1)
        body = {"model": MODEL, "prompt": [1] * 64, "max_tokens": 2_000, "stream": True}
        url = f"{one.url}/v1/completions"
        replies = [await world.http.post(url, json=body) for _ in range(3)]
        await until_metric(two, "replicas_peer_requests", 3)
        await until_metric(two, "worker_requests", 3)
        told = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in ROW.findall(PAGE)}
        assert await shown(two) == told
        one.router.process.send_signal(signal.SIGKILL)
        await until_metric(two, "replicas_peers", 0)
        await until_metric(two, "worker_requests", 0)
        for reply in replies:
            reply.close()
        assert (await two.complete([2] * 32))[0] == 200


async def test_a_router_without_redis_serves_alone_and_joins_later(
    tmp_path: Path, server: RedisServer
) -> None:
    server.kill()
    async with place(tmp_path) as world:
        one = await world.router(server.url, "one")
        assert "the connection is refused; this router continues" in one.router.log.read_text()
        assert (await one.complete([1] * 32))[0] == 200
        await until_metric(one, "replicas_link_up", 0)
        server.start()
        await until_metric(one, "replicas_link_up", 1)
        two = await world.router(server.url, "two")
        await until_metric(one, "replicas_peers", 1)
        server.kill()
        await until_metric(one, "replicas_link_up", 0)
        for stack in (one, two):
            assert (await stack.complete([1] * 32))[0] == 200
        two.router.process.terminate()
        assert await two.router.process.wait() == 0


async def test_a_router_with_other_settings_is_refused_and_its_peer_keeps_serving(
    tmp_path: Path, server: RedisServer
) -> None:
    async with place(tmp_path) as world:
        one = await world.router(server.url, "one")
        await until_metric(one, "replicas_link_up", 1)
        arguments = world.arguments(server.url, "two", "--policy", "least_requests")
        arguments += ["--session-header", "x-other"]
        with pytest.raises(RuntimeError) as caught:
            await world.programs.start("two", "router", arguments)
        said = (tmp_path / "two.log").read_text()
        assert "status 2" in str(caught.value) or "code 2" in str(caught.value), str(caught.value)
        (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert "replica one@" in line
        assert "policy is 'least_requests' here and 'warmset' there" in line
        assert "session_header is 'x-other' here and 'x-session-id' there" in line
        assert "replicas.fleet" in line
        assert (await one.complete([1] * 32))[0] == 200
        assert await metric_sum(world.http, one.admin, "warmroute_replicas_peers") == 0


async def test_a_router_with_other_settings_than_a_dead_peer_is_not_refused(
    tmp_path: Path, server: RedisServer
) -> None:
    async with place(tmp_path) as world:
        one = await world.router(server.url, "one")
        await until_metric(one, "replicas_link_up", 1)
        one.router.process.kill()
        two = await world.router(server.url, "two", "--policy", "least_requests")
        await until_metric(two, "replicas_link_up", 1)


async def test_a_reload_to_settings_that_differ_is_logged_once_and_shown_in_metrics(
    tmp_path: Path, server: RedisServer
) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("policy: warmset\n")
    async with place(tmp_path) as world:
        one = await world.router(server.url, "one")
        two = await world.router(server.url, "two", "--config", str(file))
        await until_metric(one, "replicas_peers", 1)
        await until_metric(one, "replicas_disagreements", 0)
        file.write_text("policy: least_requests\n")
        two.router.process.send_signal(signal.SIGHUP)
        await until_metric(one, "replicas_disagreements", 1)
        await until_metric(two, "replicas_disagreements", 1)
        file.write_text("policy: warmset\n")
        two.router.process.send_signal(signal.SIGHUP)
        await until_metric(one, "replicas_disagreements", 0)
        line = "differs: policy is 'warmset' here and 'least_requests' there"
        assert one.router.log.read_text().count(line) == 1


async def test_a_hot_restart_shows_the_peer_both_routers_and_then_the_new_one(
    tmp_path: Path, server: RedisServer
) -> None:
    async with place(tmp_path, speed=0.2) as world:
        peer = await world.router(server.url, "peer")
        hot_restart = ["--hot-restart", str(tmp_path / "next.sock")]
        before = await world.router(server.url, "same", *hot_restart)
        await until_metric(peer, "replicas_peers", 1)
        body = {"model": MODEL, "prompt": [1] * 64, "max_tokens": 400, "stream": True}
        reply = await world.http.post(f"{before.url}/v1/completions", json=body)
        after = await world.programs.start(
            "after", "router", world.arguments(server.url, "same", *hot_restart)
        )
        await until_metric(peer, "replicas_peers", 2)
        await until_metric(peer, "replicas_peer_requests", 1)
        reply.close()
        assert await before.router.process.wait() == 0
        await until_metric(peer, "replicas_peers", 1)
        stack = Stack(world.programs, after, [world.worker], world.http)
        await until_metric(stack, "replicas_peers", 1)
        await until_metric(stack, "worker_requests", 0)


async def test_no_log_contains_secrets(tmp_path: Path, server: RedisServer) -> None:
    server.client().config_set("requirepass", "hush-hush")
    url = server.url.replace("://", "://:{}@")
    async with place(tmp_path) as world:
        good = await world.router(url.format("hush-hush"), "good")
        await until_metric(good, "replicas_link_up", 1)
        bad = await world.router(url.format("hush-no"), "bad")
        assert "refuses the user or password" in bad.router.log.read_text()
        async with world.http.get(f"{good.admin}/metrics") as reply:
            seen = await reply.text()
        for stack in (good, bad):
            seen += stack.router.log.read_text()
        assert "hush" not in seen


async def test_a_reload_applies_another_redis_password(tmp_path: Path, server: RedisServer) -> None:
    def write_files_with(password: str) -> None:
        for name in names:
            url = server.url.replace("://", f"://:{password}@")
            (tmp_path / f"{name}.yaml").write_text(f"state: {url}\ndiscovery: [redis]\n")

    names = "one", "two"
    server.client().config_set("requirepass", "hush-one")
    write_files_with("hush-one")
    async with place(tmp_path) as world:
        stacks = [
            await world.router(None, name, "--config", str(tmp_path / f"{name}.yaml"))
            for name in names
        ]
        for stack in stacks:
            await until_metric(stack, "replicas_peer_in_sync", 1)
        client = server.client(password="hush-one")
        client.config_set("requirepass", "hush-two")
        client.client_kill_filter(_type="normal", skipme=False)
        for stack in stacks:
            await until_metric(stack, "replicas_link_up", 0)
            await until_metric(stack, "discovery_up", 0)
            assert (await stack.complete([1] * 32))[0] == 200
        write_files_with("hush-two")
        for stack in stacks:
            stack.router.process.send_signal(signal.SIGHUP)
        for stack in stacks:
            await until_metric(stack, "replicas_peer_in_sync", 1)
            await until_metric(stack, "discovery_up", 1)
            told = stack.router.log.read_text()
            assert "refuses the user or password: correct `state`" in told
            assert "reloaded; changed: state" in told
            assert "hush" not in told
        (tmp_path / "one.yaml").write_text("seed: 0\n")
        stacks[0].router.process.send_signal(signal.SIGHUP)

        async def refused() -> bool:
            return "not changed while running: state: " in stacks[0].router.log.read_text()

        await until(refused, "it to say that it cannot do without")
        await until_metric(stacks[0], "replicas_link_up", 1)


async def test_a_peer_of_another_version_is_refused_and_both_keep_serving(
    tmp_path: Path, server: RedisServer
) -> None:
    """A peer that speaks another version of the messages, as in an update of one replica after the
    other, is refused by name, and both routers keep serving.
    """
    async with place(tmp_path) as world:
        one = await world.router(server.url, "one")
        await until_metric(one, "replicas_link_up", 1)
        (entry,) = server.client().hvals("warmroute:{default}:replicas")
        terms = {**json.loads(entry)["terms"], VERSION: "99"}
        later = Replica(server.url, "later", terms)
        with pytest.raises(ReplicaRefusedError, match=f"replica one@.* {VERSION} is '99' here"):
            await later.link.agree()
        later.link.start()  # like one that started while Redis was away
        await until_metric(one, "replicas_disagreements", 1)
        with pytest.raises(RuntimeError, match="status 2"):
            await world.programs.start("two", "router", world.arguments(server.url, "two"))
        said = (tmp_path / "two.log").read_text()
        assert "error: state: replica later@" in said
        assert f"{VERSION} is '2' here and '99' there" in said
        assert f"{VERSION} is '2' here and '99' there; give both the same" in (
            one.router.log.read_text()
        )
        assert (await one.complete([1] * 32))[0] == 200
        await later.link.aclose()
        await until_metric(one, "replicas_disagreements", 0)
