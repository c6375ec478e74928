"""Tests of TensorRT-LLM's disaggregation YAML, and of the store at which its workers announce
themselves.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.keys import keys_of
from router.discovery.source import SourceSpecError, TrtllmSpec, parse_source
from router.discovery.trtllm import ClusterStore, StoreFullError, TrtllmSource, joined, read_pool
from router.fleet.sources import Report
from router.settings.rules import check_value
from router.settings.schema import Config

URLS = "context_servers: {num_instances: 2, urls: ['h1:8001', 'h2:8002']}\n"
GEN = "generation_servers: {num_instances: 1, urls: ['h3:8003'], router: {type: round_robin}}\n"
KEY = "s3cret-of-the-pool"


def spec_in(tmp_path: Path, text: str, **options: Any) -> TrtllmSpec:
    (tmp_path / "disagg.yaml").write_text(text)
    return TrtllmSpec(str(tmp_path / "disagg.yaml"), **options)


def test_the_orchestrators_yaml_is_read_as_a_pool(tmp_path: Path) -> None:
    more = f"node_id: 7\nmax_retries: 1\ninternal_request_auth_key: {KEY}\nkv_cache_config: {{}}\n"
    pool = read_pool(spec := spec_in(tmp_path, URLS + GEN + more))
    roles = {worker.url: (worker.role, worker.kind, worker.group) for worker in pool.workers}
    group = f"trtllm {spec.path}"
    assert roles == {
        "http://h1:8001": ("prefill", "trtllm", group),
        "http://h2:8002": ("prefill", "trtllm", group),
        "http://h3:8003": ("decode", "trtllm", group),
    }
    assert (pool.node_id, pool.auth_key, pool.cluster) == (7, KEY, None)
    assert KEY not in repr(pool)
    assert [text.partition(" ")[0] for text in pool.unused] == [
        *("max_retries", "kv_cache_config", "generation_servers.router")
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not yaml, line 1"),
        ("- 1\n", "the file is no mapping"),
        (URLS + "generation_server: {urls: ['h3:1']}\n", "did you mean generation_servers"),
        (URLS, "generation_servers has no urls"),
        ("{}", "neither context_servers"),
        (URLS.replace("2, urls", "3, urls") + GEN, "num_instances is 3, urls has 2"),
        (URLS + GEN.replace("h3:8003", "h1:8001"), "http://h1:8001 is given twice"),
        (URLS + GEN.replace("h3:8003", "h3:99999"), "generation_servers.urls[0]: url: Port"),
        (URLS + GEN + "node_id: 256\n", "node_id is '256'; allowed: 0..255"),
        (URLS + GEN + "internal_request_auth_key: 5\n", "internal_request_auth_key is not a text"),
        ("disagg_cluster: {cluster_uri: 'etcd://h:1'}", "is etcd://"),
        ("disagg_cluster: {cluster_uri: 'http://h'}", "not of the form http://host:port"),
        ("disagg_cluster: {cluster_url: 'http://h:1'}", "disagg_cluster.cluster_url is unknown"),
        (
            "disagg_cluster: {cluster_uri: 'http://h:1', minimal_instances: {servers: 1}}",
            "minimal_instances.servers is unknown",
        ),
    ],
)
def test_the_error_says_what_is_wrong_in_the_yaml(tmp_path: Path, text: str, says: str) -> None:
    spec = spec_in(tmp_path, text)
    with pytest.raises(ValueError, match=says.replace("[", r"\[").replace("]", r"\]")):
        read_pool(spec)
    with pytest.raises(ValueError, match=r"disagg\.yaml"):
        check_value(keys_of(Config)["discovery"], [str(spec)])


@pytest.mark.parametrize(
    "text",
    [
        "trtllm:/a/b.yaml",
        "trtllm:b.yaml,listen=0.0.0.0:8333,token_file=/t",
        "trtllm:b.yaml,listen=[::1]:8333",
    ],
)
def test_a_trtllm_source_is_written_back_unchanged(text: str) -> None:
    assert str(parse_source(text)) == text


@pytest.mark.parametrize("options", ["listen=8333", "listen=h:0", "port=1", "token_file="])
def test_wrong_options_are_refused(options: str) -> None:
    with pytest.raises(SourceSpecError, match="listen"):
        parse_source(f"trtllm:b.yaml,{options}")


OPERATIONS = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 3), st.sampled_from([-1, 0, 1, 5]), st.booleans()),
    st.tuples(st.just("delete"), st.integers(0, 3)),
    st.tuples(st.just("expire"), st.integers(0, 3), st.sampled_from([0, 1, 5])),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 1, 3])),
)


@given(st.lists(OPERATIONS, max_size=40))
def test_the_store_is_a_table_of_keys_that_expire(steps: list[tuple[Any, ...]]) -> None:
    """The store of announcements behaves like a table of keys that expire; the test compares with a
    dictionary whose times are checked on reading.
    """
    store, now_s = ClusterStore(), 0.0
    model: dict[str, float] = {}
    for number, (what, *rest) in enumerate(steps):
        if what == "wait":
            now_s += rest[0]
            continue
        key = f"/k{rest[0]}"
        there = model.get(key, -1.0) > now_s
        if what == "set":
            done = store.set(key, str(number), rest[1], rest[2], now_s)
            assert done == (not there or rest[2])
            if done:
                model[key] = now_s + rest[1] if rest[1] > 0 else float("inf")
        elif what == "delete":
            assert store.delete(key, now_s) == there
            model.pop(key, None)
        else:
            assert store.expire(key, rest[1], now_s) == there
            if there:
                model[key] = now_s + rest[1]
        alive = {key for key, until_s in model.items() if until_s > now_s}
        assert store.get_prefix("/k", now_s).keys() == alive


def test_the_number_and_size_of_keys_in_the_store_are_limited() -> None:
    store = ClusterStore()
    for number in range(8_192):
        store.set(f"/{number}", "", -1, False, 0.0)
    with pytest.raises(StoreFullError):
        store.set("/more", "", -1, False, 0.0)
    for key, value in (("k" * 513, ""), ("/1", "v" * 4_097)):
        with pytest.raises(StoreFullError):
            store.set(key, value, -1, True, 0.0)


def test_an_invalid_announcement_is_refused_with_its_reason(tmp_path: Path) -> None:
    store, spec = ClusterStore(), TrtllmSpec("p")
    texts = [
        "{",
        "[" * 2_000,
        '{"worker_id":"a","host":"h","port":70000,"role":0}',
        '{"worker_id":"a","host":"h","port":1,"role":2}',
        '{"worker_id":"a","host":"u:p@h/","port":1,"role":1}',
        '{"worker_id":"a","host":"fe80::1","port":9,"role":1}',
    ]
    for number, text in enumerate(texts):
        store.set(f"/trtllm-disagg/c/workers/{number}", text, 10, False, 0.0)
    found, refused = joined(store, spec, "c", 0.0)
    assert [one.spec.url for one in found] == ["http://[fe80::1]:9"]
    assert len(refused) == 5
    assert joined(store, spec, "other", 0.0) == ([], [])
    assert joined(store, spec, "c", 10.0) == ([], [])


@dataclass
class StoreSource:
    """A source whose store listens for announcements, and its latest report. Lifetime: test."""

    url: str
    http: aiohttp.ClientSession
    now_s: float = 100.0
    said: Report = field(default_factory=lambda: Report(None))
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.request(method, self.url + path, **options) as reply:
            return reply.status, await reply.json()

    async def join(self, port: int, role: int, ttl: int = 10) -> str:
        """Announce a worker to the store as TensorRT-LLM does; return its key."""
        name = f"CONTEXT-127.0.0.1:{port}-1-2-003"
        key = f"/trtllm-disagg/blue/workers/{name}"
        info = {"worker_id": name, "host": "127.0.0.1", "port": port, "role": role}
        item = {"key": key, "value": json.dumps(info), "expire_time": -1, "ttl": ttl}
        body = item | {"overwrite_if_exists": False}
        assert await self.call("POST", "/set", json=body) == (200, {"result": True})
        return key

    async def until(self, *workers: tuple[str, str]) -> None:
        async with asyncio.timeout(10):
            while self.roles() != sorted(workers):
                self.news.clear()
                await self.news.wait()

    def roles(self) -> list[tuple[str, str]]:
        seen = self.said.workers or ()
        return sorted((w.spec.url[-4:], w.spec.role) for w in seen if not w.stopping)


@asynccontextmanager
async def store_source(tmp_path: Path, **options: Any) -> AsyncIterator[StoreSource]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"cluster_uri: 'http://127.0.0.1:{port}'"
    text = f"disagg_cluster: {{{uri}, cluster_name: blue, minimal_instances: {{}}}}\n"
    spec = spec_in(tmp_path, text, **options)
    async with aiohttp.ClientSession() as http:
        one = StoreSource(f"http://127.0.0.1:{port}", http)

        async def listen() -> None:
            source = TrtllmSource(spec, lambda: one.now_s)
            async with aclosing(source.reports()) as reports:  # type: ignore[type-var]
                async for one.said in reports:
                    one.news.set()

        listening = asyncio.create_task(listen())
        await asyncio.wait_for(one.news.wait(), 10)
        yield one
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        with pytest.raises(aiohttp.ClientConnectorError):
            await one.call("GET", "/cluster_info")


async def test_workers_join_and_leave_through_the_store(tmp_path: Path) -> None:
    async with store_source(tmp_path) as one:
        first = await one.join(8001, 0)
        await one.join(8003, 1, ttl=30)
        await one.until(("8001", "prefill"), ("8003", "decode"))
        _, info = await one.call("GET", "/cluster_info")
        assert info["is_ready"] is True
        assert info["minimal_instances"] == {"context_servers": 1, "generation_servers": 1}
        assert len(info["current_workers"]["context_servers"]) == 1
        one.now_s += 9
        query = {"key": first, "ttl": "10"}
        assert await one.call("GET", "/expire", params=query) == (200, {"result": True})
        one.now_s += 9
        _, found = await one.call("GET", "/get_prefix", params={"key_prefix": "/trtllm-disagg"})
        assert len(found["result"]) == 2
        assert (await one.call("GET", "/get", params={"key": first}))[0] == 200
        one.now_s += 9
        assert await one.call("GET", "/expire", params=query) == (400, {"result": False})
        await one.call("DELETE", "/delete", params={"key": "none"})
        await one.join(8009, 0)  # time is the test's: something must wake the source
        await one.until(("8003", "decode"), ("8009", "prefill"))


async def test_a_worker_that_deletes_its_key_is_reported_as_stopping(tmp_path: Path) -> None:
    async with store_source(tmp_path) as one:
        key = await one.join(8001, 0)
        await one.until(("8001", "prefill"))
        assert await one.call("DELETE", "/delete", params={"key": key}) == (200, {"result": True})
        await one.until()
        assert [worker.stopping for worker in one.said.workers or ()] == [True]


async def test_a_store_with_a_token_requires_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    async with store_source(tmp_path, token_file=str(tmp_path / "token")) as one:
        assert (await one.call("GET", "/cluster_info"))[0] == 403
        for token, status in (("abd", 403), ("abc", 200)):
            headers = {"Authorization": f"Bearer {token}"}
            assert (await one.call("GET", "/cluster_info", headers=headers))[0] == status


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("GET", "/get", {}, 422),
        ("GET", "/expire?key=a&ttl=soon", {}, 422),
        ("POST", "/set", {"data": b"{"}, 422),
        ("POST", "/set", {"json": {"key": "k" * 600, "value": ""}}, 413),
        ("POST", "/set", {"data": b"x" * 70_000}, 413),
        ("POST", "/get", {}, 404),
        ("GET", "/get?key=none", {}, 400),
        ("GET", "/get_prefix?key_prefix=none", {}, 400),
    ],
)
async def test_the_store_refuses_invalid_requests(
    tmp_path: Path, method: str, path: str, options: dict[str, Any], status: int
) -> None:
    async with store_source(tmp_path) as one:
        assert (await one.call(method, path, **options))[0] == status


async def test_a_port_in_use_is_reported_and_tried_again(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        uri = f"http://127.0.0.1:{port}"
        spec = spec_in(tmp_path, f"disagg_cluster: {{cluster_uri: '{uri}', cluster_name: c}}\n")
        async with aclosing(TrtllmSource(spec).reports()) as reports:  # type: ignore[type-var]
            said = await asyncio.wait_for(anext(reports), 10)
            assert f"cannot listen at 127.0.0.1:{port}" in said.trouble
            taken.close()
            while said.trouble:
                said = await asyncio.wait_for(anext(reports), 10)
