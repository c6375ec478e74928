"""Finds inference engines that answer on this machine, and writes a first configuration
for them.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from engine.wire.events import WireError
from router.engines import triton
from router.engines.adapter import UnrecognizedError
from router.engines.spec import WorkerSpec
from router.fleet.recognize import Recognized, recognize
from router.fleet.upstreams import WorkerTrust
from router.tokens.encoders import has_tekken, has_tokenizer_json

_ANSWER_S = 2.0  # for one question to an engine
_ENGINE_S = 10.0  # for all questions to one engine
_EXAMPLE = "http://127.0.0.1:8000"
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """An engine that was found: its address, and what its answers say about it."""

    spec: WorkerSpec
    recognized: Recognized | None
    trouble: str = ""  # why it is not recognized

    def __str__(self) -> str:
        """Return one printable line about the engine for people, whatever characters the engine's
        answers contain.
        """
        text = str(self.recognized) if self.recognized else f"not recognized: {self.trouble}"
        shown = "".join(c if c.isprintable() else "?" for c in text)
        return shown[:_SHOWN_CHARACTERS]


async def find_engines(specs: Sequence[WorkerSpec], ports: Iterable[int]) -> list[FoundWorker]:
    """Ask the given workers, or else the usual ports of this machine, and return the engines that
    answer.
    """
    async with WorkerTrust().session() as http:
        if specs:
            return list(await asyncio.gather(*(_recognize(http, spec) for spec in specs)))
        local = (WorkerSpec(f"http://127.0.0.1:{port}") for port in ports)
        found = await asyncio.gather(*(_recognize(http, spec) for spec in local))
        return [one for one in found if one.recognized is not None]


async def _recognize(http: aiohttp.ClientSession, spec: WorkerSpec) -> FoundWorker:
    try:
        async with asyncio.timeout(_ENGINE_S):
            return FoundWorker(spec, await recognize(http, spec, _ANSWER_S))
    except TimeoutError:
        return FoundWorker(spec, None, "no answer in time")
    except (aiohttp.ClientError, UnrecognizedError, WireError) as error:
        return FoundWorker(spec, None, str(error) or type(error).__name__)


def free_ports(first: int) -> tuple[int, int, int]:
    """Return three free ports, searching upwards from `first`."""
    free: list[int] = []
    for port in range(first, 65_536):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        free.append(port)
        if len(free) == 3:
            break
    return free[0], free[1], free[2]


def configuration(found: Sequence[FoundWorker], port: int, admin_port: int, grpc_port: int) -> str:
    """Return the text of a configuration file for the engines found. Text from an engine appears
    only in comments or in quotes.
    """
    workers = [f"  - {json.dumps(str(one.spec))}  # {one}" for one in found]
    if not workers:
        workers = [f'  - "{_EXAMPLE}"  # an example: put the URL of your engine here']
    folders = {one.recognized.model_path for one in found if one.recognized}
    folder = folders.pop() if len(folders) == 1 else None
    local = folder is not None and _has_tokenizer(folder)
    kinds = {one.recognized.kind for one in found if one.recognized}
    tokenizer = [
        "# The folder of the model's tokenizer.json: prompts are then matched token by token.",
        f"tokenizer: {json.dumps(folder)}" if local else "# tokenizer: /models/MODEL",
    ]
    grpc = [
        "# Where Triton's gRPC clients connect; gRPC needs the router's extra `grpc`.",
        f"# grpc_port: {grpc_port}",
    ]
    return "\n".join(
        (
            "# Written by `warmroute init`. Start: warmroute serve --config FILE",
            "# Check: warmroute config --check FILE. All keys: warmroute config --print",
            "",
            "# The engines that requests go to.",
            "workers:",
            *workers,
            *(() if kinds == {triton.ADAPTER.kind} else tokenizer),
            "# Where clients connect. host 0.0.0.0 lets other machines in; see api_keys_file then.",
            'host: "127.0.0.1"',
            f"port: {port}",
            *(grpc if triton.ADAPTER.kind in kinds else ()),
            "# Where operators look: /metrics, /workers, the page /ui. Keep it private.",
            f"admin_port: {admin_port}",
            "",
        )
    )


def _has_tokenizer(folder: str) -> bool:
    path = Path(folder)
    try:
        return path.is_absolute() and (has_tokenizer_json(path) or has_tekken(path))
    except (OSError, ValueError):
        return False
