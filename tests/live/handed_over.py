"""Starts routers that take over each other's sockets by a hot restart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from simulator.live.processes import Program, Programs
from tests.live.ports import lasting_port
from tests.live.stack import engine_arguments


class Routers:
    """Starts routers, each of which takes over from the one before it at the same ports. Lifetime:
    test.
    """

    def __init__(self, programs: Programs, folder: Path, workers: list[Program]) -> None:
        self.programs = programs
        self.folder = folder
        self.workers = workers
        self.ports = ["--port", str(lasting_port()), "--admin-port", str(lasting_port())]

    async def start(self, name: str, *more: str, ports: Sequence[str] = ()) -> Program:
        arguments = [
            "serve",
            *(ports or self.ports),
            "--hot-restart",
            str(self.folder / "next.sock"),
        ]
        arguments += ["--kv-state", str(self.folder / "kv"), "--timeouts-shutdown-s", "3"]
        for worker in self.workers:
            arguments += ["--worker", f"{worker.url},kind=vllm"]
        return await self.programs.start(name, "router", [*arguments, *more])


@asynccontextmanager
async def stage(folder: Path, speed: float = 1) -> AsyncIterator[tuple[Routers, Any]]:
    async with Programs(folder) as programs, aiohttp.ClientSession() as http:
        workers = [
            await programs.start(f"worker-{n}", "engine", engine_arguments(speed=speed))
            for n in range(2)
        ]
        yield Routers(programs, folder, workers), http
