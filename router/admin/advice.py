"""Advice computed beside the router, in a process of its own, and the last one shown: `/advice`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from router.config.schema import Config
from router.http.messages import Request, Response, json_response

log = logging.getLogger(__name__)

# A process, for the router imports nothing of it. -P: no module of the folder it starts in.
PROGRAM = ("-P", "-m", "simulator", "advise")
NICE = 10
_MAX_BYTES = 4 << 20  # of the file that is shown
_MAX_SAID = 2_000  # of what a process that failed said last
_GRACE = 1.5  # times its budget: whoever takes longer is ended


def command_of(arguments: Sequence[str], budget_s: float, memory_mb: int) -> list[str]:
    """The command line of one advice. What `arguments` say comes last, and so holds."""
    bounds = [f"--nice={NICE}", f"--memory-mb={memory_mb}", f"--budget={budget_s:g}"]
    return [sys.executable, *PROGRAM, *bounds, *arguments]


class Advising:
    """Starts `warmroute advise` now and then, and reads what it wrote. Lifetime: process.

    Off where `advise.every_s` is 0; then what is shown is what somebody else put there.
    """

    def __init__(self, config: Config, now_s: Callable[[], float] = time.time) -> None:
        self._keys = config.advise
        self._now_s = now_s
        log_path = config.request_log or config.record
        self._log = log_path
        self._file = None if log_path is None else Path(f"{log_path.rstrip('/')}.advice.json")
        self._running = False
        self._ended_s: float | None = None
        self._failed = ""

    @property
    def wanted(self) -> bool:
        """Whether there is anything to start."""
        return self._keys.every_s > 0

    def command(self) -> list[str]:
        """What is started."""
        arguments = [
            *(f"--{one}" for one in self._keys.options),
            f"--json={self._file}",
            str(self._log),
        ]
        return command_of(arguments, self._keys.budget_s, self._keys.memory_mb)

    async def run(self) -> None:
        """One after the other, for ever; the first when there has been something to log."""
        while True:
            await asyncio.sleep(self._keys.every_s)
            await self.once()

    async def once(self) -> None:
        """Starts one and waits for its end; a process that fails is told, never raised."""
        self._running = True
        try:
            status, said = await self._spent(self.command())
        except OSError as error:
            status, said = 1, str(error)
        finally:
            self._running = False
        self._ended_s = self._now_s()
        self._failed = "" if status == 0 else said or f"it ended with {status}"
        if self._failed:
            log.warning("no advice: %s", self._failed)

    async def _spent(self, command: Sequence[str]) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that it and what it starts can be ended together
        )
        assert process.stderr is not None
        limit_s = _GRACE * self._keys.budget_s
        try:
            async with asyncio.timeout(limit_s):
                said = await _tail(process.stderr)
                return await process.wait(), said
        except TimeoutError:
            return 1, f"it took more than {limit_s:g} s and was ended"
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    def shown(self) -> dict[str, Any]:
        """The last advice, and how the making of it stands. Reads the file."""
        told = {
            "every_s": self._keys.every_s,
            "running": self._running,
            "ended_at": self._ended_s,
            "failed": self._failed,
            "advice": None,
            "written_at": None,
        }
        if self._file is None:
            return told
        try:
            with self._file.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
                told["written_at"] = os.fstat(file.fileno()).st_mtime
            if len(data) > _MAX_BYTES:
                raise ValueError(f"more than {_MAX_BYTES} bytes")
            told["advice"] = msgspec.json.decode(data)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            told["failed"] = f"{self._file}: cannot be shown: {error}"
        return told

    async def show(self, request: Request) -> Response:
        """`GET /advice`."""
        return json_response(await asyncio.to_thread(self.shown))


async def _tail(stream: asyncio.StreamReader) -> str:
    """The end of all that comes."""
    kept = b""
    while part := await stream.read(1 << 16):
        kept = (kept + part)[-_MAX_SAID:]
    return kept.decode(errors="replace").strip()
