"""Configurations of Triton models in TensorRT-LLM's shape: an ensemble and its steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("triton_llm_model.py")
TEXT, NUMBER, NUMBERS = "STRING 1", "INT32 1", "INT32 -1"
WHOLE = "whole"
ENGINES = ("tensorrt_llm", WHOLE)
Models = Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]]
# The inputs and outputs of each model; for a step of an ensemble, the tensor for each of them.
MODELS: Models = {
    "ensemble": ({"text_input": TEXT, "max_tokens": NUMBER}, {"text_output": TEXT}),
    "preprocessing": (
        {"QUERY": TEXT, "REQUEST_OUTPUT_LEN": NUMBER},
        {"INPUT_ID": NUMBERS, "REQUEST_INPUT_LEN": NUMBER, "OUTPUT_LEN": NUMBER},
    ),
    "tensorrt_llm": (
        {"input_ids": NUMBERS, "input_lengths": NUMBER, "request_output_len": NUMBER},
        {"output_ids": NUMBERS},
    ),
    "postprocessing": ({"TOKENS_BATCH": NUMBERS}, {"OUTPUT": TEXT}),
}
TENSORS = {
    "QUERY": "text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "INPUT_ID": "_ids",
    "REQUEST_INPUT_LEN": "_length",
    "OUTPUT_LEN": "_count",
    "input_ids": "_ids",
    "input_lengths": "_length",
    "request_output_len": "_count",
    "output_ids": "_output",
    "TOKENS_BATCH": "_output",
    "OUTPUT": "text_output",
}


def config_of(name: str, models: Models = MODELS, blocks: int = 600) -> str:
    """Return a model's config.pbtxt; `tensorrt_llm` is decoupled, and the model `whole` is the same
    without that.
    """
    lines = [f'name: "{name}"', "max_batch_size: 0"]
    for what, tensors in zip(("input", "output"), models[name], strict=True):
        for tensor, kind in tensors.items():
            kind, size = kind.split()
            lines.append(f'{what} {{ name: "{tensor}" data_type: TYPE_{kind} dims: [ {size} ] }}')
    if name != "ensemble":
        decoupled = "true" if name == "tensorrt_llm" else "false"
        sizes = {"block_size": 32, "blocks": blocks} if name in ENGINES else {}
        return "\n".join(
            [
                *lines,
                'backend: "python"',
                "instance_group { kind: KIND_CPU count: 1 }",
                f"model_transaction_policy {{ decoupled: {decoupled} }}",
                *(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}'
                  for k, v in sizes.items()),
            ]
        )  # fmt: skip
    steps = []
    for step in list(MODELS)[1:]:
        maps = [
            f'{what}_map {{ key: "{tensor}" value: "{TENSORS.get(tensor, tensor)}" }}'
            for what, tensors in zip(("input", "output"), models[step], strict=True)
            for tensor in tensors
        ]
        steps.append(f'step {{ model_name: "{step}" model_version: -1 {" ".join(maps)} }}')
    return "\n".join([*lines, 'platform: "ensemble"', "ensemble_scheduling {", *steps, "}"])
