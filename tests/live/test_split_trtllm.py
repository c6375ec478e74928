"""Tests of TensorRT-LLM's context and generation servers behind a router; the servers are mocks."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.live.stack import MODEL, Stack, running, until
from tests.live.trtllm_servers import END, Fabric, Server, announced, answer_of, serving, text_of

KEY = "s3cret-of-the-pool"
PROMPT = "how long is a piece of string"
FLAGS = ("--disaggregation", "always", "--retries-backoff-s", "0")


@dataclass
class Pool:
    """Context and generation servers behind a router. Lifetime: test."""

    stack: Stack
    fabric: Fabric
    context: list[Server]
    generation: list[Server]
    logs: Path

    async def ask(self, path: str = "/v1/completions", **fields: Any) -> tuple[int, bytes]:
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 5} | fields
        if "chat" not in path:
            body.setdefault("prompt", PROMPT)
        async with self.stack.http.post(f"{self.stack.url}{path}", json=body) as reply:
            return reply.status, await reply.read()

    async def assert_clean(self) -> None:
        await self.stack.assert_idle()
        assert self.fabric.kept == {}, "KV that nobody fetched"
        assert self.fabric.refused == []
        assert not any(server.running for server in (*self.context, *self.generation))


@asynccontextmanager
async def pool(
    tmp_path: Path, context: int = 1, generation: int = 1, **options: Any
) -> AsyncIterator[Pool]:
    fabric = Fabric()
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(serving(fabric, key=KEY, **options))
            for _ in range(context + generation)
        ]
        halves = servers[:context], servers[context:]
        names = ("context_servers", "generation_servers")
        config: dict[str, Any] = {"internal_request_auth_key": KEY, "node_id": 3}
        for name, half in zip(names, halves, strict=True):
            urls = [server.url.removeprefix("http://") for server in half]
            config[name] = {"num_instances": len(urls), "urls": urls}
        (tmp_path / "disagg.yaml").write_text(json.dumps(config))  # JSON is YAML
        source = f"trtllm:{tmp_path / 'disagg.yaml'}"
        flags = (*FLAGS, "--discover", source, "--access-log", str(tmp_path / "access.jsonl"))
        router = await stack.enter_async_context(running(tmp_path / "logs", 0, flags))
        one = Pool(router, fabric, *halves, tmp_path)
        await until_ready(router, len(servers))
        yield one


async def until_ready(router: Stack, count: int) -> None:
    async def ready() -> bool:
        return [row["state"] for row in await router.rows()] == ["ready"] * count

    await until(ready, f"{count} servers to be ready")


def text_in(body: bytes, stream: bool) -> str:
    if not stream:
        return str(json.loads(body)["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def texts_below(folder: Path) -> list[str]:
    """Return the texts that the router wrote: its own log and the access log."""
    paths = [path for path in folder.rglob("*") if path.suffix in (".log", ".jsonl")]
    return [path.read_text() for path in paths]


async def test_a_context_and_a_generation_server_answer_like_one_server(tmp_path: Path) -> None:
    async with pool(tmp_path, 2, 2) as one:

        async def ask(number: int) -> None:
            prompt, stream = f"{PROMPT} {number}", number % 2 == 0
            status, body = await one.ask(prompt=prompt, stream=stream)
            assert (status, text_in(body, stream)) == (200, answer_of(prompt, 5))

        await asyncio.gather(*map(ask, range(60)))
        await one.assert_clean()
        assert one.fabric.fetched == 60
        assert sum(len(server.asked) for server in one.context) == 60
        roles = {row["url"]: row["role"] for row in await one.stack.rows()}
        assert roles == {s.url: "prefill" for s in one.context} | {
            s.url: "decode" for s in one.generation
        }
        numbers = [
            body["disaggregated_params"]["disagg_request_id"]
            for server in one.context
            for body in server.asked
        ]
        assert len(set(numbers)) == 60
        assert {number >> 16 & 0xFF for number in numbers} == {3}
        ids = [[h["x-request-id"] for s in half for h in s.heads] for half in
               (one.context, one.generation)]  # fmt: skip
        assert sorted(ids[0]) == sorted(ids[1]), "the same on both legs"
        async with one.stack.http.get(f"{one.stack.admin}/metrics") as reply:
            shown = await reply.text()
        shown += json.dumps(await one.stack.rows())
    written = texts_below(tmp_path)
    assert len(written) > 1
    assert KEY not in "".join(written) + shown
    assert "sha256=" not in "".join(written)


async def test_a_chat_is_split_and_keeps_its_messages(tmp_path: Path) -> None:
    async with pool(tmp_path) as one:
        messages = [{"role": "user", "content": "hi"}]
        status, body = await one.ask("/v1/chat/completions", messages=messages)
        assert status == 200
        assert json.loads(body)["choices"][0]["message"]["content"] == answer_of("hi", 5)
        assert one.generation[0].asked[0]["messages"] == messages
        await one.assert_clean()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_ends_at_once_has_no_generation_leg(
    tmp_path: Path, stream: bool
) -> None:
    async with pool(tmp_path, ends_at_once=True) as one:
        status, body = await one.ask(stream=stream)
        assert (status, text_in(body, stream)) == (200, text_of([END]))
        assert b"disaggregated_params" not in body
        assert one.generation[0].asked == []
        await one.assert_clean()


@pytest.mark.parametrize("fault", ["500", "503", "close"])
async def test_a_request_moves_from_a_context_server_that_fails(tmp_path: Path, fault: str) -> None:
    """When a context server fails, another one gets the request under a new number, since the first
    may keep KV under the old one.
    """
    async with pool(tmp_path, context=2) as one:
        for server in one.context:
            server.faults.append(fault)
        for number in range(4):
            status, body = await one.ask(prompt=f"{PROMPT} {number}")
            assert (status, text_in(body, False)) == (200, answer_of(f"{PROMPT} {number}", 5))
        await one.assert_clean()
        rows = {row["url"]: row["failures"] for row in await one.stack.rows()}
        assert rows[one.generation[0].url] == 0
        asked = [b["disaggregated_params"] for s in one.context for b in s.asked
                 if "disaggregated_params" in b]  # fmt: skip
        numbers = [params["disagg_request_id"] for params in asked]
        assert len(set(numbers)) == len(numbers)


async def test_after_a_failed_generation_leg_the_request_is_prefilled_again(tmp_path: Path) -> None:
    async with pool(tmp_path, generation=2) as one:
        faults = deque(["500"])
        for server in one.generation:  # whichever is asked first
            server.faults = faults
        status, body = await one.ask()
        assert (status, text_in(body, False)) == (200, answer_of(PROMPT, 5))
        first, second = (b["disaggregated_params"] for b in one.context[0].asked)
        assert first["disagg_request_id"] != second["disagg_request_id"]
        assert one.fabric.refused == [], "no state is used twice"
        ((_, told, _),) = one.fabric.kept.values()  # until `kv_transfer_timeout_ms`
        assert told["disagg_request_id"] == first["disagg_request_id"]
        rows = {row["url"]: row["failures"] for row in await one.stack.rows()}
        assert rows[one.context[0].url] == 0
        await one.stack.assert_idle()


async def test_the_client_gets_the_refusal_of_the_context_server(tmp_path: Path) -> None:
    async with pool(tmp_path) as one:
        one.context[0].faults.append("400")
        assert (await one.ask())[0] == 400
        assert one.generation[0].asked == []
        await one.assert_clean()


async def test_a_client_that_disconnects_in_the_context_leg_stops_that_leg(tmp_path: Path) -> None:
    async with pool(tmp_path) as one:
        one.context[0].faults.append("hang")
        asking = asyncio.create_task(one.ask())

        async def begun() -> bool:
            return one.context[0].running == 1

        await until(begun, "the first leg")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await one.stack.assert_idle()
        assert one.generation[0].asked == []


async def test_disconnected_clients_and_failed_servers_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    """Nothing is left behind by clients that leave and servers that fail, and other clients get the
    right answer. The context servers themselves free the KV of clients that left before decode
    (`kv_transfer_timeout_ms`).
    """
    async with pool(tmp_path, 2, 2, compute_s=0.01) as one:
        draw = random.Random(20)
        for server in (*one.context, *one.generation):
            server.faults = deque(draw.choice(["", "", "", "", "500", "close"]) for _ in range(20))
        faults = sum(bool(fault) for server in one.generation for fault in server.faults)

        async def ask(number: int) -> str:
            stream = number % 2 == 0
            asking = asyncio.create_task(one.ask(prompt=f"{PROMPT} {number}", stream=stream))
            leaves_s = draw.uniform(0.0, 0.05) if number % 3 == 0 else 10.0
            await asyncio.wait([asking], timeout=leaves_s)
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                return "left"
            status, body = asking.result()
            if status != 200:
                return str(status)
            assert text_in(body, stream) == answer_of(f"{PROMPT} {number}", 5)
            return "answered"

        ends = Counter[str]()
        for start in range(0, 240, 12):
            ends += Counter(await asyncio.gather(*map(ask, range(start, start + 12))))
        await one.stack.assert_idle()

        async def no_request_runs() -> bool:
            return not any(server.running for server in (*one.context, *one.generation))

        await until(no_request_runs, "the servers to be idle")
        assert one.fabric.refused == [], "no KV is named twice, and none of somebody else"
        assert ends["answered"] > 140
        assert ends["left"] > 20
        failed = 240 - ends["left"] - ends["answered"]
        assert failed <= 3, ends
        assert len(one.fabric.kept) <= ends["left"] + faults
        print(f"\n{dict(ends)}, {len(one.fabric.kept)} kept, {one.fabric.fetched} fetched")


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}], ids=str)
async def test_requests_that_cannot_be_split_go_to_one_server(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with pool(tmp_path) as one:
        await one.ask(**fields)
        (asked,) = one.context[0].asked + one.generation[0].asked
        assert "disaggregated_params" not in asked


async def test_servers_join_through_the_store_and_leave_when_their_key_expires(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = f"http://127.0.0.1:{free.getsockname()[1]}"
    cluster = {"cluster_uri": store, "cluster_name": "blue", "heartbeat_interval_sec": 1}
    config = {"disagg_cluster": cluster, "internal_request_auth_key": KEY}
    (tmp_path / "disagg.yaml").write_text(json.dumps(config))
    flags = (*FLAGS, "--discover", f"trtllm:{tmp_path / 'disagg.yaml'}")
    fabric = Fabric()
    async with (
        running(tmp_path / "logs", 0, flags) as router,
        serving(fabric, key=KEY) as context,
        serving(fabric, key=KEY) as generation,
        serving(fabric, key=KEY) as other,
        announced(context, store, 0),
        announced(generation, store, 1),
    ):
        one = Pool(router, fabric, [context, other], [generation], tmp_path)
        async with announced(other, store, 0):
            await until_ready(router, 3)
            status, body = await one.ask()
            assert (status, text_in(body, False)) == (200, answer_of(PROMPT, 5))
            async with router.http.get(f"{store}/cluster_info") as reply:
                assert (await reply.json())["is_ready"] is True
        await until_ready(router, 2)
        assert other.url not in [row["url"] for row in await router.rows()]
        assert (await one.ask())[0] == 200
        await one.assert_clean()
