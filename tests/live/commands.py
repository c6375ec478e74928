"""Runs a command of the router's program, started in the same way as the tests' other programs."""

from __future__ import annotations

import asyncio
import tempfile

from simulator.live import processes
from tests.live.stack import WAIT_S


async def output_of(*arguments: str, module: str = "router") -> tuple[int, str]:
    """Run a command until it exits; return (exit status, its whole output on stdout and stderr)."""
    with tempfile.TemporaryFile() as sink:
        process = await processes.launch(module, arguments, sink)
        try:
            status = await asyncio.wait_for(process.wait(), WAIT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        sink.seek(0)
        return status, sink.read().decode()
