"""Runs real vLLM servers on a CPU, and reads from them which blocks they hold."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp

from simulator.live.processes import Process, log_tail
from tests.engines.environment import Environment
from tests.engines.model import LORA
from tests.live.ports import lasting_port

MODEL = "tiny"
BLOCK_SIZE = 32  # attention on a CPU wants multiples of 32
BLOCKS = 256
MAX_MODEL_TOKENS = 4096
START_S = 300.0
POLL_S = 0.2
STOP_S = 20.0

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine core computes itself, without one more process that would import everything again.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # opens paths for sleep, pause and resets
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}


async def launch(command: Sequence[str], variables: Mapping[str, str], sink: IO[bytes]) -> Process:
    """Start a server in its own session; tests replace this by a fork (`vllm_forks`)."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sink,
        stderr=sink,
        env=variables,
        start_new_session=True,
    )


@dataclass(frozen=True, slots=True)
class Block:
    """A cached block in vLLM's table: its tokens from the prompt's begin to its end, LoRA
    and salt.
    """

    tokens: tuple[int, ...]
    lora: str | None
    salt: str | None


@dataclass(slots=True)
class Server:
    """A running `vllm serve`. Lifetime: fixture."""

    environment: Environment
    model: Path
    folder: Path
    blocks: int = BLOCKS
    block_size: int = BLOCK_SIZE
    name: str = MODEL  # of its model
    publishes: bool = True  # it publishes KV events
    adapted: bool = True  # with the model's adapter, and with tools
    flags: Sequence[str] = ()
    renders: bool = False  # it only makes token ids
    packages: Path | None = None  # a folder with further packages
    port: int = 0
    events: tuple[int, int] = (0, 0)  # ports: live, replay
    process: Process | None = None

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def spec(self) -> str:
        """The server as a value of the router's `--worker`: its URL, and before 0.31 its event
        endpoints.
        """
        return self.spec_at(self.url)

    def spec_at(self, url: str) -> str:
        """Return the `--worker` value for a proxy at `url` in front of the server."""
        if not self.publishes or self.environment.release >= (0, 31):
            return url
        return f"{url},{self.events_option}"

    @property
    def events_option(self) -> str:
        """The server's event endpoints as options of the router's `--worker`."""
        live, replay = self.events
        return f"events=tcp://127.0.0.1:{live},replay=tcp://127.0.0.1:{replay}"

    @property
    def log(self) -> Path:
        """The file of the server's output."""
        return self.folder / "vllm.log"

    @property
    def truth(self) -> Path:
        """The socket at which the plug-in reports what the server holds."""
        return self.folder / "truth"

    async def start(self) -> None:
        """Start the server at its earlier port or a new one; `until_healthy` waits until
        it serves.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.port:
            self.port, self.events = lasting_port(), (lasting_port(), lasting_port())
        self.truth.unlink(missing_ok=True)
        with self.log.open("ab") as sink:
            self.process = await launch(self.command(), self.variables(), sink)

    def variables(self) -> Mapping[str, str]:
        """Return the server's environment variables."""
        more = {} if self.packages is None else {"PYTHONPATH": str(self.packages)}
        return {**os.environ, **ENVIRONMENT, **more, "WARMROUTE_TRUTH": str(self.truth)}

    def command(self) -> list[str]:
        """Return the command that starts the server."""
        program = [str(self.environment.python), "-m", "vllm.entrypoints.cli.main"]
        served = [str(self.model), "--served-model-name", self.name]
        served += ["--host", "127.0.0.1", "--port", str(self.port)]
        if self.renders:
            return [*program, "launch", "render", *served, *self.flags]
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events[0]}",
            "replay_endpoint": f"tcp://*:{self.events[1]}",
        }
        return [
            *(*program, "serve", *served),
            *("--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "16"),
            *("--max-model-len", str(MAX_MODEL_TOKENS), "--block-size", str(self.block_size)),
            *("--num-gpu-blocks-override", str(self.blocks)),
            *("--kv-cache-memory-bytes", str(1 << 28), "--enable-prefix-caching"),
            "--enable-prompt-tokens-details",
            *(("--kv-events-config", json.dumps(events)) if self.publishes else ()),
            *(self._adapter() if self.adapted else ()),
            *self.flags,
        ]

    def _adapter(self) -> list[str]:
        return [
            *("--enable-lora", "--max-lora-rank", "8"),
            *("--lora-modules", f"{LORA}={self.model / 'lora'}"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        ]

    async def until_healthy(self) -> None:
        """Wait until the server answers; fail with the end of its log."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + START_S
        while not await self._healthy():
            assert self.process is not None
            ended = self.process.returncode
            assert ended is None, f"{self.log.stem} ended with {ended}\n{log_tail(self.log)}"
            assert clock() < deadline_s, (
                f"{self.log.stem} not ready in {START_S:g} s\n{log_tail(self.log)}"
            )
            await asyncio.sleep(POLL_S)

    async def _healthy(self) -> bool:
        try:
            async with aiohttp.request("GET", f"{self.url}/health") as reply:
                return reply.status == 200
        except aiohttp.ClientError:
            return False

    async def kill(self) -> None:
        """Kill the server and its engine core with SIGKILL."""
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()

    async def stop(self) -> None:
        """Stop the server with SIGTERM, then SIGKILL if it does not end."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), STOP_S)
        await self.kill()

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request to the server itself, past the router; return (status, answer)."""
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.url}{path}", json=body) as reply,
        ):
            text = await reply.text()
            is_json = reply.content_type == "application/json" and text
            return reply.status, json.loads(text) if is_json else text

    async def cached(self) -> set[Block]:
        """Return the blocks in vLLM's own table, as the plug-in `vllm_truth` reads it."""
        rows = await self.report()
        return {Block(tuple(row["tokens"]), row["lora"], row["salt"]) for row in rows}

    async def report(self) -> Any:
        """Return the report of the plug-in `vllm_truth`, decoded from JSON."""
        reader, writer = await asyncio.open_unix_connection(str(self.truth))
        try:
            return json.loads(await reader.read())
        finally:
            writer.close()
