"""The three steps of an ensemble in TensorRT-LLM's shape, for Triton's Python backend.

It runs in Triton's processes and imports nothing of ours. The middle step takes token ids as the
TensorRT-LLM backend does, and many requests at once. It prefills one prompt after the other, in a
time that depends on the tokens missing in its prefix cache, and counts its hits.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import OrderedDict
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

PREFILL_TOKENS_PER_S = 20_000
STEP_S = 0.002  # what a token of an answer takes
STEPS = ("preprocessing", "postprocessing")
COUNTED = ("prompt_tokens", "hit_tokens", "answers")  # as counters `tiny_...`


class PrefixCache:
    """The blocks that a worker has cached, with LRU eviction. Lifetime: model."""

    def __init__(self, block_size: int, blocks: int) -> None:
        self.block_size, self._blocks = block_size, blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def hit_tokens(self, ids: np.ndarray) -> int:
        """Return how many of the prompt's tokens are cached, and store all of its blocks."""
        chain, hit, missed = 0, 0, False
        for at in range(0, len(ids) - self.block_size + 1, self.block_size):
            chain = zlib.crc32(ids[at : at + self.block_size].tobytes(), chain)
            missed = missed or chain not in self._held
            hit += 0 if missed else self.block_size
            self._held[chain] = None
            self._held.move_to_end(chain)
        while len(self._held) > self._blocks:
            self._held.popitem(last=False)
        return hit


class TritonPythonModel:
    """The model class that Triton calls; the model's name selects the step. Lifetime: model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the model's parameters; Triton calls this once."""
        self._name = args["model_name"]
        if self._name in STEPS:
            return
        config = json.loads(args["model_config"])
        self._decoupled = config["model_transaction_policy"]["decoupled"]
        self._tells = any(one["name"] == "num_input_tokens" for one in config["output"])
        sizes = {k: int(v["string_value"]) for k, v in config["parameters"].items()}
        self._cache = PrefixCache(**sizes)
        self._prefilling, self._counting = threading.Lock(), threading.Lock()
        self._families, self._counters = [], []
        for name in COUNTED:
            family = pb_utils.MetricFamily(f"tiny_{name}", name, pb_utils.MetricFamily.COUNTER)
            self._families.append(family)
            self._counters.append(family.Metric({"model": self._name}))

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer a batch of requests, or begin to answer them."""
        if self._name == "preprocessing":
            return [ids_of(request) for request in requests]
        if self._name == "postprocessing":
            return [text_of(request) for request in requests]
        if not self._decoupled:
            return [self._computed(request) for request in requests]
        for request in requests:
            threading.Thread(target=self._generate, args=(request,), daemon=True).start()
        return None

    def _count(self, *by: int) -> None:
        # Two threads that count at once end the server (2.51).
        with self._counting:
            for counter, more in zip(self._counters, by, strict=True):
                counter.increment(more)

    def _generate(self, request: Any) -> None:
        sender = request.get_response_sender()
        sender.send(self._computed(request))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _computed(self, request: Any) -> Any:
        ids = given(request, "input_ids").reshape(-1)
        count = int(given(request, "request_output_len").reshape(-1)[0])
        with self._prefilling:
            hit = self._cache.hit_tokens(ids)
            self._count(len(ids), hit, 0)
            time.sleep((len(ids) - hit) / PREFILL_TOKENS_PER_S)
        time.sleep(count * STEP_S)
        answer = np.array([zlib.crc32(ids.tobytes(), n) & 0xFFFF for n in range(count)], np.int32)
        self._count(0, 0, 1)
        told = {
            "kv_cache_reused_blocks": hit // self._cache.block_size,
            "num_input_tokens": len(ids),
            "num_output_tokens": count,
        }
        outputs = {name: np.array([number], np.int32) for name, number in told.items()}
        outputs = {"output_ids": answer} | (outputs if self._tells else {})
        return pb_utils.InferenceResponse([pb_utils.Tensor(*one) for one in outputs.items()])


def given(request: Any, name: str) -> Any:
    """Return the values of a request's input."""
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def ids_of(request: Any) -> Any:
    """Return the token ids of a text; each word is a token."""
    words = given(request, "QUERY").reshape(-1)[0].split()
    ids = np.array([zlib.crc32(word) & 0xFFFFFF for word in words], np.int32)
    outputs = {
        "INPUT_ID": ids,
        "REQUEST_INPUT_LEN": np.array([len(ids)], np.int32),
        "OUTPUT_LEN": given(request, "REQUEST_OUTPUT_LEN").astype(np.int32),
    }
    tensors = [pb_utils.Tensor(name, values) for name, values in outputs.items()]
    return pb_utils.InferenceResponse(tensors)


def text_of(request: Any) -> Any:
    """Return the words of the token ids as a text."""
    text = " ".join(f"t{token}" for token in given(request, "TOKENS_BATCH").reshape(-1))
    output = np.array([text.encode()], np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)])
