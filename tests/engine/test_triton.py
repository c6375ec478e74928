"""Triton's own client at our worker, and what its requests may not be."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from engine.server import triton as tensors
from engine.server.errors import ApiError
from engine.timed import continuation
from tests.effort import examples
from tests.engine.harness import VOCAB, running

MODEL = "warmroute-timed"
BASE = f"/v2/models/{MODEL}"


def tensor(name: str, values: object, kind: str, binary: bool) -> tritonclient.http.InferInput:
    array = np.array(values, dtype={"BYTES": object, "INT32": np.int32, "FP32": np.float32}[kind])
    made = tritonclient.http.InferInput(name, array.shape, kind)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def ask(url: str, binary: bool) -> None:
    """What an application does with the client, all of it blocking."""
    with tritonclient.http.InferenceServerClient(url.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(MODEL)
        assert client.is_model_ready(MODEL, "1")
        assert "generate" in client.get_server_metadata()["extensions"]
        assert client.get_model_metadata(MODEL)["versions"] == ["1"]
        assert client.get_model_config(MODEL)["model_transaction_policy"]["decoupled"]
        assert client.get_model_repository_index()[0]["state"] == "READY"
        expected = continuation([1, 2, 3], 4, VOCAB)
        for prompt in (
            tensor("input_ids", [[1, 2, 3]], "INT32", binary),
            tensor("text_input", [["t1 t2 t3"]], "BYTES", binary),
        ):
            inputs = [prompt, tensor("max_tokens", [[4]], "INT32", binary)]
            wanted = [
                tritonclient.http.InferRequestedOutput("output_ids", binary_data=binary),
                tritonclient.http.InferRequestedOutput("text_output", binary_data=binary),
            ]
            for outputs in (None, wanted):
                result = client.infer(MODEL, inputs, outputs=outputs, request_id="mine")
                assert result.get_response()["id"] == "mine"
                assert result.as_numpy("output_ids").tolist() == expected
                (text,) = result.as_numpy("text_output").tolist()
                text = text if isinstance(text, str) else text.decode()
                assert text == "".join(f" t{token}" for token in expected)
        with pytest.raises(InferenceServerException, match="BYTES, got INT32"):
            client.infer(MODEL, [tensor("text_input", [1], "INT32", binary)])
        with pytest.raises(InferenceServerException, match="one value, got 2"):
            client.infer(MODEL, [tensor("text_input", ["a", "b"], "BYTES", binary)])
        with pytest.raises(InferenceServerException, match="text_input or input_ids"):
            client.infer(MODEL, [tensor("max_tokens", [2], "INT32", binary)])
        with pytest.raises(InferenceServerException, match="does not exist"):
            client.infer("other", [prompt])


@pytest.mark.parametrize("binary", [True, False])
async def test_tritons_client_works_unchanged(binary: bool) -> None:
    async with running() as worker:
        await asyncio.to_thread(ask, worker.url, binary)


FAULTY = (
    {"text_input": "a", "parameters": [1]},
    {"text_input": "a", "parameters": {"max_tokens": 0}},
    {"text_input": "a", "parameters": {"bad_words": ["b"]}},
)


async def test_generate_whole_and_streamed() -> None:
    body = {"text_input": "t1 t2 t3", "max_tokens": 4, "id": "7", "parameters": {"x": 1}}
    text = "".join(f" t{token}" for token in continuation([1, 2, 3], 4, VOCAB))
    async with running() as worker:
        status, answer = await worker.post(f"{BASE}/generate", body)
        assert status == 200
        head = {"model_name": MODEL, "model_version": "1"}
        assert answer == {"id": "7", **head, "text_output": text}
        inside = {"text_input": body["text_input"], "parameters": {"max_tokens": 4}}
        assert (await worker.post(f"{BASE}/generate", inside))[1]["text_output"] == text
        data = json.dumps(body)
        async with worker.http.post(f"{worker.url}{BASE}/generate_stream", data=data) as reply:
            *events, end = (await reply.read()).decode().split("\n\n")
        parts = [json.loads(one.removeprefix("data: ")) for one in events]
        assert "".join(part["text_output"] for part in parts) == text
        assert (len(parts), end) == (4, "")
        for wrong in ({}, {"text_input": 3}, {"text_input": "a", "max_tokens": "b"}, *FAULTY):
            status, answer = await worker.post(f"{BASE}/generate", wrong)
            assert (status, [*answer]) == (400, ["error"])
        status, answer = await worker.post(f"{BASE}/versions/2/generate", body)
        assert (status, "version 1 only" in answer["error"]) == (404, True)


def packed(**changes: object) -> tuple[bytes, str]:
    one = {"name": "input_ids", "datatype": "INT32", "shape": [2]}
    told = json.dumps({"inputs": [one | {"parameters": {"binary_data_size": 8}} | changes]})
    return told.encode() + bytes(8), str(len(told))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": [3]}, "2 values for the shape"),
        ({"shape": [-1]}, "dimensions"),
        ({"datatype": "FP16"}, "datatype 'FP16'"),
        ({"parameters": {"binary_data_size": 9}}, "8 bytes are left"),
        ({"parameters": {"binary_data_size": 4}, "shape": [1]}, "4 bytes follow"),
        ({"parameters": {"binary_data_size": True}}, "binary_data_size True"),
        ({"datatype": "BYTES", "shape": [3]}, "2 values for the shape"),
        ({"parameters": {}, "data": ["a"]}, "not INT32"),
    ],
)
def test_bad_tensors_are_refused_by_name(changes: dict[str, object], says: str) -> None:
    body, header = packed(**changes)
    with pytest.raises(ApiError, match=says):
        tensors.read_tensors(body, header)


def read(body: bytes, header: str | None) -> tuple[int, dict[str, tuple[str, list]] | None]:
    """The status of an answer, and the tensors, if they are any."""
    try:
        return 200, tensors.read_tensors(body, header)[1]
    except ApiError as refused:
        return refused.status, None


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_whatever_comes_is_read_or_refused(data: st.DataObject) -> None:
    body, header = packed(datatype=data.draw(st.sampled_from(["INT32", "BYTES", "FP32", "BOOL"])))
    mutated = bytearray(body)
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=6)):
        mutated[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    header = data.draw(st.sampled_from([header, "0", "-1", "99999999999", "x", None]))
    for one in (bytes(mutated), body[:cut]):
        status, found = read(one, header)
        assert status == (400 if found is None else 200)
        assert all(isinstance(values, list) for _, values in (found or {}).values())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    outputs = {"a": ("BYTES", ["ä", ""]), "b": ("INT32", [1, -2]), "c": ("FP32", [0.5])}
    for binary in (frozenset(), frozenset("ab"), frozenset("abc")):
        body, length = tensors.encode_tensors({"id": "1"}, outputs, binary)
        body = body.replace(b'"outputs"', b'"inputs" ', 1)
        _, found = tensors.read_tensors(body, None if length is None else str(length))
        assert found == outputs
