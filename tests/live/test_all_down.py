"""Tests of what operators see when no worker is left, at a reload, and at shutdown."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp

from simulator.live.processes import Programs
from tests.live.commands import output_of
from tests.live.stack import MODEL, engine_arguments, running, until


async def test_with_all_workers_down_clients_get_503_and_retry_after(tmp_path: Path) -> None:
    router = ["--intervals-health-s", "0.1", "--waiting-wait-s", "0"]
    async with running(tmp_path, workers=2, router=router) as stack:
        for worker in stack.workers:
            worker.process.send_signal(signal.SIGKILL)
        for worker_id in (0, 1):
            await stack.until_state(worker_id, "down")
        body = {"model": MODEL, "prompt": [1]}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
            assert reply.status == 503
            assert int(reply.headers["Retry-After"]) >= 1
            error = (await reply.json())["error"]
            assert error["code"] == "no_worker_available"
            assert "down" in error["message"]
        async with stack.http.get(f"{stack.url}/health") as reply:
            assert reply.status == 200, "the router is alive"
        for url in (stack.url, stack.admin):
            async with stack.http.get(f"{url}/ready") as reply:
                assert (reply.status, (await reply.json())["reasons"]) == (
                    503,
                    ["no worker takes requests"],
                )
        await stack.assert_idle()


async def test_a_router_without_workers_answers_503_until_a_worker_is_added(tmp_path: Path) -> None:
    async with running(tmp_path, workers=0) as stack:
        status, answer = await stack.complete([1])
        assert (status, answer["error"]["code"]) == (503, "no_worker_available")
        worker = await stack.programs.start("late", "engine", engine_arguments())
        await stack.add(worker.url)
        status, _ = await stack.complete([1])
        assert status == 200


async def test_a_request_without_a_model_gets_503_while_no_model_is_known(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=0) as stack:
        url = f"{stack.url}/v1/completions"
        async with stack.http.post(url, json={"prompt": "x", "max_tokens": 1}) as reply:
            assert (reply.status, "Retry-After" in reply.headers) == (503, True)
            assert (await reply.json())["error"]["code"] == "no_worker_available"
        await stack.assert_idle()


async def test_sighup_applies_a_changed_file_and_ignores_an_invalid_one(
    tmp_path: Path,
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("policy: round_robin\n")
    async with running(tmp_path, workers=1, router=["--config", str(file)]) as stack:

        async def policy() -> str:
            body = {"model": MODEL, "prompt": [1], "max_tokens": 1}
            async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
                await reply.read()
            async with stack.http.get(f"{stack.admin}/explain?last=1") as reply:
                name: str = (await reply.json())["decisions"][0]["policy"]
                return name

        assert await policy() == "round_robin"
        file.write_text("policy: kv_prefix\nseed: 1\n")
        stack.router.process.send_signal(signal.SIGHUP)

        async def changed() -> bool:
            return await policy() == "kv_prefix"

        await until(changed, "the new policy")
        file.write_text("policy: nonsense\n")
        stack.router.process.send_signal(signal.SIGHUP)

        async def refused() -> bool:
            return "reload refused" in stack.router.log.read_text()

        await until(refused, "the refusal")
        assert await policy() == "kv_prefix"
        assert "not changed while running: seed" in stack.router.log.read_text()


async def test_sigterm_lets_a_running_stream_finish(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1, speed=5) as stack:
        body = {"model": MODEL, "prompt": [1], "max_tokens": 200, "stream": True}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
            await reply.content.readline()
            stack.router.process.send_signal(signal.SIGTERM)
            rest = await reply.read()
        assert rest.rstrip().endswith(b"data: [DONE]")
        assert await asyncio.wait_for(stack.router.process.wait(), 10) == 0


async def test_an_invalid_configuration_ends_the_start_and_the_error_names_the_keys(
    tmp_path: Path,
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("policy: hybrid\nlimits:\n  body_bytes: 12\nlisten: 80\n")
    status, text = await output_of("serve", "--config", str(file), "--port", "99999")
    assert status == 2
    for words in ("bad.yaml:3", "limits.body_bytes", "bad.yaml:4", "listen", "--port"):
        assert words in text


async def test_a_port_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    async with Programs(tmp_path) as programs, aiohttp.ClientSession():
        first = await programs.start(
            "first", "router", ["serve", "--port", "0", "--admin-port", "0"]
        )
        port = first.url.rpartition(":")[2]
        status, text = await output_of("serve", "--port", port, "--admin-port", "0")
        assert status == 1
        assert port in text
        assert "Traceback" not in text
