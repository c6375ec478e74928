"""Builds gRPC requests for text to Triton."""

from __future__ import annotations

from tritonclient.grpc import service_pb2 as pb


def infer_request(
    model: str, id: str, prompt: str, tokens: int, **flags: bool
) -> pb.ModelInferRequest:
    """Return a request for text. `flags` are further inputs, such as `stream` and `stop`."""
    request = pb.ModelInferRequest(model_name=model, id=id)
    text = len(prompt).to_bytes(4, "little") + prompt.encode()
    inputs = [("text_input", "BYTES", text), ("max_tokens", "INT32", tokens.to_bytes(4, "little"))]
    inputs += [(name, "BOOL", bytes([value])) for name, value in flags.items()]
    for name, kind, raw in inputs:
        request.inputs.add(name=name, datatype=kind, shape=[1])
        request.raw_input_contents.append(raw)
    return request
