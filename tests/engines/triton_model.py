"""A text model for Triton's Python backend, with the tensors of Triton's vLLM and TensorRT-LLM
models.

It runs in Triton's processes and imports nothing of ours. Each word of an answer is a function of
the prompt and the word's position. Its gauges are those of the TensorRT-LLM backend: 0 before the
first request. If decoupled, it answers a `stream` word by word, and many requests at once.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

WORDS = ("worker", "pool", "block", "prefix", "router", "cache", "token", "prompt")
STEP_S = 0.005  # what a word takes
MAX_REQUESTS = 64
REQUESTS = ("nv_trt_llm_request_metrics", "request_type", ("active", "scheduled", "max"))
KV_BLOCKS = (
    "nv_trt_llm_kv_cache_block_metrics",
    "kv_cache_block_type",
    ("max", "used", "free", "tokens_per"),
)


class Gauges:
    """The gauges of the TensorRT-LLM backend at Triton's metrics port. Lifetime: model."""

    def __init__(self, model: str, block_size: int, blocks: int) -> None:
        self._families = []
        self._metrics: dict[str, list[Any]] = {}
        for name, label, kinds in (REQUESTS, KV_BLOCKS):
            family = pb_utils.MetricFamily(name, name, pb_utils.MetricFamily.GAUGE)
            self._families.append(family)
            for kind in kinds:
                metric = family.Metric({"model": model, "version": "1", label: kind})
                self._metrics.setdefault(kind, []).append(metric)
        self._sizes = block_size, blocks
        self._lock = threading.Lock()
        self._requests = self._used = 0

    def add(self, request: int, tokens: int) -> None:
        """Add to the gauges a request with `tokens` tokens that begins (1) or ends (-1)."""
        block_size, blocks = self._sizes
        with self._lock:
            self._requests += request
            self._used += request * -(-tokens // block_size)
            self._metrics["active"][0].set(self._requests)
            self._metrics["scheduled"][0].set(self._requests)
            for metric, value in zip(self._metrics["max"], (MAX_REQUESTS, blocks), strict=True):
                metric.set(value)
            self._metrics["used"][0].set(self._used)
            self._metrics["free"][0].set(blocks - self._used)
            self._metrics["tokens_per"][0].set(block_size)


class TritonPythonModel:
    """The model class that Triton's Python backend calls. Lifetime: model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the model's parameters; Triton calls this once."""
        config = json.loads(args["model_config"])
        self._decoupled = config["model_transaction_policy"]["decoupled"]
        sizes = {k: int(v["string_value"]) for k, v in config["parameters"].items()}
        self._stopped: dict[str, threading.Event] = {}  # requests that run, by id
        self._gauges = Gauges(args["model_name"], **sizes) if self._decoupled else None

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer a batch of requests, or begin to answer them."""
        if not self._decoupled:
            return [response(" ".join(words(*prompt_of(request)))) for request in requests]
        for request in requests:
            if tensor(request, "stop", False):  # as in TensorRT-LLM: stop the request with this id
                if (running := self._stopped.get(request.request_id())) is not None:
                    running.set()
                sender = request.get_response_sender()
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            if prompt_of(request)[0] == "fail":
                failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("as asked"))
                sender = request.get_response_sender()
                sender.send(failed, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            asked = (*prompt_of(request), bool(tensor(request, "stream", False)))
            # A thread still running at Triton's end would wait for Triton's answer.
            threading.Thread(target=self._answer, args=(request, *asked), daemon=True).start()
        return None

    def _answer(self, request: Any, prompt: str, max_tokens: int, stream: bool) -> None:
        sender = request.get_response_sender()
        tokens = len(prompt.split()) + max_tokens
        self._gauges.add(1, tokens)
        stopped = self._stopped[request.request_id()] = threading.Event()
        said = []
        for word in words(prompt, max_tokens):
            time.sleep(STEP_S)
            if stopped.is_set() or sender.is_cancelled():
                break
            said.append(word)
            if stream:
                sender.send(response(f"{word} "))
        if not stream:
            sender.send(response(" ".join(said)))
        self._gauges.add(-1, tokens)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def tensor(request: Any, name: str, default: Any) -> Any:
    """Return the only element of an input, or `default`."""
    found = pb_utils.get_input_tensor_by_name(request, name)
    return default if found is None else found.as_numpy().reshape(-1)[0]


def prompt_of(request: Any) -> tuple[str, int]:
    """Return a request's prompt and how many words it wants."""
    return tensor(request, "text_input", b"").decode(), int(tensor(request, "max_tokens", 16))


def words(prompt: str, count: int) -> list[str]:
    """Return the answer's words for a prompt."""
    return [WORDS[zlib.crc32(f"{prompt} {n}".encode()) % len(WORDS)] for n in range(count)]


def response(text: str) -> Any:
    """Return a response with a whole answer or a part of it."""
    output = np.array([text.encode()], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", output)])
