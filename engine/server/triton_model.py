"""What Triton's clients are told of the model, and how its inputs are called in OpenAI's bodies.

Names are those of Triton's TensorRT-LLM backend (`text_input`, `input_ids`, `request_output_len`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.server.errors import ApiError
from engine.server.retained import TENSORS
from engine.server.worker import Worker

VERSION = "1"
PLATFORM = "warmroute"


class Input(NamedTuple):
    """One input: its datatype, the body's field, and whether it has several values."""

    datatype: str
    field: str
    several: bool = False


INPUTS = (
    ("text_input", Input("BYTES", "prompt")),
    ("input_ids", Input("INT32", "prompt", several=True)),
    ("max_tokens", Input("INT32", "max_tokens")),
    ("request_output_len", Input("INT32", "max_tokens")),
    ("temperature", Input("FP32", "temperature")),
    ("top_k", Input("INT32", "top_k")),
    ("top_p", Input("FP32", "top_p")),
    ("min_p", Input("FP32", "min_p")),
    ("repetition_penalty", Input("FP32", "repetition_penalty")),
    ("presence_penalty", Input("FP32", "presence_penalty")),
    ("frequency_penalty", Input("FP32", "frequency_penalty")),
    ("random_seed", Input("UINT64", "seed")),
    ("min_tokens", Input("INT32", "min_tokens")),
    ("stop_words", Input("BYTES", "stop", several=True)),
    ("ignore_eos", Input("BOOL", "ignore_eos")),
    *((name, Input(datatype, name, several)) for name, datatype, _, several in TENSORS),
)
OUTPUTS = (("text_output", "BYTES"), ("output_ids", "INT32"), ("sequence_length", "INT32"))


def fields_of(tensors: dict[str, tuple[str, list[Any]]]) -> dict[str, Any]:
    """The body's fields that the tensors of an `infer` stand for. Raises ApiError by name."""
    known = dict(INPUTS)
    found: dict[str, Any] = {}
    for name, (datatype, values) in tensors.items():
        one = known.get(name)
        if one is None:
            raise ApiError(400, f"there is no input {name[:128]!r}; known are {', '.join(known)}")
        if datatype != one.datatype:
            raise ApiError(400, f"input {name!r} is {one.datatype}, got {datatype[:32]}", name)
        if not one.several and len(values) != 1:
            raise ApiError(400, f"input {name!r} has one value, got {len(values)}", name)
        if one.field in found:
            raise ApiError(400, f"input {name!r} says the same as one before it", name)
        found[one.field] = values if one.several else values[0]
    if "prompt" not in found:
        raise ApiError(400, "give the input text_input or input_ids", "text_input")
    return found


def described(worker: Worker) -> dict[str, Any]:
    """The answer to GET /v2/models/{m}; -1 stands for any length."""
    inputs = [
        {"name": name, "datatype": one.datatype, "shape": [-1 if one.several else 1]}
        for name, one in INPUTS
    ]
    outputs = [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in OUTPUTS]
    known = {"name": worker.model, "versions": [VERSION], "platform": PLATFORM}
    return known | {"inputs": inputs, "outputs": outputs}


def config(worker: Worker) -> dict[str, Any]:
    """The answer to GET /v2/models/{m}/config: what a config.pbtxt would say."""
    told = described(worker)
    settings = worker.runner.scheduler.settings
    names = ("batch_scheduler_policy", "max_queue_delay_microseconds", "max_num_tokens")
    parameters = {
        name: {"string_value": str(getattr(settings, name))} for name in (*names, "max_batch_size")
    }
    return {
        "name": worker.model,
        "platform": "",
        "backend": PLATFORM,
        "max_batch_size": 0,
        "input": [_typed(one) for one in told["inputs"]],
        "output": [_typed(one) for one in told["outputs"]],
        "model_transaction_policy": {"decoupled": True},
        "parameters": parameters,
    }


def _typed(tensor: dict[str, Any]) -> dict[str, Any]:
    name = "STRING" if tensor["datatype"] == "BYTES" else tensor["datatype"]
    return {"name": tensor["name"], "data_type": f"TYPE_{name}", "dims": tensor["shape"]}
