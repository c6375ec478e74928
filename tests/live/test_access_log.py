"""Tests of the access log: one line for each request, whatever its outcome, and nothing secret."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.live.access_lines import until_logged
from tests.live.stack import MODEL, Stack, running, until

SECRET = "the-text-of-a-prompt"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def ask(stack: Stack, number: str, **fields: Any) -> tuple[int, str | None]:
    """Send a request to the router; return the answer's status and its request id, or None."""
    body = {"model": MODEL, "prompt": SECRET, "max_tokens": 4} | fields
    headers = {"x-request-id": number, "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    url = f"{stack.url}/v1/completions"
    async with stack.http.post(url, json=body, headers=headers) as reply:
        await reply.read()
        return reply.status, reply.headers.get("x-request-id")


async def test_the_access_log_has_a_line_with_the_request_id_for_each_request(
    tmp_path: Path,
) -> None:
    file = tmp_path / "access"
    flags = ["--access-log", str(file)]
    async with running(tmp_path, router=flags, speed=4) as stack:
        assert await ask(stack, "a") == (200, "a")
        assert await ask(stack, "b", stream=True) == (200, "b")
        assert await ask(stack, "c", model="nobody's") == (404, "c")
        assert await ask(stack, "d", max_tokens="many") == (400, "d")
        status, made = await ask(stack, "e" * 200)
        assert status == 200
        assert made not in (None, "e" * 200), "too long a number is replaced"
        body = {"model": MODEL, "prompt": SECRET, "max_tokens": 1_000, "stream": True}
        url, number = f"{stack.url}/v1/completions", {"x-request-id": "f"}
        async with stack.http.post(url, json=body, headers=number) as reply:
            await reply.content.readline()
            reply.close()
        lines = await until_logged(file, 6)
        assert made in lines
        ok, stream, unknown, bad, left = (lines[name] for name in "abcdf")
        assert (ok["status"], ok["finish"], ok["model"]) == (200, "ok", MODEL)
        assert (ok["trace"], ok["client"], ok["attempts"]) == (TRACE, "127.0.0.1", 1)
        assert (ok["output_tokens"], ok["path"]) == (4, "/v1/completions")
        assert ok["worker"] in (0, 1)
        assert ok["bytes_in"] > 0 < ok["bytes_out"]
        assert ok["total_ms"] >= ok["wait_ms"] >= 0
        assert ok["ttft_ms"] is None
        assert stream["stream"]
        assert 0 < stream["ttft_ms"] <= stream["total_ms"]
        refused = (unknown["status"], unknown["finish"], unknown["code"], unknown["model"])
        assert refused == (404, "rejected", "model_not_found", None)
        assert (bad["status"], bad["finish"], bad["worker"]) == (400, "rejected", None)
        assert (left["finish"], left["status"]) == ("client_left", 499)
        assert SECRET not in file.read_text()
        assert await stack.metric('warmroute_access_log_lines_total{result="written"}') == 6
        assert await stack.metric('warmroute_access_log_lines_total{result="lost"}') == 0


@pytest.mark.parametrize("relay", ["auto", "python"])
async def test_a_broken_off_answer_is_logged_as_its_client_saw_it(
    tmp_path: Path, relay: str
) -> None:
    file = tmp_path / "access"
    flags = ["--access-log", str(file), "--relay", relay]
    async with running(tmp_path, router=flags) as stack:
        url, body = f"{stack.url}/v1/completions", {"model": MODEL, "prompt": SECRET}
        for number, stream in (("late", False), ("cut", True)):
            asked = body | {"max_tokens": 100_000, "stream": stream}
            headers = {"x-request-id": number, "x-request-timeout-ms": "400"}
            with suppress(aiohttp.ClientPayloadError):
                async with stack.http.post(url, json=asked, headers=headers) as reply:
                    status = reply.status
                    await reply.read()
            assert status == 504 or stream
            line = (await until_logged(file, 1 + stream))[number]
            said = (line["status"], line["finish"], line["code"])
            assert said == (status, "deadline_exceeded", "deadline_exceeded")
            assert (line["bytes_out"] > 0) == (status == 200)
        asked = body | {"max_tokens": 100_000, "stream": True}
        async with stack.http.post(url, json=asked, headers={"x-request-id": "left"}) as reply:
            read = len(await reply.content.readline())
            reply.close()
        left = (await until_logged(file, 3))["left"]
        assert (left["status"], left["finish"]) == (499, "client_left")
        assert left["bytes_out"] >= read > 0


async def test_the_access_log_is_reopened_after_its_file_was_moved(tmp_path: Path) -> None:
    file = tmp_path / "access"
    async with running(tmp_path, router=["--access-log", str(file)]) as stack:
        await ask(stack, "a")
        await until_logged(file, 1)
        file.rename(tmp_path / "moved")
        stack.router.process.send_signal(signal.SIGHUP)
        await until(lambda: asyncio.to_thread(file.exists), "the new file")
        await ask(stack, "b")
        assert (await until_logged(file, 1)).keys() == {"b"}


async def test_the_access_log_can_be_standard_output(tmp_path: Path) -> None:
    async with running(tmp_path, router=["--access-log", "-"]) as stack:
        await ask(stack, "a")

        async def logged() -> bool:
            return '"id":"a"' in stack.router.log.read_text()

        await until(logged, "the line")


async def test_lines_that_a_full_disk_cannot_take_are_counted(tmp_path: Path) -> None:
    async with running(tmp_path, router=["--access-log", "/dev/full"]) as stack:
        assert (await ask(stack, "a"))[0] == 200

        async def counted() -> bool:
            return await stack.metric('warmroute_access_log_lines_total{result="lost"}') == 1

        await until(counted, "the loss to be told")
