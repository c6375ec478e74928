"""Fixtures with two real servers and a router, started once for all tests of an engine's
version.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from simulator.live.processes import Programs
from tests.engines.coded_models import CODED, DAY, CodedModel
from tests.engines.compatibility import EXACT, RESULTS, Outcomes, add, table
from tests.engines.doctors_triton import FLAGS, DoctorsTriton
from tests.engines.environment import (
    NEWEST_LLAMACPP,
    NEWEST_SGLANG,
    NEWEST_TORCHVISION,
    NEWEST_TRITON,
    NEWEST_VLLM,
    VLLM_RELEASES,
    Environment,
)
from tests.engines.hybrid_models import DRAFTED, HYBRIDS, HybridModel
from tests.engines.llamacpp_server import LlamaServer
from tests.engines.model import make_model
from tests.engines.pool import Pool
from tests.engines.sglang_server import TREES, SglangServer
from tests.engines.tool_styles import TOOLED
from tests.engines.triton_server import TritonServer
from tests.engines.vision_model import VISION_BLOCKS, VISION_FLAGS, make_vision_model
from tests.engines.vllm_forks import forking_vllm
from tests.engines.vllm_server import MODEL, Server
from tests.live.stack import Stack

SERVERS = 2
OUTCOMES: Outcomes = {}  # of this run
ROUTER = ("--migration-moves", "2", "--intervals-health-s", "0.5")


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    """Start vLLM's servers by forks during the tests; the first server starts the process that
    forks them.
    """
    with forking_vllm():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the small model."""
    return make_model(tmp_path_factory.mktemp("model"))


def _releases(config: pytest.Config) -> tuple[str, ...]:
    # `make test-engines` tries what ENGINES names, the newest unless told otherwise; `make
    # test-all`, which names no tier, all of them.
    named = (one.partition("==") for one in os.environ.get("ENGINES", "").split())
    releases = tuple(version for engine, _, version in named if engine == "vllm")
    return releases or ((NEWEST_VLLM,) if config.getoption("tier") else VLLM_RELEASES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat each test of real vLLM servers for each release."""
    if "vllm" in metafunc.fixturenames:
        metafunc.parametrize("vllm", _releases(metafunc.config), indirect=True, scope="session")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Add the vLLM release to the test's report."""
    release = getattr(item, "callspec", None) and item.callspec.params.get("vllm")
    if release:
        item.user_properties.append(("vllm", release))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a test's outcome for its release; a failed teardown counts as a failure."""
    told = dict(report.user_properties)
    if "vllm" not in told or (report.when == "setup" and report.outcome == "passed"):
        return
    release = str(told["vllm"])
    test = re.sub(rf"\[{re.escape(release)}-?", "[", report.nodeid.partition("@")[0])
    seen = OUTCOMES.setdefault(release, {})
    if report.when == "call" or report.outcome != "passed":
        seen[test.removesuffix("[]")] = report.outcome
    if EXACT in told:
        seen[EXACT] = str(told[EXACT])


def pytest_sessionfinish() -> None:
    """Add this run's outcomes to the table of releases."""
    if OUTCOMES:
        add(OUTCOMES)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the current table of releases."""
    if OUTCOMES:
        terminalreporter.write_line(table(json.loads(RESULTS.read_text())))


@asynccontextmanager
async def _pool(servers: list[Server], folder: Path, *flags: str) -> AsyncIterator[Pool]:
    """Yield the running servers and a router; skip the test if their release is not installed."""
    environment, model = servers[0].environment.or_skip(), servers[0].model
    try:
        for server in servers:
            await server.start()
        for server in servers:
            await server.until_healthy()
        # The router ends first, because Triton waits for its last client to leave, for up to 20 s.
        async with Programs(folder) as programs, aiohttp.ClientSession() as http:
            arguments = ["serve", "--port", "0", "--admin-port", "0", "--tokenizer", str(model)]
            arguments += ["--access-log", str(folder / "access.jsonl"), *ROUTER, *flags]
            for server in servers:
                arguments += ["--worker", server.spec]
            router = Stack(programs, await programs.start("router", "router", arguments), [], http)
            for worker_id in range(len(servers)):
                await router.until_state(worker_id, "ready")
            yield Pool(environment, model, servers, router, folder / "access.jsonl")
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> AsyncIterator[Pool]:
    """Yield two vLLM servers of one release and a router."""
    environment, folder = Environment("vllm", request.param), tmp_path_factory.mktemp("vllm")
    servers = [Server(environment, model, folder / f"server-{n}") for n in range(SERVERS)]
    async with _pool(servers, folder) as pool:
        yield pool


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=HYBRIDS, ids=[one.name for one in HYBRIDS]
)
async def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[HybridModel, Pool]]:
    """Yield, for each hybrid model, the model and a vLLM server with a router."""
    async with _made(request.param, tmp_path_factory) as both:
        yield both


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=DRAFTED, ids=[one.name for one in DRAFTED]
)
async def drafted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[HybridModel, Pool]]:
    """Yield, for each model with a draft head, the model and a vLLM server with a router."""
    async with _made(request.param, tmp_path_factory) as both:
        yield both


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tooled(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """Yield a vLLM server that renders chats with tools in several styles, and a router."""
    async with _made(TOOLED, tmp_path_factory) as (_, pool):
        yield pool


@asynccontextmanager
async def _made(
    made: HybridModel, folders: pytest.TempPathFactory
) -> AsyncIterator[tuple[HybridModel, Pool]]:
    folder = folders.mktemp(made.name)
    environment, model = Environment("vllm", NEWEST_VLLM), made.make(folder / "model")
    server = Server(
        environment, model, folder / "server", adapted=False,
        blocks=made.blocks, block_size=made.asked_size, flags=made.flags(model),
    )  # fmt: skip
    async with _pool([server], folder) as pool:
        yield made, pool


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def images(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """Yield a vLLM server of a model that reads images, and a router."""
    torchvision = Environment("torchvision", NEWEST_TORCHVISION).or_skip()
    folder = tmp_path_factory.mktemp("images")
    server = Server(
        Environment("vllm", NEWEST_VLLM), make_vision_model(folder / "model"), folder / "server",
        adapted=False, blocks=VISION_BLOCKS, flags=VISION_FLAGS, packages=torchvision.site_packages,
    )  # fmt: skip
    async with _pool([server], folder) as pool:
        yield pool


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=CODED, ids=[one.name for one in CODED]
)
async def coded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[CodedModel, Pool]]:
    """Yield, for each model that vLLM renders by its own code, the model and a server with a
    router.
    """
    made: CodedModel = request.param
    folder = tmp_path_factory.mktemp(made.name)
    server = Server(
        Environment("vllm", NEWEST_VLLM), made.make(folder / "model"), folder / "server",
        adapted=False, blocks=made.blocks, flags=made.serving,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SYSTEM_START_DATE", DAY)
        # The test checks the router's own ids, not those that vLLM renders for it.
        flags = ("--harmony-date", DAY, "--render", "never")
        async with _pool([server], folder, *flags) as pool:
            yield made, pool


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sglang(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """Yield two SGLang servers and a router: the first has SGLang's prefix tree in Rust, the second
    in Python.

    Their template shows no tools, because SGLang writes a null into tools that the router does not.
    """
    model = make_model(tmp_path_factory.mktemp("toolless"), shows_tools=False)
    environment, folder = Environment("sglang", NEWEST_SGLANG), tmp_path_factory.mktemp("sglang")
    servers = list[Server]()
    for tree in TREES:
        servers.append(SglangServer(environment, model, folder / tree, tree=tree))
    async with _pool(servers, folder) as pool:
        # A server's first forward pass may leave its probes unanswered for twelve seconds on a busy
        # machine, and the router would take the other server for everything.
        for server in servers:
            first = {"model": MODEL, "prompt": [5], "max_tokens": 1}
            url = f"{server.url}/v1/completions"
            async with pool.router.http.post(url, json=first) as reply:
                assert reply.status == 200, await reply.text()
        for worker_id in range(len(servers)):
            await pool.router.until_state(worker_id, "ready")
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def llamacpp(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Pool]:
    """Yield two llama.cpp servers and a router."""
    environment = Environment("llamacpp", NEWEST_LLAMACPP)
    folder = tmp_path_factory.mktemp("llamacpp")
    servers = [LlamaServer(environment, model, folder / f"server-{n}") for n in range(SERVERS)]
    async with _pool(list(servers), folder) as pool:
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def triton(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Pool]:
    """Yield two Triton servers and a router that forwards paths that it does not know, which
    Triton's paths are.
    """
    environment = Environment("triton", NEWEST_TRITON)
    folder = tmp_path_factory.mktemp("triton")
    servers = [TritonServer(environment, model, folder / f"server-{n}") for n in range(SERVERS)]
    async with _pool(list(servers), folder, "--grpc-port", "0") as pool:
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[DoctorsTriton]]:
    """Yield two Triton servers without a model."""
    environment = Environment("triton", NEWEST_TRITON).or_skip()
    folder = tmp_path_factory.mktemp("doctor")
    both = [
        DoctorsTriton(environment, folder, folder / f"server-{n}", flags=FLAGS) for n in range(2)
    ]
    try:
        for one in both:
            await one.start()
        for one in both:
            await one.until_healthy()
        yield both
    finally:
        await asyncio.gather(*(one.stop() for one in both))
