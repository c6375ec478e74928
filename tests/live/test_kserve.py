"""Tests of KServe v2 through the router to our engine, with Triton's own client and with raw
requests.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.http.aio as triton
from aiohttp import web
from tritonclient.utils import InferenceServerException

from tests.live.stack import MODEL, running, until
from tests.served_app import served_by
from tests.told_decision import decision_in

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "Two people say good day to each other, again and again. " * 8
BASE = f"/v2/models/{MODEL}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    async with running(tmp_path_factory.mktemp("logs"), workers=2) as stack:
        yield stack
        await stack.assert_idle()


def tensors(prompt: str = PROMPT, binary: bool = True) -> list[triton.InferInput]:
    """Return the input tensors of a completion of three tokens."""
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_), binary_data=binary)
    most = triton.InferInput("max_tokens", [1], "INT32")
    most.set_data_from_numpy(np.array([3], dtype=np.int32), binary_data=binary)
    return [text, most]


async def explained(stack, path: str, body: bytes, **headers: str) -> tuple[int, Any, Any]:
    """Post a body; return (status, answer, the router's explanation)."""
    headers = {"x-warmroute-explain": "1", **headers}
    async with stack.http.post(f"{stack.url}{path}", data=body, headers=headers) as reply:
        why = decision_in(reply.headers.get("x-warmroute-explain", "; {}"))
        return reply.status, await reply.json(content_type=None), why


def listed(prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    """Return the JSON body of an `infer` request."""
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [prompt]}
    most = {"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [3]}
    return {"inputs": [text, most], **more}


@pytest.mark.parametrize("binary", [True, False])
async def test_tritons_client_infers_through_the_router(stack, binary) -> None:
    async with triton.InferenceServerClient(stack.url.removeprefix("http://")) as client:
        inputs = tensors(binary=binary)
        found = await client.infer(MODEL, inputs, request_id="7")
        direct_url = stack.workers[0].url.removeprefix("http://")
        async with triton.InferenceServerClient(direct_url) as direct:
            own = await direct.infer(MODEL, inputs, request_id="7")
    assert found.get_response() == own.get_response()
    assert found.as_numpy("text_output") == own.as_numpy("text_output")


async def test_a_prompt_goes_to_the_worker_with_its_prefix_in_any_encoding(stack) -> None:
    ids = [int(one) for one in np.random.default_rng(7).integers(1, 20_000, 200)]
    one = {"name": "input_ids", "datatype": "INT32", "shape": [200]}
    as_json = json.dumps({"inputs": [{**one, "data": ids}]}).encode()
    status, _, first = await explained(stack, f"{BASE}/infer", as_json)
    assert (status, first["expected_hit_tokens"]) == (200, 0)
    assert first["routed_by"] == "usual names"
    head = json.dumps({"inputs": [{**one, "parameters": {"binary_data_size": 800}}]}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    completion = json.dumps({"model": MODEL, "prompt": ids, "max_tokens": 3}).encode()
    for path, data, headers in (
        (f"{BASE}/infer", as_json, {}),
        (f"{BASE}/infer", head + np.array(ids, "<i4").tobytes(), length),
        ("/v1/completions", completion, {}),
    ):
        status, _, why = await explained(stack, path, data, **headers)
        assert status == 200
        assert why["worker"] == first["worker"]
        assert why["expected_hit_tokens"] == 192


async def test_a_stream_arrives_event_by_event(stack) -> None:
    body = {"text_input": "again", "max_tokens": 4, "stream": True}
    url = f"{stack.url}{BASE}/versions/1/generate_stream"
    async with stack.http.post(url, json=body) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        text = await reply.text()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert len(events) == 4
    assert all("text_output" in event for event in events)


async def test_a_compressed_body_is_read_and_forwarded_unchanged(stack) -> None:
    body = gzip.compress(json.dumps(listed()).encode())
    headers = {"Content-Encoding": "gzip"}
    _, _, why = await explained(stack, f"{BASE}/infer", body, **headers)
    assert why["prompt_tokens"] > 50
    bomb = gzip.compress(bytes(80 << 20), 9)
    status, answer, _ = await explained(stack, f"{BASE}/infer", bomb, **headers)
    assert status == 413
    assert "unpacked" in answer["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v2/models/nobody/infer", b'{"inputs":[]}', 404, "unknown model: 'nobody'"),
        (
            f"{BASE}/infer",
            json.dumps(
                {"inputs": [{"name": "x", "shape": [1], "datatype": "INT32",
                             "parameters": {"shared_memory_region": "a"}}]}
            ).encode(),
            *(400, "shared memory"),
        ),
        (f"{BASE}/infer", b"{", 400, "request body"),
        ("/v2/repository/models/x/load", b"{}", 400, "passes on no settings"),
        ("/v2/systemsharedmemory/region/a/register", b"{}", 400, "shared memory"),
        ("/v2/nothing", b"{}", 404, None),
        ("/v2/model/x/infer", b"{}", 404, "at the admin port); served: /v2/models/{model}/infer, "),
        (f"{BASE}/nothing", b"{}", 404, "Not Found"),
    ],
)  # fmt: skip
async def test_errors_have_tritons_format(stack, path, body, status, words) -> None:
    found, answer, _ = await explained(stack, path, body)
    assert found == status
    if words is not None:
        message = answer["error"]
        assert words in (message if isinstance(message, str) else message["message"])


async def test_configured_inputs_that_no_model_has_are_logged_once(tmp_path) -> None:
    flags = ["--triton-inputs", "small:text=Q", "--triton-inputs", "small:session=T"]
    router = [*flags, "--triton-inputs", "absent:text=T"]
    async with (
        small_triton("", 200) as url,
        running(tmp_path, workers=0, router=router) as stack,
    ):
        await stack.add(url)

        async def logged() -> bool:
            return stack.router.log.read_text().count(" triton_inputs: ") >= 2

        await until(logged, "the wrong inputs are told")
        lines = stack.router.log.read_text().splitlines()
    found = [line.partition(" triton_inputs: ")[2] for line in lines if " triton_inputs: " in line]
    assert found == [
        "no worker serves the model 'absent'; models: small",
        "the model 'small' has no input 'Q', which 'small:text=Q' names; its inputs: T",
    ]


async def test_health_metadata_config_index_and_statistics_requests_are_answered(stack) -> None:
    async with triton.InferenceServerClient(stack.url.removeprefix("http://")) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready(MODEL)
        assert (await client.get_server_metadata())["name"] == "warmroute"
        assert (await client.get_model_metadata(MODEL))["name"] == MODEL
        assert (await client.get_model_config(MODEL, "1"))["backend"] == "warmroute"
        index = await client.get_model_repository_index()
        assert [one["name"] for one in index] == [MODEL]
        before = await client.get_inference_statistics(MODEL)
        for _ in range(4):
            await client.infer(MODEL, tensors())
        after = await client.get_inference_statistics(MODEL)
        counts = [one["model_stats"][0]["inference_count"] for one in (before, after)]
        assert counts[1] - counts[0] == 4
        with pytest.raises(InferenceServerException, match="unknown model"):
            await client.get_model_config("nobody")


async def broken_off(request: web.Request, end: bytes) -> web.StreamResponse:
    """Answer with two events and the raw bytes `end`, then close; if `end` is "stuck", hang
    instead.
    """
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for number in range(2):
        await reply.write(b'data: {"n":%d}\n\n' % number)
    if end == b"stuck":
        await asyncio.Event().wait()
    assert request.transport is not None
    request.transport.write(end)
    request.transport.close()
    return reply


async def test_a_stream_whose_deadline_passes_ends_with_an_error(stack) -> None:
    async with small_triton("stuck", 200) as url:
        worker_id = await stack.add(url)
        path, told = f"{stack.url}/v2/models/small/generate_stream", {"x-request-timeout-ms": "300"}
        async with stack.http.post(path, json={"T": "x"}, headers=told) as reply:
            *_, last, end = (await reply.read()).split(b"\n\n")
        why = b"the request's deadline passed in the middle of its answer"
        assert (last, end) == (b'data: {"error":"%b"}' % why, b"")
        assert (await stack.row(worker_id))["inflight_requests"] == 0
        await stack.remove(worker_id)


@pytest.mark.parametrize(("end", "told"), [("", True), ("9\r\ndata", False), ("5", False)])
async def test_a_stream_that_breaks_off_ends_with_an_error_where_one_is_possible(
    stack, end: str, told: bool
) -> None:
    async with small_triton(end, 200) as url:
        worker_id = await stack.add(url)
        path = f"{stack.url}/v2/models/small/generate_stream"
        async with stack.http.post(path, json={"T": "x"}) as reply:
            if told:
                events = (await reply.read()).split(b"\n\n")
                assert events[:2] == [b'data: {"n":0}', b'data: {"n":1}']
                why = b"the worker failed in the middle of its answer"
                assert events[2:] == [b'data: {"error":"%b"}' % why, b""]
            else:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await reply.read()
        assert (await stack.row(worker_id))["inflight_requests"] == 0
        await stack.remove(worker_id)


@asynccontextmanager
async def small_triton(
    answer: str, status: int, pages: Mapping[str, Any] = MappingProxyType({})
) -> AsyncIterator[str]:
    """Run a server that looks like Triton with one model and gives each request this answer; yield
    its URL.
    """
    config = {"backend": "python", "input": [{"name": "T", "data_type": "TYPE_STRING"}]}
    pages = {
        **pages,
        "/v2": {"name": "triton", "extensions": []},
        "/v2/repository/index": [{"name": "small", "version": "1", "state": "READY"}],
        "/v2/models/small/config": config,
        "/v2/models/small/ready": {},
    }

    async def page(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/generate_stream"):
            return await broken_off(request, answer.encode())
        if request.path.endswith(("/infer", "/generate")):
            return web.Response(status=status, text=answer, content_type="application/json")
        if request.path not in pages:
            return web.json_response({"error": "Not Found"}, status=404)
        return web.json_response(pages[request.path])

    async with served_by(page) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("infer", 503, "Exceeds maximum queue size"),
        ("infer", 503, "Request timeout expired"),
        ("generate", 400, "Request timeout expired"),
    ],
)
async def test_a_request_moves_from_a_full_server_without_counting_a_failure(
    stack, path, status, words
) -> None:
    full, url = json.dumps({"error": words}), f"/v2/models/small/{path}"
    async with small_triton(full, status) as busy, small_triton('{"done":1}', 200) as free:
        ids = [await stack.add(busy), await stack.add(free)]
        tried: set[int] = set()
        for number in range(8):
            body = json.dumps({"T": f"{number}"}).encode()
            found, answer, why = await explained(stack, url, body)
            assert (found, answer) == (200, {"done": 1})
            tried.add(why["worker"])
        assert tried == {ids[1]}
        assert await stack.metric("warmroute_retries_total") > 0
        assert (await stack.row(ids[0]))["failures"] == 0
        assert (await stack.row(ids[0]))["state"] in ("ready", "busy")
        await stack.remove(ids[1])
        found, answer, _ = await explained(stack, url, b'{"T":"x"}')
        assert (found, answer) == (status, {"error": words}), (
            "its own words, where there is no other"
        )
        await stack.remove(ids[0])


async def test_a_request_in_a_protocol_that_triton_lacks_gets_404(stack) -> None:
    async with small_triton('{"done":1}', 200) as url:
        worker_id = await stack.add(url)
        body = json.dumps({"model": "small", "input": "x"}).encode()
        status, answer, _ = await explained(stack, "/v1/embeddings", body)
        assert (status, answer["error"]["code"]) == (404, "path_not_served")
        await stack.remove(worker_id)


async def test_servers_with_invalid_statistics_are_left_out(stack) -> None:
    async with small_triton("", 200, pages={"/v2/models/stats": ["x"]}) as url:
        worker_id = await stack.add(url)
        async with triton.InferenceServerClient(stack.url.removeprefix("http://")) as client:
            found = await client.get_inference_statistics()
            names = [one["name"] for one in found["model_stats"]]
            assert names == [MODEL]
        await stack.remove(worker_id)


async def test_a_request_of_a_sequence_whose_server_is_gone_is_refused(stack) -> None:
    async with small_triton('{"done":1}', 200) as one, small_triton('{"done":1}', 200) as other:
        workers = {await stack.add(one), await stack.add(other)}

        async def ask(**flags: bool) -> tuple[int, Any, Any]:
            body = {"inputs": [], "parameters": {"sequence_id": "a", **flags}}
            return await explained(stack, "/v2/models/small/infer", json.dumps(body).encode())

        _, _, why = await ask(sequence_start=True)
        await stack.remove(why["worker"])
        status, answer, _ = await ask()
        assert status == 503
        assert "has its sequence is gone" in answer["error"]
        assert (await ask(sequence_start=True))[0] == 200
        for worker_id in workers - {why["worker"]}:
            await stack.remove(worker_id)


async def test_the_documented_command_prints_how_a_request_was_routed(stack) -> None:
    page = (Path(__file__).parents[2] / "docs" / "triton.md").read_text()
    found = re.search(r"\$ (curl -si .*\\\n.*)\n(.*)\n", page)
    assert found is not None
    command = (
        found[1].replace("localhost:8000", stack.url).replace("models/ensemble", f"models/{MODEL}")
    )
    program = ("bash", "-c", command)
    process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert out.decode().strip() == '"routed_by":"usual names"'
    assert found[2].startswith('"routed_by":"')


async def test_the_documented_client_gets_an_answer(stack) -> None:
    """The first request on the docs page gets an answer, and so does the page's program with
    `tritonclient`.
    """
    page = (Path(__file__).parents[2] / "docs" / "triton.md").read_text()
    curl = re.search(r"^curl -s localhost:8000.*$", page, re.MULTILINE)
    program = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert curl is not None
    assert program is not None
    model = ("ensemble", MODEL)
    address = ("localhost:8000", stack.url.removeprefix("http://"))
    first = ("bash", "-c", curl[0].replace(*model).replace(*address))
    second = (sys.executable, "-c", program[1].replace(*model).replace(*address))
    texts = []
    for words in (first, second):
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert process.returncode == 0
        texts.append(out.decode())
    assert len(json.loads(texts[0])["text_output"].split()) == 20
    assert json.loads(texts[0])["text_output"] in texts[1]


async def test_requests_of_a_sequence_go_to_one_worker(stack) -> None:
    async def ask(number: int, sequence: int, **flags: bool) -> int:
        body = listed(f"{number} of {sequence}", parameters={"sequence_id": sequence, **flags})
        _, _, why = await explained(stack, f"{BASE}/infer", json.dumps(body).encode())
        return int(why["worker"])

    async def send_sequence(sequence: int) -> set[int]:
        first = await ask(0, sequence, sequence_start=True)
        rest = [await ask(number, sequence) for number in range(1, 5)]
        return {first, *rest, await ask(5, sequence, sequence_end=True)}

    found = await asyncio.gather(*(send_sequence(sequence) for sequence in range(1, 9)))
    assert all(len(workers) == 1 for workers in found)
    assert len(set.union(*found)) == 2, "and not all of them the same one"
