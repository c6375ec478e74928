"""Runs real `tritonserver`s on a CPU with a small text model in the Python backend."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.engines.environment import PYTHON_LIBRARY
from tests.engines.vllm_server import BLOCK_SIZE, MODEL, Server

ECHO, KEPT = "echo", "kept"  # one returns its tensors, one adds up a sequence
WHOLE = "tiny_whole"  # the same model, not decoupled, which `infer` needs
SOURCE = Path(__file__).with_name("triton_model.py")
TENSORS = Path(__file__).with_name("triton_tensors.py")
SHARED_MEMORY = Path("/dev/shm")
CONFIG = """\
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: %s }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "stop" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters [
  { key: "block_size" value: { string_value: "%d" } },
  { key: "blocks" value: { string_value: "%d" } }
]
"""

_KINDS = ("BYTES", "FP16", "BF16", "FP32", "INT64", "BOOL")


def _tensor(name: str, kind: str, dims: int = 2, more: str = "") -> str:
    kind = "STRING" if kind == "BYTES" else kind
    shape = ", ".join(["-1"] * dims)
    return f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {shape} ] {more} }}'


def _list(tensors: Iterable[str]) -> str:
    return f"[ {', '.join(tensors)} ]"


_OPTIONAL = "optional: true"
TENSOR_CONFIGS = {
    ECHO: f"""\
backend: "python"
max_batch_size: 0
input {_list(_tensor(f"IN_{kind}", kind, more=_OPTIONAL) for kind in _KINDS)}
output {_list(_tensor(f"OUT_{kind}", kind) for kind in _KINDS)}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
""",
    KEPT: f"""\
backend: "python"
max_batch_size: 8
input {_list([_tensor("VALUE", "INT32", 1)])}
output {_list([_tensor("SUM", "INT32", 1)])}
sequence_batching {{ max_sequence_idle_microseconds: 60000000 oldest {{
  max_candidate_sequences: 64 }} }}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
""",
}


@dataclass(slots=True)
class TritonServer(Server):
    """A running `tritonserver`. Lifetime: fixture."""

    @property
    def spec(self) -> str:
        """The server as a value of the router's `--worker`."""
        return self.spec_at(self.url)

    def spec_at(self, url: str) -> str:
        """Return the `--worker` value for a proxy at `url` in front of the server."""
        beside = self.grpc == f"127.0.0.1:{self.port + 1}" and url == self.url
        found = "" if beside else f",grpc={self.grpc}"
        return f"{url},metrics={self.metrics_url}{found}"

    @property
    def metrics_url(self) -> str:
        """The URL of the server's metrics, which have a port of their own."""
        return f"http://127.0.0.1:{self.events[1]}/metrics"

    @property
    def grpc(self) -> str:
        """The server's gRPC address, at the port that Triton uses by default if it was free."""
        return f"127.0.0.1:{self.events[0]}"

    @property
    def log(self) -> Path:
        """The file of the server's output."""
        return self.folder / "tritonserver.log"

    @property
    def _memory(self) -> str:
        """The prefix of the names of the server's shared memory."""
        return f"warmroute_triton_{self.port}_"

    def variables(self) -> Mapping[str, str]:
        """Return the server's environment variables."""
        # The interpreter in Triton's stub takes the packages of the `python3` that it finds first;
        # with another numpy than Triton's it fails at each text.
        paths = os.pathsep.join((str(self.environment.folder / "bin"), os.environ.get("PATH", "")))
        return {**os.environ, "PATH": paths, "LD_LIBRARY_PATH": PYTHON_LIBRARY}

    def repository(self) -> Path:
        """Create the server's model repository and return its folder."""
        models = self.folder / "models"
        for name, decoupled in ((MODEL, "true"), (WHOLE, "false")):
            version = models / name / "1"
            version.mkdir(parents=True, exist_ok=True)
            (version.parent / "config.pbtxt").write_text(
                CONFIG % (decoupled, BLOCK_SIZE, self.blocks)
            )
            shutil.copy(SOURCE, version / "model.py")
        for name, config in TENSOR_CONFIGS.items():
            version = models / name / "1"
            version.mkdir(parents=True, exist_ok=True)
            (version.parent / "config.pbtxt").write_text(config)
            shutil.copy(TENSORS, version / "model.py")
        return models

    def command(self) -> list[str]:
        """Return the command that starts the server."""
        models = self.repository()
        packages = self.environment.site_packages
        return [
            str(self.environment.folder / "bin" / "tritonserver"),
            *("--model-repository", str(models)),
            *("--backend-directory", str(packages / "pytriton" / "tritonserver" / "backends")),
            *("--backend-config", f"python,shm-region-prefix-name={self._memory}"),
            *("--http-address", "127.0.0.1", "--http-port", str(self.port)),
            *("--grpc-address", "127.0.0.1", "--grpc-port", str(self.events[0])),
            *("--metrics-port", str(self.events[1]), "--metrics-interval-ms", "100"),
            *("--allow-gpu-metrics", "false"),
            # Its Python backend draws the names of shared memory from one generator without a lock
            # (`GenerateUUID` in pb_utils.cc): of models that load side by side, two may get the
            # same, and the server ends with boost::interprocess::lock_exception.
            *("--model-load-thread-count", "1"),
            *self.flags,
        ]

    async def _healthy(self) -> bool:
        try:
            for url in (f"{self.url}/v2/health/ready", self.metrics_url):  # the latter opens last
                async with aiohttp.request("GET", url) as reply:
                    if reply.status != 200:
                        return False
        except aiohttp.ClientError:
            return False
        return True

    async def kill(self) -> None:
        """Kill the server and its models' processes with SIGKILL; they leave shared
        memory behind.
        """
        await Server.kill(self)
        for left in self._memory_left():
            left.unlink()

    def _memory_left(self) -> list[Path]:
        return list(SHARED_MEMORY.glob(f"{self._memory}*"))
