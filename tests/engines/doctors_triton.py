"""A real Triton server and models for tests of the doctor."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import warnings
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.engines.triton_server import TritonServer
from tests.live.stack import until

SOURCE = Path(__file__).with_name("doctor_model.py")
WATCH_S = 1.0
# Resources and a cache, which models without them do not see.
FLAGS = ("--rate-limit", "execution_count", "--cache-config", "local,size=1048576")
Body = dict[str, Any]


@dataclass(slots=True)
class DoctorsTriton(TritonServer):
    """A `tritonserver` whose models are loaded one by one. Lifetime: module."""

    loaded: list[str] = field(default_factory=list)

    def command(self) -> list[str]:
        """Return the command that starts the server."""
        command = TritonServer.command(self)
        shutil.rmtree(self.folder / "models")
        (self.folder / "models").mkdir()
        caches = self.environment.site_packages / "pytriton" / "tritonserver" / "caches"
        return [*command, "--model-control-mode", "explicit", "--cache-directory", str(caches)]

    @property
    def target(self) -> str:
        """The server as an argument of `warmroute doctor`."""
        return f"{self.url},metrics={self.metrics_url}"

    async def load(self, *models: Model) -> None:
        """Unload the server's models and load these instead."""
        async with aiohttp.ClientSession() as http:
            await self._unload(http)
            self.loaded = [model.name for model in models]
            for model in models:
                version = self.folder / "models" / model.name / "1"
                version.mkdir(parents=True, exist_ok=True)
                shutil.copy(SOURCE, version / "model.py")
                (version.parent / "config.pbtxt").write_text(model.config)
                await self._repository(http, model.name, "load")

    async def _unload(self, http: aiohttp.ClientSession) -> None:
        """Unload all models and end their requests, which would otherwise count for the next
        models.
        """

        async def over() -> bool:
            return "UNLOADING" not in await self._states(http)

        for name in reversed(self.loaded):  # a model that calls others is unloaded before them
            await self._repository(http, name, "unload")
            try:
                await until(over, f"the end of {name}")
            except AssertionError as error:
                # Rarely, a model whose callers were cut off never ends in Triton 2.51.
                warnings.warn(f"tritonserver is started anew: {error}", stacklevel=2)
                await self.stop()
                await self.start()
                await self.until_healthy()
                return

    async def _states(self, http: aiohttp.ClientSession) -> list[str]:
        async with http.post(f"{self.url}/v2/repository/index", json={}) as reply:
            return [one.get("state", "") for one in await reply.json()]

    async def _repository(self, http: aiohttp.ClientSession, name: str, what: str) -> None:
        async with http.post(f"{self.url}/v2/repository/models/{name}/{what}", json={}) as reply:
            assert reply.status == 200, await reply.text()


@dataclass(frozen=True, slots=True)
class Model:
    """A Triton model's name and configuration."""

    name: str
    config: str


def tensor(name: str, kind: str, dims: str, more: str = "") -> str:
    return f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] {more} }}'


def plain(
    extra: str = "dynamic_batching { }",
    batch: int = 8,
    count: int = 1,
    dims: str = "4",
    more: str = "",
    ragged: str = "",
    name: str = "m",
    **parameters: object,
) -> Model:
    """Return a model with numbers as input and output, whose execution takes 20 ms by default."""
    inputs = tensor("INPUT", "FP32", dims, ragged) + more
    output = tensor("OUTPUT", "FP32", "1")
    return Model(name, config_of(inputs, output, extra, batch, count, parameters))


def config_of(
    inputs: str, output: str, extra: str, batch: int, count: int, parameters: dict[str, object]
) -> str:
    told = "".join(
        f'parameters {{ key: "{k}" value: {{ string_value: "{v}" }} }}\n'
        for k, v in parameters.items()
    )
    return (
        f'backend: "python"\nmax_batch_size: {batch}\ninput [ {inputs} ]\noutput [ {output} ]\n'
        f"instance_group [ {{ kind: KIND_CPU count: {count} }} ]\n{extra}\n{told}"
    )


def numbers(length: int = 4, more: bool = False, value: float = 0.5, **parameters: object) -> Body:
    """Return a request body for a model of numbers."""
    data = [value] * length
    inputs = [{"name": "INPUT", "datatype": "FP32", "shape": [1, length], "data": data}]
    if more:
        inputs.append({"name": "MORE", "datatype": "FP32", "shape": [1, 4], "data": [0.5] * 4})
    return {"inputs": inputs, "parameters": parameters}


class Load:
    """Clients that send a new request as soon as the last one is answered. Lifetime: the `async
    with` block.
    """

    def __init__(
        self, server: TritonServer, path: str, clients: int, bodies: Iterable[Body], pause_s: float
    ) -> None:
        self._url, self._clients, self._pause_s = f"{server.url}/v2/models/{path}", clients, pause_s
        self._bodies = itertools.cycle(bodies)
        self._tasks: list[asyncio.Task[None]] = []
        self.answered = asyncio.Event()

    async def __aenter__(self) -> Load:
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(connector=connector)
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    async def _ask(self) -> None:
        while True:
            async with self._http.post(self._url, json=next(self._bodies)) as reply:
                await reply.read()
            self.answered.set()
            await asyncio.sleep(self._pause_s)


@asynccontextmanager
async def loaded(
    server: TritonServer,
    clients: int,
    bodies: Iterable[Body] = (),
    path: str = "m/infer",
    pause_s: float = 0.0,
    warm: bool = True,
) -> AsyncIterator[None]:
    """Run clients during the block, which begins only after the first answer if `warm` is true."""
    async with Load(server, path, clients, bodies or [numbers()], pause_s) as load:
        if warm:
            await asyncio.wait_for(load.answered.wait(), 30.0)
        yield
