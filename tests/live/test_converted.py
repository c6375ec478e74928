"""Tests of `warmroute config --from` against real engines: a router serves with the printed file
unchanged.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from simulator.live.processes import Programs
from tests.live.commands import output_of
from tests.live.ports import lasting_port
from tests.live.stack import MODEL, Stack, engine_arguments, until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Good day. " * 40}]}


async def test_a_converted_sglang_command_line_serves_chats_and_keeps_its_limit(
    tmp_path: Path,
) -> None:
    file, port, admin = tmp_path / "router.yaml", lasting_port(), lasting_port()
    async with Programs(tmp_path) as programs, aiohttp.ClientSession() as http:
        workers = [
            await programs.start(f"worker-{n}", "engine", engine_arguments(speed=1))
            for n in range(2)
        ]
        command = (
            "python -m sglang_router.launch_router --policy cache_aware --host 127.0.0.1 "
            f"--port {port} --prometheus-port {admin} --max-concurrent-requests 1 --queue-size 1 "
            f"--queue-timeout-secs 60 --worker-urls {' '.join(worker.url for worker in workers)}"
        )
        status, said = await output_of("config", "--from", command)
        assert status == 0, said
        file.write_text(said[: said.index("sglang-router 0.3.2 ", said.index("workers:"))])
        router = await programs.start("router", "router", ["serve", "--config", str(file)])
        assert router.url == f"http://127.0.0.1:{port}"
        stack = Stack(programs, router, workers, http)
        for worker_id in range(2):
            await stack.until_state(worker_id, "ready")

        async def chat(tokens: int) -> tuple[int, str]:
            url = f"{router.url}/v1/chat/completions"
            async with http.post(url, json={**CHAT, "max_tokens": tokens}) as reply:
                return reply.status, await reply.text()

        async def until_one_request(state: str) -> None:
            async def is_one_request() -> bool:
                return await stack.metric(f"warmroute_{state}_requests") == 1

            await until(is_one_request, f"one {state} request")

        first = asyncio.create_task(chat(600))
        await until_one_request("running")
        second = asyncio.create_task(chat(1))
        await until_one_request("waiting")  # the router itself has the limit
        third = await chat(1)
        assert third[0] == 503
        assert "limits.hold_requests" in third[1]
        answers = await asyncio.gather(first, second)
        assert [status for status, _ in answers] == [200, 200], answers
