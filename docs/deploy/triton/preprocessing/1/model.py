"""The ensemble's first step: converts a text to token ids by warmroute-engine's tokenizer."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The class that Triton's Python backend instantiates. Lifetime: instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the engine's address and the timeout from the model's configuration."""
        parameters = json.loads(args["model_config"])["parameters"]
        url = os.environ.get("WARMROUTE_ENGINE_URL") or parameters["engine_url"]["string_value"]
        self._url = f"{url.rstrip('/')}/tokenize"
        self._timeout_s = float(parameters["timeout_s"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return the token ids of each request's text, or an error for this request alone."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        texts = pb_utils.get_input_tensor_by_name(request, "QUERY").as_numpy().reshape(-1)
        error = pb_utils.TritonError
        if len(texts) != 1:
            message = f"Expected batch dimension to be 1 for each request, got {len(texts)}"
            return pb_utils.InferenceResponse(error=error(message, error.INVALID_ARG))
        try:
            ids = np.array([self._ids(texts[0].decode(errors="replace"))], dtype=np.int32)
        except urllib.error.HTTPError as refused:
            message = f"warmroute-engine answered {refused.code} to {self._url}"
            return pb_utils.InferenceResponse(error=error(message, error.INVALID_ARG))
        except (OSError, ValueError, LookupError) as failed:
            message = f"warmroute-engine at {self._url}: {failed}"
            return pb_utils.InferenceResponse(error=error(message, error.UNAVAILABLE))
        length = np.array([[ids.shape[1]]], dtype=np.int32)
        tensors = [
            pb_utils.Tensor("INPUT_ID", ids),
            pb_utils.Tensor("REQUEST_INPUT_LEN", length),
        ]
        return pb_utils.InferenceResponse(tensors)

    def _ids(self, text: str) -> list[int]:
        body = json.dumps({"prompt": text}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
            found: list[int] = json.loads(reply.read())["tokens"]
            return found
