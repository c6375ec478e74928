"""Models for Triton's Python backend that are slow in known ways, for tests of the doctor.

They run in Triton's processes and import nothing of ours. The parameter `kind` selects the model: a
batch that takes `base_ms` + `per_ms` a row; a `crowd` of threads that share one processor; an
`engine` with in-flight batching, a KV cache and the gauges of the TensorRT-LLM backend; a `bls`
that calls that engine, or the model given as `asks`, one request after the other.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

STEP_S = 0.005
BLOCK = 16  # tokens
GAUGES = {
    "nv_trt_llm_request_metrics": ("request_type", ("active", "scheduled", "context", "max")),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        ("max", "used", "free", "tokens_per"),
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        ("paused_requests", "generation_requests", "total_context_tokens"),
    ),
    "nv_trt_llm_general_metrics": ("general_type", ("iteration_counter",)),
    "nv_llm_input_token_len_sum": ("of", ("input",)),
    "nv_llm_input_token_len_count": ("of", ("inputs",)),
}


class Running:
    """One request in the engine. Lifetime: request."""

    def __init__(self, request: Any, prompt: int, longest: int, answer: int) -> None:
        self.sender = request.get_response_sender()
        self.prompt, self.longest = prompt, longest
        self.left = min(longest, answer)
        self.done = 0

    @property
    def held(self) -> int:
        """Return the number of KV blocks for the tokens computed so far."""
        return -(-(self.prompt + self.done) // BLOCK)

    @property
    def reserved(self) -> int:
        """Return the number of KV blocks that the request needs at its greatest length."""
        return -(-(self.prompt + self.longest) // BLOCK)


class Engine:
    """An engine with in-flight batching and a KV cache, which takes a step every 5 ms. Lifetime:
    model.
    """

    def __init__(self, model: str, settings: dict[str, str]) -> None:
        self.most = int(settings.get("batch", "64"))
        self.blocks = int(settings.get("kv_tokens", "65536")) // BLOCK
        self.answer = int(settings.get("answer", "20"))
        self.families, self.gauges = [], {}
        for name, (label, kinds) in GAUGES.items():
            family = pb_utils.MetricFamily(
                name=name, description=name, kind=pb_utils.MetricFamily.GAUGE
            )
            self.families.append(family)
            for kind in kinds:
                labels = {"model": model, "version": "1", label: kind}
                self.gauges[name, kind] = family.Metric(labels=labels)
        self.waiting: list[Running] = []
        self.batch: list[Running] = []
        self.steps = self.inputs = self.input_tokens = 0
        self.lock, self.over = threading.Lock(), False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def add(self, request: Running) -> None:
        """Add a request to the queue."""
        with self.lock:
            self.waiting.append(request)
            self.inputs += 1
            self.input_tokens += request.prompt

    def run(self) -> None:
        """Compute one step after another until the engine ends; skip steps while there are no
        requests.
        """
        while not self.over:
            time.sleep(STEP_S)
            with self.lock:
                if self.waiting or self.batch:
                    self.step()

    def step(self) -> None:
        """Admit the requests whose whole output fits into the cache, and compute a token of each
        running request.
        """
        context = 0
        while self.waiting and len(self.batch) < self.most:
            reserved = sum(one.reserved for one in self.batch) + self.waiting[0].reserved
            if reserved > self.blocks and self.batch:
                break
            context += 1
            self.batch.append(self.waiting.pop(0))
        self.steps += 1
        self.show(context)
        for one in self.batch:
            one.done += 1
            one.left -= 1
            if one.left <= 0 or one.sender.is_cancelled():
                one.sender.send(answered(), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                one.left = 0
        self.batch = [one for one in self.batch if one.left > 0]

    def show(self, context: int) -> None:
        """Set the gauges as the TensorRT-LLM backend does after each step."""
        used = sum(one.held for one in self.batch)
        requests, cache, batcher, general, *lengths = GAUGES
        values = {
            (requests, "active"): len(self.batch) + len(self.waiting),
            (requests, "scheduled"): len(self.batch),
            (requests, "context"): context,
            (requests, "max"): self.most,
            (cache, "max"): self.blocks,
            (cache, "used"): used,
            (cache, "free"): self.blocks - used,
            (cache, "tokens_per"): BLOCK,
            (batcher, "generation_requests"): len(self.batch) - context,
            (general, "iteration_counter"): self.steps,
            (lengths[0], "input"): self.input_tokens,
            (lengths[1], "inputs"): self.inputs,
        }
        for gauge, number in values.items():
            self.gauges[gauge].set(number)


class TritonPythonModel:
    """The model class that Triton's Python backend calls. Lifetime: model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the model's parameters; Triton calls this once."""
        config = json.loads(args["model_config"])
        settings = {k: v["string_value"] for k, v in config["parameters"].items()}
        self.kind = settings.get("kind", "batch")
        self.asks = settings.get("asks", "tensorrt_llm")
        self.base_s = float(settings.get("base_ms", "20")) / 1e3
        self.per_s = float(settings.get("per_ms", "0")) / 1e3
        self.outputs = [one["name"] for one in config["output"]]
        self.processor = threading.Lock()
        is_engine = self.kind == "engine"
        self.engine: Any = Engine(args["model_name"], settings) if is_engine else None

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer a batch of requests, or begin to answer them."""
        if self.kind == "engine":
            for request in requests:
                text = value(request, "text_input", b"")
                longest = int(value(request, "max_tokens", 20))
                self.engine.add(Running(request, len(text.split()), longest, self.engine.answer))
            return None
        if self.kind == "crowd":
            for request in requests:
                sender = request.get_response_sender()
                threading.Thread(target=self.think, args=(sender,), daemon=True).start()
            return None
        if self.kind == "bls":
            return [self.passed(request) for request in requests]
        time.sleep(self.base_s + self.per_s * len(requests))
        return [self.same(request) for request in requests]

    def think(self, sender: Any) -> None:
        """Compute an answer in one of many threads that share the processor, a little at a time."""
        for _ in range(10):
            with self.processor:
                time.sleep(self.base_s / 10)
            time.sleep(0)
        sender.send(answered(), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def passed(self, request: Any) -> Any:
        """Return the answer of the other model, which this instance waits for without doing
        anything else.
        """
        inner = pb_utils.InferenceRequest(
            model_name=self.asks, requested_output_names=self.outputs, inputs=request.inputs()
        )
        if self.asks != "tensorrt_llm":
            return pb_utils.InferenceResponse(inner.exec().output_tensors())
        for _ in inner.exec(decoupled=True):
            pass
        return answered()

    def same(self, request: Any) -> Any:
        """Return outputs equal to the request's first input, or zeros."""
        if self.outputs == ["text_output"]:
            return answered()
        if self.outputs == ["QUERY"]:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            return pb_utils.InferenceResponse([pb_utils.Tensor("QUERY", text)])
        rows = request.inputs()[0].as_numpy().shape[0]
        zeros = np.zeros((rows, 1), dtype=np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor(self.outputs[0], zeros)])

    def finalize(self) -> None:
        """Stop the engine when the model is unloaded."""
        if self.engine is not None:
            self.engine.over = True
            self.engine.thread.join()


def value(request: Any, name: str, default: Any) -> Any:
    """Return the only element of a request's input, or `default` if there is no such input."""
    found = pb_utils.get_input_tensor_by_name(request, name)
    return default if found is None else found.as_numpy().reshape(-1)[0]


def answered() -> Any:
    """Return a response with one text."""
    text = np.array([b"done"], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
