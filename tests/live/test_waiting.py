"""Tests of clients whose requests wait for a first worker: what they receive meanwhile and in the
end.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from simulator.live.processes import Programs
from tests.live.ports import lasting_port
from tests.live.stack import MODEL, Stack, engine_arguments, misbehaving, until

PING = ": waiting for a worker\n\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
REFUSED = b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":null}}'


@asynccontextmanager
async def waiting(folder: Path, *flags: str) -> AsyncIterator[tuple[Stack, int]]:
    """Yield a router without a running worker, and the port at which it looks for one."""
    port = lasting_port()
    arguments = [
        *("serve", "--port", "0", "--admin-port", "0", "--waiting-models", MODEL),
        *("--worker", f"http://127.0.0.1:{port}", "--intervals-health-s", "0.2", *flags),
    ]
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        yield Stack(programs, await programs.start("router", "router", arguments), [], http), port


async def answered(
    stack: Stack, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Send a request; return the answer's (status, content type, body)."""
    url = f"{stack.url}{path}"
    async with stack.http.post(url, json={"model": MODEL, **body}, headers=headers) as reply:
        return reply.status, reply.headers.get("Content-Type", ""), await reply.text()


async def waits(stack: Stack, count: int) -> None:
    async def is_waiting() -> bool:
        return await stack.metric("warmroute_waiting_requests") == count

    await until(is_waiting, f"{count} requests to wait")


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


async def test_waiting_streams_get_comments_and_then_their_answer(tmp_path: Path) -> None:
    flags = ("--waiting-ping-s", "0.2", "--names-aliases", f"other={MODEL}")
    async with waiting(tmp_path, *flags) as (stack, port):
        streams = [
            asyncio.create_task(answered(stack, path, {**CHAT, **more, "stream": True}))
            for path, more in (
                ("/v1/chat/completions", {}),
                ("/v1/chat/completions", {"model": "other"}),
            )
        ]
        nameless = {**CHAT, "model": None}  # means the only model
        plain = asyncio.create_task(answered(stack, "/v1/chat/completions", nameless))
        await waits(stack, 3)
        await asyncio.sleep(0.5)
        await stack.programs.start("engine", "engine", engine_arguments(port=port))
        status, kind, text = await plain
        assert (status, kind.partition(";")[0]) == (200, "application/json")
        assert PING not in text
        for task, name in zip(streams, (MODEL, "other"), strict=True):
            status, kind, text = await task
            assert (status, kind.partition(";")[0]) == (200, "text/event-stream")
            assert text.startswith(PING)
            events = text.replace(PING, "")
            assert f'"model":"{name}"' in events
            assert events.endswith("data: [DONE]\n\n")
        await stack.assert_idle()
        # Clients waited for at least half a second, whatever the worker's own figure is.
        assert await stack.metric("warmroute_time_to_first_token_seconds_sum") > 1.0


async def test_a_request_for_an_alias_waits_for_a_worker_of_any_target_model(
    tmp_path: Path,
) -> None:
    flags = ("--waiting-models", "absent", "--names-targets", f"any={MODEL}:1,absent:1")
    async with waiting(tmp_path, *flags) as (stack, port):
        asked = [
            asyncio.create_task(
                answered(
                    stack,
                    "/v1/chat/completions",
                    {**CHAT, "model": "any"},
                    {"x-session-id": str(n)},
                )
            )
            for n in range(12)
        ]
        await waits(stack, 12)
        await stack.programs.start("engine", "engine", engine_arguments(port=port))
        for task in asked:
            status, _, text = await task
            assert (status, json.loads(text)["model"]) == (200, "any")


async def test_errors_are_events_after_a_comment_and_statuses_before_it(
    tmp_path: Path,
) -> None:
    flags = ("--waiting-ping-s", "0.5", "--waiting-wait-s", "1.2")
    async with waiting(tmp_path, *flags) as (stack, _):
        stream = {**CHAT, "stream": True}
        chat, messages, late, early, plain = await asyncio.gather(
            answered(stack, "/v1/chat/completions", stream),
            answered(stack, "/v1/messages", stream),
            answered(stack, "/v1/chat/completions", stream, {"x-request-timeout-ms": "900"}),
            answered(stack, "/v1/chat/completions", stream, {"x-request-timeout-ms": "100"}),
            answered(stack, "/v1/chat/completions", CHAT),
        )
        for (status, kind, text), code in (
            (chat, "no_worker_available"),
            (late, "deadline_exceeded"),
        ):
            assert (status, kind.partition(";")[0]) == (200, "text/event-stream")
            event = text.replace(PING, "")
            assert event.startswith("data: ")
            assert event.endswith("\n\n")
            assert json.loads(event[len("data: ") :])["error"]["code"] == code
        status, _, text = messages
        name, data = text.replace(PING, "").rstrip("\n").split("\n")
        assert (status, name) == (200, "event: error")
        told = json.loads(data.removeprefix("data: "))
        assert (told["type"], told["error"]["code"]) == ("error", "no_worker_available")
        assert early[0] == 504
        status, _, text = plain
        error = json.loads(text)["error"]
        assert (status, error["code"]) == (503, "no_worker_available")
        assert error["message"].endswith("within 1.2 s: it has none")


async def test_a_refusal_of_a_waiting_request_has_retry_after(tmp_path: Path) -> None:
    flags = ("--waiting-wait-s", "0.3", "--waiting-requests", "2")
    async with waiting(tmp_path, *flags) as (stack, _):
        url, body = f"{stack.url}/v1/chat/completions", {"model": MODEL, **CHAT}

        async def ask() -> tuple[int, str, str]:
            async with stack.http.post(url, json=body) as reply:
                error = (await reply.json())["error"]
                return reply.status, error["code"], reply.headers["Retry-After"]

        asked = await asyncio.gather(*(ask() for _ in range(5)))
        assert sorted(asked) == [
            *[(503, "no_worker_available", "30")] * 2,
            *[(503, "worker_wait_full", "30")] * 3,
        ]
        assert await stack.metric("warmroute_incoming_requests_total") == 5
        async with stack.http.get(f"{stack.url}/ready") as reply:
            assert reply.status == 200  # more requests may come
        async with stack.http.get(f"{stack.url}/ready?model=unheard-of") as reply:
            assert reply.status == 503


@pytest.mark.parametrize("how", ["refusal", "page", "broken", "silence"])
async def test_a_workers_failure_after_a_comment_reaches_the_client(
    tmp_path: Path, how: str
) -> None:
    said = {
        "refusal": b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(REFUSED), REFUSED),
        "page": b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\n"
        b"Content-Length: 13\r\n\r\n<html></html>",
        "broken": STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked")
        + b"%x\r\n%s\r\n5\r\nda" % (len(TOKEN), TOKEN),
        "silence": b"",  # closes each connection without an answer
    }
    async with waiting(tmp_path, "--waiting-ping-s", "0.2") as (stack, _):
        body = {"model": MODEL, **CHAT, "stream": True}
        reply = await stack.http.post(f"{stack.url}/v1/chat/completions", json=body)
        async with reply, misbehaving(said[how]) as (url, seen):
            assert (await reply.content.readuntil(b"\n\n")).decode() == PING
            await stack.add(url)
            if how == "broken":
                with pytest.raises(aiohttp.ClientError):
                    await reply.read()
            else:
                text = (await reply.text()).replace(PING, "")
                error = json.loads(text.removeprefix("data: "))["error"]
                told = {"refusal": "no", "page": "the worker answered with status 400"}
                assert error["message"].startswith(told.get(how, ""))
                assert how == "refusal" or error["code"] == "worker_error"
            assert seen


async def test_a_waiting_request_is_refused_when_its_key_is_revoked(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-old tenant=a\nsk-new tenant=b\n")
    keys.chmod(0o600)
    async with waiting(tmp_path, "--api-keys-file", str(keys)) as (stack, port):
        old, new = ({"Authorization": f"Bearer {key}"} for key in ("sk-old", "sk-new"))
        waits_on = [
            asyncio.create_task(answered(stack, "/v1/chat/completions", CHAT, headers))
            for headers in (old, new)
        ]
        await waits(stack, 2)
        keys.write_text("sk-new tenant=b\n")
        stack.router.process.send_signal(signal.SIGHUP)

        async def refused() -> bool:
            body = {**CHAT, "model": "unheard of"}
            return (await answered(stack, "/v1/chat/completions", body, old))[0] == 401

        await until(refused, "the key to be gone")
        await stack.programs.start("engine", "engine", engine_arguments(port=port))
        assert [(await one)[0] for one in waits_on] == [401, 200]


async def test_waiting_ends_when_the_client_disconnects_or_the_router_stops(
    tmp_path: Path,
) -> None:
    log = tmp_path / "access"
    flags = ("--waiting-ping-s", "0.2", "--access-log", str(log))
    async with waiting(tmp_path, *flags) as (stack, _):
        url, body = f"{stack.url}/v1/chat/completions", {"model": MODEL, **CHAT}
        async with stack.http.post(url, json={**body, "stream": True}) as reply:
            await reply.content.readuntil(b"\n\n")
            await waits(stack, 1)
            reply.close()
        await waits(stack, 0)
        assert await stack.metric('warmroute_first_worker_waits_total{end="left"}') == 1

        async def written() -> bool:
            return log.exists() and log.read_text().endswith("\n")

        await until(written, "the line of the client that left")
        line = json.loads(log.read_text())
        assert (line["model"], line["stream"], line["finish"]) == (MODEL, True, "client_left")
        last = asyncio.create_task(answered(stack, "/v1/chat/completions", CHAT))
        await waits(stack, 1)
        stack.router.process.terminate()
        status, _, text = await last
        assert (status, json.loads(text)["error"]["code"]) == (503, "shutting_down")
