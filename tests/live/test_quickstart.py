"""Tests that the commands of docs/quickstart.md that need no GPU work as printed."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
from pathlib import Path

import aiohttp
import pytest

from simulator.live.processes import Programs
from tests.live.ports import lasting_port
from tests.live.stack import Stack
from tests.told_decision import decision_in

PAGE = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text(encoding="utf-8")
KINDS = {"warmroute": "router", "warmroute-engine": "engine"}


def commands() -> list[str]:
    """Return the lines of the page's fenced sh blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


async def test_the_quickstarts_second_request_hits_the_cache_of_the_first(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed (Debian package: curl)")
    *starts, ask = commands()
    assert len(starts) == 3
    here = {port: str(lasting_port()) for port in ("8001", "8002", "8080", "8081")}

    def with_local_ports(text: str) -> str:
        return re.sub(r"\b80(01|02|80|81)\b", lambda found: here[found[0]], text)

    async with Programs(tmp_path) as programs, aiohttp.ClientSession() as http:
        started = []
        for i, line in enumerate(starts):
            program, *arguments = shlex.split(with_local_ports(line))
            ports = ["--port", here["8080"], "--admin-port", here["8081"]]
            arguments += ports if program == "warmroute" else []
            started.append(await programs.start(f"program-{i}", KINDS[program], arguments))
        *workers, router = started
        stack = Stack(programs, router, workers, http)
        for worker_id in range(len(workers)):
            await stack.until_state(worker_id, "ready")
        seen = []
        for _ in range(2):
            process = await asyncio.create_subprocess_shell(
                with_local_ports(ask),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            answer, _ = await process.communicate()
            head = answer.decode().partition("\r\n\r\n")[0]
            seen.append(decision_in(re.findall(r"(?im)^x-warmroute-explain: (.*?)\r?$", head)[0]))
        first, second = seen
        assert first["worker"] == second["worker"]
        assert (first["expected_hit_tokens"], second["expected_hit_tokens"] > 0) == (0, True)
