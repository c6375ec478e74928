"""A model of Triton's Python backend that takes base_s + per_request_s for each of a batch."""

from __future__ import annotations

import json
import time
from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What Triton calls. Lifetime: instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Once."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._base_s, self._per_request_s = (
            float(parameters[name]["string_value"]) for name in ("base_s", "per_request_s")
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Sleeps, and gives each its input back."""
        end_s = time.perf_counter() + self._base_s + self._per_request_s * len(requests)
        answers = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", value)]))
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return answers
