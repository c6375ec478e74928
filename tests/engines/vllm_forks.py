"""Starts vLLM's servers by forks of a process that has already imported everything.

The imports take 18 s of CPU in the process that serves, and as much in the one that computes. A
process of vLLM's own Python imports everything once and forks to become each server; the server
forks its engine core, too (`vllm_truth`), as vLLM does before it uses a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from simulator.live.processes import Process
from tests.engines import vllm_server
from tests.engines.environment import NEWEST_VLLM, Environment
from tests.forks.server import Order
from tests.forks.starting import USABLE, ForkServer, early

PROGRAM = "vllm.entrypoints.cli.main"
# Servers of the newest release are forked; others are started as usual.
MODULES = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)

really_launch = vllm_server.launch  # as outside of tests


class VllmForks:
    """Replaces `vllm_server.launch` in tests by a function that forks. Lifetime: test run."""

    def __init__(self) -> None:
        self._python = str(Environment("vllm", NEWEST_VLLM).python)
        self._server: ForkServer | None = None
        self._early: Mapping[str, str] = {}  # variables that forks cannot change

    async def launch(
        self, command: Sequence[str], variables: Mapping[str, str], sink: IO[bytes]
    ) -> Process:
        """Start a server by a fork if that is equivalent to a normal start, otherwise normally."""
        python, option, module, *arguments = command
        if (python, option, module) != (self._python, "-m", PROGRAM):
            return await really_launch(command, variables, sink)
        if self._server is None or self._server.ended:
            self._server = ForkServer(variables, python, MODULES)
            self._early = early(variables)
        if early(variables) != self._early:
            return await really_launch(command, variables, sink)
        order = Order(module, arguments, dict(variables), os.getcwd())
        return await self._server.start(order, sink)

    def close(self) -> None:
        """End the forking process and its servers."""
        if self._server is not None:
            self._server.close()


@contextmanager
def forking_vllm() -> Iterator[None]:
    """Start vLLM's servers by forks during the block, if the system supports that."""
    if not USABLE:
        yield
        return
    forks = VllmForks()
    vllm_server.launch = forks.launch
    try:
        yield
    finally:
        vllm_server.launch = really_launch
        forks.close()
