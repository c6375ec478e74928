"""Runs real `llama-server`s of llama.cpp."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.engines.vllm_server import MODEL, Server

CONTEXT_TOKENS = 2048  # of a slot; each slot has its own
SLOTS = 2
CONVERTER = Path(__file__).with_name("llamacpp_model.py")


@dataclass(slots=True)
class LlamaServer(Server):
    """A running `llama-server`. Lifetime: fixture."""

    @property
    def spec(self) -> str:
        """The server as a value of the router's `--worker`."""
        return self.url

    @property
    def log(self) -> Path:
        """The file of the server's output."""
        return self.folder / "llama-server.log"

    def command(self) -> list[str]:
        """Return the command that starts the server."""
        model = self.folder / "model.gguf"
        if not model.exists():
            convert = [self.environment.python, CONVERTER, self.model, model]
            subprocess.run(convert, check=True, timeout=60)
        return [
            *(str(self.environment.folder / "bin" / "llama-server"), "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--alias", MODEL),
            *("--ctx-size", str(SLOTS * CONTEXT_TOKENS), "--parallel", str(SLOTS)),
            *("--threads", "1", "--metrics", *self.flags),
        ]
