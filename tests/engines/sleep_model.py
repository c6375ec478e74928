"""A model for Triton's Python backend whose batches take base_s + per_request_s for each
request.
"""

from __future__ import annotations

import json
import time
from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The model class that Triton's Python backend calls. Lifetime: instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the model's parameters; Triton calls this once."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._base_s, self._per_request_s = (
            float(parameters[name]["string_value"]) for name in ("base_s", "per_request_s")
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Sleep for the batch's time and return each request's input."""
        end_s = time.perf_counter() + self._base_s + self._per_request_s * len(requests)
        answers = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", value)]))
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return answers
