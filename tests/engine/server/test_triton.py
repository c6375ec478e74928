"""Tests of Triton's own client with our worker, and of requests that are refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from engine.scheduler.explain import reasons
from engine.server import triton as tensors
from engine.server.errors import ApiError
from engine.timed import continuation
from engine.wire.tensors import infer_answer
from tests.effort import examples
from tests.engine.harness import VOCAB, Running, eventually, running

MODEL = "warmroute-timed"
BASE = f"/v2/models/{MODEL}"
NOT_READY = b'{"error":"Model version not ready"}'


def tensor(name: str, values: object, kind: str, binary: bool) -> tritonclient.http.InferInput:
    array = np.array(values, dtype={"BYTES": object, "INT32": np.int32, "FP32": np.float32}[kind])
    made = tritonclient.http.InferInput(name, array.shape, kind)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def ask(url: str, binary: bool) -> None:
    """Make the calls that an application makes with Triton's blocking client."""
    with tritonclient.http.InferenceServerClient(url.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(MODEL)
        assert client.is_model_ready(MODEL, "1")
        assert "generate" in client.get_server_metadata()["extensions"]
        assert client.get_model_metadata(MODEL)["versions"] == ["1"]
        assert client.get_model_config(MODEL)["model_transaction_policy"]["decoupled"]
        assert client.get_model_repository_index()[0]["state"] == "READY"
        for name in ("", MODEL):
            (told,) = client.get_inference_statistics(name)["model_stats"]
            assert (told["name"], told["version"]) == (MODEL, "1")
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
        for packing in ("gzip", "deflate"):
            packed = {f"{way}_compression_algorithm": packing for way in ("request", "response")}
            result = client.infer(MODEL, inputs, **packed)
            assert result.as_numpy("output_ids").tolist() == expected
        with pytest.raises(InferenceServerException, match="BYTES, got INT32"):
            client.infer(MODEL, [tensor("text_input", [1], "INT32", binary)])
        with pytest.raises(InferenceServerException, match="one value, got 2"):
            client.infer(MODEL, [tensor("text_input", ["a", "b"], "BYTES", binary)])
        with pytest.raises(InferenceServerException, match="text_input or input_ids"):
            client.infer(MODEL, [tensor("max_tokens", [2], "INT32", binary)])
        with pytest.raises(InferenceServerException, match="is not found"):
            client.infer("other", [prompt])


@pytest.mark.parametrize("binary", [True, False])
async def test_tritons_client_library_works_unchanged(binary: bool) -> None:
    async with running() as worker:
        await asyncio.to_thread(ask, worker.url, binary)


FAULTY = (
    {"text_input": "a", "parameters": [1]},
    {"text_input": "a", "parameters": {"max_tokens": 0}},
    {"text_input": "a", "parameters": {"bad_words": ["b"]}},
)


async def test_generate_works_with_and_without_streaming() -> None:
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
        ({"shape": None}, "must have a shape"),
        ({"datatype": "FP16"}, "datatype 'FP16'"),
        ({"parameters": {"binary_data_size": 9}}, "8 bytes are left"),
        ({"parameters": {"binary_data_size": 4}, "shape": [1]}, "4 bytes follow"),
        ({"parameters": {"binary_data_size": True}}, "binary_data_size True"),
        ({"datatype": "BYTES", "shape": [3]}, "2 values for the shape"),
        ({"parameters": {}, "data": ["a"]}, "not INT32"),
        ({"parameters": {}, "data": [True, 1]}, "not INT32"),
        ({"parameters": {}, "data": [1, 2**31]}, "beyond INT32"),
        ({"parameters": {}, "data": [1e300], "datatype": "FP32"}, "beyond FP32"),
        ({"parameters": {"binary_data_size": 7}}, "7 bytes, no whole number of INT32"),
    ],
)
def test_the_error_names_the_bad_tensor(changes: dict[str, object], says: str) -> None:
    body, header = packed(**changes)
    with pytest.raises(ApiError, match=says):
        tensors.read_tensors(body, header)


def read(body: bytes, header: str | None) -> tuple[int, dict[str, tuple[str, list]] | None]:
    """Return the status of an answer, and its tensors, or None if the request was refused."""
    try:
        return 200, tensors.read_tensors(body, header)[1]
    except ApiError as refused:
        return refused.status, None


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_random_tensor_bytes_are_read_or_refused(data: st.DataObject) -> None:
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


def test_written_tensors_are_read_back(tmp_path: Path) -> None:
    outputs = {"a": ("BYTES", ["ä", ""]), "b": ("INT32", [1, -2]), "c": ("FP32", [0.5])}
    for binary in (frozenset(), frozenset("ab"), frozenset("abc")):
        body, length = infer_answer({"id": "1"}, outputs, binary)
        body = body.replace(b'"outputs"', b'"inputs" ', 1)
        _, found = tensors.read_tensors(body, None if length is None else str(length))
        assert found == outputs


async def stats_of(worker: Running, path: str = f"{BASE}/stats") -> dict[str, Any]:
    (found,) = json.loads(await worker.get(path))["model_stats"]
    return found


async def test_statistics_count_requests_once_and_steps_by_batch_size() -> None:
    async with running(speed=5.0) as worker:
        before = await stats_of(worker)
        assert (before["inference_count"], before["batch_stats"]) == (0, [])
        assert before["last_inference"] == 0
        body = {"text_input": "t1 t2 t3", "max_tokens": 8}
        answers = await asyncio.gather(*(worker.post(f"{BASE}/generate", body) for _ in range(6)))
        assert {status for status, _ in answers} == {200}
        found = await stats_of(worker)
        assert found == await stats_of(worker, "/v2/models/stats")
        assert found == await stats_of(worker, f"{BASE}/versions/1/stats")
        assert found["inference_count"] == 6
        steps = worker.worker.runner.scheduler.steps_total
        assert found["execution_count"] == steps
        sizes = {one["batch_size"]: one["compute_infer"]["count"] for one in found["batch_stats"]}
        assert sum(sizes.values()) == steps
        # A step for each token of each request; short prompts are computed with the first.
        assert sum(size * count for size, count in sizes.items()) == 6 * 8
        assert max(sizes) > 1
        sums = found["inference_stats"]
        assert [sums[name]["count"] for name in ("success", "queue", "compute_infer")] == [6] * 3
        assert sums["success"]["ns"] == pytest.approx(
            sums["queue"]["ns"] + sums["compute_infer"]["ns"], abs=6
        )
        assert sums["fail"] == sums["cache_hit"] == {"count": 0, "ns": 0}
        # Six requests that ran together have waited for more time than has passed.
        passed = sum(
            one[part]["ns"]
            for one in found["batch_stats"]
            for part in ("compute_input", "compute_infer", "compute_output")
        )
        assert sums["compute_infer"]["ns"] > passed
        assert found["last_inference"] > 1_600_000_000_000


async def test_a_request_whose_client_disconnected_counts_as_failed() -> None:
    async with running(speed=1.0) as worker:
        body = json.dumps({"text_input": "t1", "max_tokens": 2000})
        async with worker.http.post(f"{worker.url}{BASE}/generate_stream", data=body) as reply:
            await reply.content.readany()
        await eventually(lambda: worker.worker.unfinished == 0, "its request to end")
        found = await stats_of(worker)
        assert found["inference_count"] == 0
        assert found["inference_stats"]["fail"]["count"] == 1
        assert found["inference_stats"]["fail"]["ns"] > 0


async def test_gauges_show_eight_active_and_one_scheduled_with_reasons() -> None:
    """With a cache for one request, the gauges show eight active requests and one scheduled one,
    and the engine gives each other request's reason to wait in its own words.
    """
    prompt = [*range(1, 40)]
    async with running(speed=0.05, kv_tokens=64) as worker, asyncio.TaskGroup() as group:
        body = {"prompt": prompt, "max_tokens": 20}
        for number in range(8):
            mine = body | {"prompt": [number, *prompt]}
            group.create_task(worker.post("/v1/completions", mine))
        scheduler, steps = worker.worker.runner.scheduler, worker.worker.steps
        await eventually(
            lambda: (
                steps.requests == {"active": 8, "scheduled": 1, "max": 256}
                and sum(reasons(scheduler).values()) == 7
            ),
            "a step of one to have ended, and the others to have been looked at",
        )
        told = json.loads(await worker.get("/explain"))
        shown = (await stats_of(worker))["scheduler"]
        assert (shown["active"], shown["scheduled"], shown["max"]) == (8, 1, 256)
        assert shown["waiting"] == told["waiting_for"]
        assert sum(shown["waiting"].values()) == 7
        assert set(shown["waiting"]) <= {"kv_blocks", "priority"}
        assert shown["kv_blocks"]["max"] == 4
        assert shown["kv_blocks"]["used"] + shown["kv_blocks"]["free"] == 4
        assert (told["active"], told["scheduled"], told["running"]) == (8, 1, 1)
        assert [one["queue_position"] for one in told["requests"]] == [*range(7), None]
        assert [one["reason"] is not None for one in told["requests"]] == [True] * 7 + [False]
        assert len({one["request"] for one in told["requests"]}) == 8
        worker.worker.cut_all()  # which would take them half a minute


async def test_a_worker_that_shuts_down_is_not_ready_in_tritons_form() -> None:
    async with running() as worker:
        worker.worker.draining = True
        for path, body in (("/v2/health/ready", b""), (f"{BASE}/ready", NOT_READY)):
            async with worker.http.get(worker.url + path) as reply:
                assert (reply.status, await reply.read()) == (400, body)
        index = "/v2/repository/index"
        status, rows = await worker.post(index, {})
        assert (status, rows[0]["state"]) == (200, "UNAVAILABLE")
        assert await worker.post(index, {"ready": True}) == (200, [])
        assert (await worker.post(index, b"["))[0] == 400


async def test_optional_inputs_are_declared_optional() -> None:
    """Inputs that may be left out are declared optional: a client that sends only the others, as
    load generators do, is served.
    """
    async with running() as worker:
        config = json.loads(await worker.get(f"{BASE}/config"))
        needed = [one["name"] for one in config["input"] if not one["optional"]]
        assert needed == ["text_input"]
        row = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["t1"]}
        status, _ = await worker.post(f"{BASE}/infer", {"inputs": [row]})
        assert status == 200
