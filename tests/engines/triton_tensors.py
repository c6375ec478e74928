"""Two models for Triton's Python backend: one returns its inputs, one adds up a sequence.

They run in Triton's processes and import nothing of ours.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The model class that Triton's Python backend calls. Lifetime: model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the model's parameters; Triton calls this once."""
        config = json.loads(args["model_config"])
        self._sequences = "sequence_batching" in config
        self._sums: dict[Any, int] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a batch of requests."""
        answer = self._sum if self._sequences else echo
        return [pb_utils.InferenceResponse(answer(request)) for request in requests]

    def _sum(self, request: Any) -> list[Any]:
        sequence = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self._sums[sequence] = 0
        value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()
        self._sums[sequence] += int(value.sum())
        return [pb_utils.Tensor("SUM", np.array([[self._sums[sequence]]], dtype=np.int32))]


def echo(request: Any) -> list[Any]:
    """Return each input as the output of the same type."""
    found = []
    for one in request.inputs():
        name = one.name().replace("IN_", "OUT_")
        if name.endswith("BYTES"):
            found.append(pb_utils.Tensor(name, one.as_numpy()))
        else:  # numpy has no BF16
            found.append(pb_utils.Tensor.from_dlpack(name, one.to_dlpack()))
    return found
