"""Runs real SGLang servers on a CPU, and reads from them which pages they hold."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.engines.vllm_server import BLOCK_SIZE, MAX_MODEL_TOKENS, MODEL, Block, Server

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
TREES = ("rust", "python")  # SGLang's two implementations of its prefix tree, the usual one first


@dataclass(slots=True)
class SglangServer(Server):
    """A running `sglang.launch_server`. Lifetime: fixture."""

    tree: str = TREES[0]

    @property
    def spec(self) -> str:
        """The server as a value of the router's `--worker`."""
        return self.url

    @property
    def log(self) -> Path:
        """The file of the server's output."""
        return self.folder / "sglang.log"

    def variables(self) -> Mapping[str, str]:
        """Return the server's environment variables."""
        tree = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": self.tree}
        return {**os.environ, **ENVIRONMENT, **tree, "WARMROUTE_TRUTH": str(self.truth)}

    def command(self) -> list[str]:
        """Return the command that starts the server."""
        events = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events[0]}",
            "replay_endpoint": f"tcp://*:{self.events[1]}",
        }
        return [
            *(str(self.environment.python), "-m", "sglang.launch_server"),
            *("--model-path", str(self.model), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--device", "cpu", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"),
            *("--context-length", str(MAX_MODEL_TOKENS), "--page-size", str(BLOCK_SIZE)),
            *("--max-total-tokens", str(self.blocks * BLOCK_SIZE), "--mem-fraction-static", "0.2"),
            *("--max-running-requests", "16", "--tool-call-parser", "qwen"),
            "--sleep-on-idle",  # else its scheduler polls with all of a core
            *("--enable-cache-report", "--enable-metrics"),
            *("--kv-events-config", json.dumps(events)),
            *self.flags,
        ]

    async def pages(self) -> int:
        """Return how many pages the server's prefix tree has."""
        told = await self.report()
        count: int = told["pages"]
        return count

    async def cached(self) -> set[Block]:
        """Return the pages in the server's prefix tree, which must be the one in Python."""
        told = await self.report()
        assert told["rows"] is not None, f"the tree in {self.tree} does not show its pages"
        assert len(told["rows"]) == told["pages"]
        return {Block(tuple(row["tokens"]), row["lora"], row["salt"]) for row in told["rows"]}
