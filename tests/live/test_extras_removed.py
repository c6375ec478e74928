"""Tests that a router serves without the folder of each extra that its configuration does
not use.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

import router
from router.settings.extras import EXTRAS
from simulator.live.processes import Programs
from tests.live.stack import MODEL, WAIT_S, engine_arguments
from tests.tidy.floors import OWN

# An editable installation knows each module's file: here those of the router are found by its path.
_RUN = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
for finder in sys.meta_path:
    for table in ("known_source_files", "submodule_search_locations"):
        known = getattr(finder, table, {})
        for name in [name for name in known if name.partition(".")[0] == "router"]:
            del known[name]
runpy.run_module("router", run_name="__main__", alter_sys=True)
"""
# The options that need each extra, and the key that the error names.
ASKING = {
    "admin": (["--admin-port", "0"], "admin_port"),
    "discovery": (["--discover", "dns:workers:80"], "discovery"),
    "kserve": (["--grpc-port", "0"], "grpc_port"),
    "migration": (["--migration-moves", "1"], "migration.moves"),
    "names": (["--names-aliases", "a=b"], "names.aliases"),
    "picker": (["--picker-port", "0"], "picker.port"),
    "replicas": (["--state", "redis://127.0.0.1:1"], "state"),
    "restart": (["--kv-state", "saved"], "kv_state"),
}
# What the log says of each feature that is on by default.
SAID = {
    "admin": "the admin port, with /metrics, is not served",
    "doctor": "/doctor of the admin port is not served",
    "kserve": "KServe's paths below /v2 are not served",
}


@dataclass(frozen=True, slots=True)
class Without:
    """A copy of the router in a folder, without the files of one extra. Lifetime: test."""

    folder: Path
    extra: str

    async def run(self, *arguments: str) -> asyncio.subprocess.Process:
        command = (sys.executable, "-P", "-c", _RUN, str(self.folder), *arguments)
        piped = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *command, cwd=self.folder, stdout=piped, stderr=piped
        )

    async def run_to_end(self, *arguments: str) -> tuple[int | None, str]:
        """Run the router until it exits; return its exit status and its error output."""
        process = await self.run(*arguments)
        _, errors = await asyncio.wait_for(process.communicate(), WAIT_S)
        return process.returncode, errors.decode()


@pytest.fixture
def without(tmp_path: Path, request: pytest.FixtureRequest) -> Without:
    extra = request.param
    package = tmp_path / "router"
    package.mkdir()
    for path in Path(router.__file__).parent.iterdir():
        if path.name not in (extra, "__pycache__"):
            (package / path.name).symlink_to(path)
    return Without(tmp_path, extra)


@asynccontextmanager
async def ready(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    """Yield the line that the program prints once it serves; kill the program at the end."""
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
        if not line.startswith(b"ready "):
            _, errors = await process.communicate()
            pytest.fail(errors.decode())
        yield line.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def chat(url: str) -> str:
    """Wait until the router is ready, send a chat and return the answer's text."""
    async with aiohttp.ClientSession() as http:
        async with asyncio.timeout(WAIT_S):
            while True:
                async with http.get(f"{url}/ready") as reply:
                    if reply.status == 200:
                        break
                await asyncio.sleep(0.05)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        async with http.post(f"{url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            answer = await reply.json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("without", EXTRAS, indirect=True)
async def test_a_router_without_one_extra_serves_requests_and_stops(
    without: Without, tmp_path: Path
) -> None:
    admin = [] if without.extra == "admin" else ["--admin-port", "0"]
    async with Programs(tmp_path / "logs") as programs:
        worker = await programs.start("worker", "engine", engine_arguments())
        process = await without.run("serve", "--port", "0", *admin, "--worker", worker.url)
        async with ready(process) as line:
            assert ("admin=" in line) == (without.extra != "admin")
            assert await chat(line.split()[1])
            process.send_signal(signal.SIGTERM)
            _, errors = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 0
    text = errors.decode()
    assert "Traceback" not in text
    assert "ERROR" not in text
    for extra, words in SAID.items():
        assert (words in text) == (extra == without.extra)


@pytest.mark.parametrize("without", ASKING, indirect=True)
async def test_flags_that_need_a_missing_extra_are_rejected(without: Without) -> None:
    arguments, key = ASKING[without.extra]
    status, errors = await without.run_to_end("serve", "--worker", "http://127.0.0.1:1", *arguments)
    assert status == 2
    assert "Traceback" not in errors
    assert f"router/{without.extra} is not installed, which this needs" in errors
    assert key in errors


@pytest.mark.parametrize(
    ("without", "command"), [("doctor", "doctor"), ("admin", "kv")], indirect=["without"]
)
async def test_a_command_of_a_missing_extra_names_the_extra(without: Without, command: str) -> None:
    status, errors = await without.run_to_end(command, "http://127.0.0.1:1")
    assert (status, errors) == (
        1,
        f"error: router/{without.extra} is not installed, which this needs\n",
    )


def test_each_extra_in_pyproject_is_tried() -> None:
    text = (OWN / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = [one for one in text.splitlines() if "discovery | doctor" in one]
    assert set(EXTRAS) == set(line.partition('"')[2].partition('"')[0].split(" | "))
