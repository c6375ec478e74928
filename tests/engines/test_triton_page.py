"""Tests that run each command of docs/triton.md, on this machine or where `RUN` says.

Hosts and ports are replaced by this machine's, and the page's ten seconds by one or two.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from simulator import CHECKOUT
from simulator.live.processes import Program, Programs
from tests.engines.doctors_triton import DoctorsTriton, loaded, plain
from tests.engines.environment import NEWEST_TRITON, Environment
from tests.engines.triton_server import TritonServer
from tests.live.ports import lasting_port
from tests.live.stack import Stack, until
from tests.told_decision import decision_in

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = (CHECKOUT / "docs" / "triton.md").read_text(encoding="utf-8")
REPOSITORY = CHECKOUT / "docs" / "deploy" / "triton"
TIGHT = ("--kv-tokens", "64")  # room for one request of 40 tokens
PROGRAMS = ("pip", "curl", "tritonserver", "warmroute", "warmroute-sim", "warmroute-engine")


def commands() -> list[str]:
    """Return every command of the page, from its blocks and its inline code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    found = [line.removeprefix("$ ") for line in lines] + re.findall(r"`([^`\n]+)`", prose)
    return [one for one in found if one.split(" ")[0] in PROGRAMS and one != "curl"]


def shown(begin: str) -> str:
    """Return the page's only command that begins with `begin`."""
    (found,) = (one for one in commands() if one.startswith(begin))
    return found


async def test_the_documented_extra_exists() -> None:
    (extra,) = re.findall(r"'\.\[(.*)\]'", shown("pip install '.["))
    assert extra in (metadata("warmroute").get_all("Provides-Extra") or [])


async def ran(command: str, folder: Path, status: int = 0) -> str:
    """Run one of our commands, check its exit status and return its output."""
    program, *arguments = shlex.split(command)
    modules = {"warmroute": "router", "warmroute-sim": "simulator", "curl": None}
    module = modules[program]
    words = [sys.executable, "-m", module, *arguments] if module else [program, *arguments]
    process = await asyncio.create_subprocess_exec(
        *words, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == status, (command, out.decode(), err.decode())
    return out.decode()


async def test_the_doctor_knows_39_causes(tmp_path: Path) -> None:
    out = await ran(shown("warmroute doctor --causes"), tmp_path)
    assert re.search(r"The doctor knows 39 causes", PAGE)
    numbers = set(map(int, re.findall(r"^\s*(\d+)[ .]", out, re.MULTILINE)))
    assert numbers == set(range(1, 40)), out


async def test_the_doctor_judges_several_servers_together(
    servers: list[DoctorsTriton], tmp_path: Path
) -> None:
    """The doctor judges several servers together: it finds a fault while one server has all the
    load, and none once both share it.
    """
    command = shown("warmroute doctor http://gpu1:8000 http") + " --seconds 1 --quiet"
    for number, server in enumerate(servers, 1):
        await server.load(plain())
        command = command.replace(f"http://gpu{number}:8000", server.target)
    async with loaded(servers[0], 24), loaded(servers[1], 1, pause_s=0.2):
        out = await ran(command, tmp_path, status=1)
    assert "1. one worker has all the load (cause 37)" in out
    async with loaded(servers[0], 16), loaded(servers[1], 16):
        out = await ran(command, tmp_path)
    assert out.startswith("No cause found in 1 s under load.")


async def test_measured_times_are_read_by_the_planner(
    servers: list[DoctorsTriton], tmp_path: Path
) -> None:
    """The command `doctor --probe --measure` writes times with one and with three instances, and
    the planner reads both files.
    """
    measure = shown("warmroute doctor http://gpu1:8000 --probe").replace(
        "http://gpu1:8000", servers[0].target
    )
    plans = [c for c in commands() if c.startswith("warmroute-sim instances ") and ".json" in c]
    assert len(plans) == 2
    options = "--rate 100 --p99-ms 400 --html plan.html --json plan.json"
    assert {"--html plan.html", "--json plan.json"} <= set(re.findall(r"`(--\w+ plan.*?)`", PAGE))
    for count, name in ((1, "resnet.json"), (3, "three.json")):
        await servers[0].load(plain(count=count, base_ms=10, per_ms=5))
        command = measure.replace("resnet.json", name)
        await ran(f"{command} --seconds 1 --quiet --probe-concurrency {12 * count}", tmp_path)
    shutil.copy(tmp_path / "resnet.json", tmp_path / "one.json")
    for plan in plans:
        out = await ran(f"{plan.removesuffix('...').strip()} {options}", tmp_path)
        needed = json.loads((tmp_path / "plan.json").read_text())["plan"]["needed"]
        assert f"Take {needed}: p99" in out
        assert "data:image/svg" in (tmp_path / "plan.html").read_text()


@dataclass(slots=True)
class PageTriton(TritonServer):
    """A `tritonserver` started with the page's command. Lifetime: fixture."""

    engine_url: str = ""

    def repository(self) -> Path:
        """Return the folder of the repository that the page's command names, unchanged."""
        program, option, path = shlex.split(shown("tritonserver"))
        assert (program, option) == ("tritonserver", "--model-repository")
        return CHECKOUT / path

    def variables(self) -> dict[str, str]:
        """Return the server's environment variables, which give the engine's URL."""
        return {**TritonServer.variables(self), "WARMROUTE_ENGINE_URL": self.engine_url}


@dataclass(frozen=True, slots=True)
class Whole:
    """Our engine inside Triton, with a method that starts routers. Lifetime: module."""

    triton: PageTriton
    engine: Program
    programs: Programs
    http: aiohttp.ClientSession

    async def router(self, name: str, command: str, *more: str) -> Stack:
        """Start a router with one of the page's commands."""
        words = command.replace("http://127.0.0.1:8000", self.triton.spec).split()[1:]
        ports = ("--port", "0", "--admin-port", "0")
        program = await self.programs.start(name, "router", [*words, *ports, *more])
        stack = Stack(self.programs, program, [], self.http)
        await stack.until_state(0, "ready")
        return stack


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Whole]:
    """Yield a Triton and an engine whose cache has room for one request (`--kv-tokens 64`)."""
    environment = Environment("triton", NEWEST_TRITON).or_skip()
    folder = tmp_path_factory.mktemp("page")
    async with AsyncExitStack() as stack:
        programs = await stack.enter_async_context(Programs(folder / "logs"))
        command = shown("warmroute-engine --timed").replace("8101", str(lasting_port()))
        assert f"`{' '.join(TIGHT)}`" in PAGE
        engine = await programs.start("engine", "engine", [*command.split()[1:], *TIGHT])
        triton = PageTriton(environment, REPOSITORY, folder)
        triton.engine_url = engine.url
        stack.push_async_callback(triton.stop)
        await triton.start()
        await triton.until_healthy()
        connector = aiohttp.TCPConnector(force_close=True)  # Triton waits for the last to end
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Whole(triton, engine, programs, http)


async def test_the_doctor_explains_requests_waiting_in_our_engine(
    whole: Whole, tmp_path: Path
) -> None:
    """With eight requests of 40 tokens, 8 are active and 1 is scheduled; the doctor finds the
    reason at Triton's and at the engine's port.
    """
    router = await whole.router("whole", shown("warmroute serve --worker http://127.0.0.1:8000"))
    listed = await ran(f"warmroute workers --admin {router.admin}", tmp_path)
    assert re.search(r"\bready\b", listed)

    async def client(number: int) -> None:
        body = {"input_ids": [number, *range(100, 139)], "max_tokens": 20}
        while True:
            url = f"{router.url}/v2/models/tensorrt_llm/generate"
            async with whole.http.post(url, json=body) as reply:
                assert reply.status == 200, await reply.text()

    async def gauges_match() -> bool:
        async with whole.http.get(whole.triton.metrics_url) as reply:
            text = await reply.text()
        kinds = dict(
            re.findall(r'nv_trt_llm_request_metrics\{.*request_type="(\w+)".*\} (\S+)', text)
        )
        return (kinds["active"], kinds["scheduled"]) == ("8", "1")

    clients = [asyncio.ensure_future(client(number)) for number in range(1, 9)]
    try:
        await until(gauges_match, "the gauges to say 8 active, 1 scheduled")
        triton = f"{whole.triton.url},metrics={whole.triton.metrics_url}"
        for server in (triton, whole.engine.url):
            said = await ran(f"warmroute doctor {server} --seconds 2 --quiet", tmp_path, status=1)
            assert "1. the KV cache holds one request (cause 13)" in said
    finally:
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    await router.assert_idle()


async def test_the_explain_header_shows_the_tensors_used_for_routing(
    whole: Whole, tmp_path: Path
) -> None:
    """The header in the page's command shows which tensors a request is routed by, with default and
    with custom tensor names.
    """
    command = shown("curl -si")
    (answer,) = re.findall(r"^\"routed_by\":.*$", PAGE, re.MULTILINE)
    serve = "warmroute serve --worker http://127.0.0.1:8000"
    router = await whole.router("asked", serve)
    process = await asyncio.create_subprocess_shell(
        command.replace("http://", "").replace("localhost:8000", router.url),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert out.decode().strip() == answer
    (block,) = re.findall(r"```yaml\n(workers: .*?)```", PAGE, re.DOTALL)
    config = tmp_path / "router.yaml"
    block = re.sub(r"\[http://gpu1.*\]", json.dumps([whole.triton.spec]), block)
    config.write_text(block.replace("support_bot", "ensemble").replace("QUESTION", "text_input"))
    named = await whole.router("named", f"warmroute serve --config {config}")
    body = {"text_input": "t1 t2", "max_tokens": 2}
    url = f"{named.url}/v2/models/ensemble/generate"
    async with whole.http.post(url, json=body, headers={"x-warmroute-explain": "1"}) as reply:
        assert reply.status == 200, await reply.text()
        why = decision_in(reply.headers["x-warmroute-explain"])
    assert "triton_inputs" in why["routed_by"] or "configur" in why["routed_by"], why


async def test_the_limit_field_shows_why_a_request_waits(whole: Whole, tmp_path: Path) -> None:
    """The field `limit` in the page's `curl` answer names what a request waits for."""
    command = shlex.split(shown("curl 'http"))
    assert re.search(r"`limit` in `curl", PAGE)
    serve = "warmroute serve --worker http://127.0.0.1:8000"
    router = await whole.router("limited", serve, "--model-limits", "tensorrt_llm:max_requests=1")

    def ask(**more: Any) -> Any:
        body = {"input_ids": [7, 8, 9], "max_tokens": 50} | more
        url = f"{router.url}/v2/models/tensorrt_llm/generate_stream"
        return whole.http.post(url, json=body, headers={"x-warmroute-explain": "1"})

    async with ask(max_tokens=50, stream=True) as running:
        assert running.status == 200, await running.text()
        number = decision_in(running.headers["x-warmroute-explain"])["request"] + 1
        whole.engine.process.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
        try:
            waiting = asyncio.ensure_future(ask(max_tokens=2, stream=True).__aenter__())

            async def held() -> bool:
                return await router.metric("warmroute_held_requests") == 1

            await until(held, "the second request to wait")
            words = shlex.join(command).replace("http://127.0.0.1:8081", router.admin)
            found = json.loads(await ran(words.replace("=13", f"={number}"), tmp_path))
        finally:
            whole.engine.process.send_signal(signal.SIGCONT)
        assert found["limit"] == "the model's limit of 1 requests is reached"
        await running.read()
    answer = await waiting
    assert answer.status == 200
    await answer.read()
    await router.assert_idle()


# How each command begins, and the test that runs it; another file's by its name.
RUN: Mapping[str, Callable[..., object] | str] = {
    "pip install '.[grpc]'": test_the_documented_extra_exists,
    "pip install 'tritonclient[http]'": (
        "tests/live/test_kserve.py::test_the_documented_client_gets_an_answer"
    ),
    "warmroute serve --port 8000": (
        "tests/engines/test_triton_grpc.py::test_the_documented_command_finds_grpc_beside_http"
    ),
    "warmroute serve --worker http://127.0.0.1:8000": (
        test_the_doctor_explains_requests_waiting_in_our_engine
    ),
    "warmroute workers": test_the_doctor_explains_requests_waiting_in_our_engine,
    "curl -s localhost:8000": (
        "tests/live/test_kserve.py::test_the_documented_client_gets_an_answer"
    ),
    "curl -si localhost:8000": test_the_explain_header_shows_the_tensors_used_for_routing,
    "curl 'http://127.0.0.1:8081/explain": test_the_limit_field_shows_why_a_request_waits,
    "warmroute doctor http://gpu1:8000 --max": (
        "tests/engines/test_doctor.py::test_the_documented_doctor_command_leads_to_the_cure"
    ),
    "warmroute doctor --causes": test_the_doctor_knows_39_causes,
    "warmroute doctor http://gpu1:8000 http": test_the_doctor_judges_several_servers_together,
    "warmroute doctor http://gpu1:8000 --probe": test_measured_times_are_read_by_the_planner,
    "warmroute doctor": test_the_doctor_explains_requests_waiting_in_our_engine,
    "warmroute-sim instances --base-s": (
        "tests/simulator/cli/test_instances.py::test_the_triton_page_shows_the_commands_output"
    ),
    "warmroute-sim instances": test_measured_times_are_read_by_the_planner,
    "warmroute-engine": test_the_doctor_explains_requests_waiting_in_our_engine,
    "tritonserver --model-repository": test_the_doctor_explains_requests_waiting_in_our_engine,
    "curl -s": (
        "tests/engines/test_triton_repository.py::test_the_documented_commands_reach_the_engine"
    ),
}


async def test_every_command_is_run_by_a_test() -> None:
    for command in commands():
        known = [begin for begin in RUN if command.startswith(begin)]
        assert known, f"docs/triton.md shows a command that no test runs: {command}"
    gone = [begin for begin in RUN if not any(c.startswith(begin) for c in commands())]
    assert not gone, f"docs/triton.md does not show these: {gone}"


def test_listed_tests_of_other_files_exist() -> None:
    for test in RUN.values():
        if isinstance(test, str):
            file, _, name = test.partition("::")
            text = (CHECKOUT / file).read_text(encoding="utf-8")
            assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{test}: renamed?"
