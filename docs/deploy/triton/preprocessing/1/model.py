"""The ensemble's first step: a text to token ids, by warmroute-engine's own tokenizer."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What Triton calls. Lifetime: instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Once."""
        told = json.loads(args["model_config"])["parameters"]
        url = os.environ.get("WARMROUTE_ENGINE_URL") or told["engine_url"]["string_value"]
        self._url = f"{url.rstrip('/')}/tokenize"
        self._timeout_s = float(told["timeout_s"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """The ids of each text; what cannot be tokenized is an error of its own request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        texts = pb_utils.get_input_tensor_by_name(request, "QUERY").as_numpy().reshape(-1)
        error = pb_utils.TritonError
        if len(texts) != 1:
            told = f"Expected batch dimension to be 1 for each request, got {len(texts)}"
            return pb_utils.InferenceResponse(error=error(told, error.INVALID_ARG))
        try:
            ids = np.array([self._ids(texts[0].decode(errors="replace"))], dtype=np.int32)
        except urllib.error.HTTPError as refused:
            told = f"warmroute-engine answered {refused.code} to {self._url}"
            return pb_utils.InferenceResponse(error=error(told, error.INVALID_ARG))
        except (OSError, ValueError, LookupError) as failed:
            told = f"warmroute-engine at {self._url}: {failed}"
            return pb_utils.InferenceResponse(error=error(told, error.UNAVAILABLE))
        length = np.array([[ids.shape[1]]], dtype=np.int32)
        tensors = [
            pb_utils.Tensor("INPUT_ID", ids),
            pb_utils.Tensor("REQUEST_INPUT_LEN", length),
        ]
        return pb_utils.InferenceResponse(tensors)

    def _ids(self, text: str) -> list[int]:
        body = json.dumps({"prompt": text}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self._url, data=body, headers=headers)
        with urllib.request.urlopen(asked, timeout=self._timeout_s) as reply:
            found: list[int] = json.loads(reply.read())["tokens"]
            return found
