"""Tests that Triton's own client gets the same answers from a real `tritonserver` and through the
router.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.http.aio as client_of
import tritonclient.utils as utils
from yarl import URL

from tests.engines.pool import Pool
from tests.engines.triton_asked import GENERATE, INFER, STREAM, answer_of, tensors, text_request
from tests.engines.triton_server import ECHO, KEPT, WHOLE
from tests.engines.vllm_server import MODEL
from tests.live.stack import until
from tests.told_decision import decision_in

pytestmark = pytest.mark.asyncio(loop_scope="session")

REQUESTS = 100
AT_ONCE = 16
Client = Any


@pytest_asyncio.fixture(loop_scope="session")
async def clients(triton: Pool) -> AsyncIterator[tuple[Client, Client]]:
    """Yield a client of the router and a client of a server."""
    urls = triton.router.url, triton.servers[0].url
    both = [client_of.InferenceServerClient(url.removeprefix("http://")) for url in urls]
    yield both[0], both[1]
    for one in both:
        await one.close()


async def same(clients: tuple[Client, Client], ask: Callable[[Client], Awaitable[Any]]) -> Any:
    """Call both clients, check that their results are equal, and return the result."""
    found = []
    for client in clients:
        try:
            found.append(await ask(client))
        except utils.InferenceServerException as error:
            found.append((error.status(), error.message()))
    assert found[0] == found[1]
    return found[0]


def given(name: str, values: np.ndarray[Any, Any], kind: str, binary: bool = True) -> Any:
    """Return an input tensor with these values and this data type."""
    one = client_of.InferInput(name, list(values.shape), kind)
    return one.set_data_from_numpy(values, binary_data=binary)


ARRAYS = {
    "BYTES": np.array([["é".encode(), b"\0\xff"], [b"", b"x" * 70_000]], dtype=np.object_),
    "FP16": np.linspace(-1, 1, 6, dtype=np.float16).reshape(2, 3),
    "FP32": np.array([[np.pi]], dtype=np.float32),
    "INT64": np.array([[-(2**63), 2**63 - 1]], dtype=np.int64),
    "BOOL": np.array([[True, False]]),
}


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
async def test_tensors_of_each_type_pass_unchanged(clients, kind: str, coding: str | None) -> None:
    values = ARRAYS[kind]

    async def ask(client: Client) -> Any:
        found = await client.infer(
            ECHO,
            [given(f"IN_{kind}", values, kind)],
            request_id="7",
            request_compression_algorithm=coding,
            response_compression_algorithm=coding,
        )
        return found.get_response(), found.as_numpy(f"OUT_{kind}").tolist()

    _, echoed = await same(clients, ask)
    assert echoed == values.tolist()


async def test_bf16_tensors_pass_unchanged(triton: Pool) -> None:
    """BF16 tensors pass unchanged; the test sends raw bytes, because numpy has no such type."""
    data = np.array([[1.5, -2.0, 0.25]], dtype=np.float32).view("<u2")[:, 1::2].tobytes()
    sizes = {"binary_data_size": len(data)}
    one = {"name": "IN_BF16", "datatype": "BF16", "shape": [1, 3], "parameters": sizes}
    head = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Accept-Encoding": "identity"}
    path = f"/v2/models/{ECHO}/infer"
    routed = await answer_of(triton.router.url, "POST", path, head + data, **headers)
    assert routed == await answer_of(triton.servers[0].url, "POST", path, head + data, **headers)
    assert routed[0] == 200
    assert routed[2].endswith(data)


@pytest.mark.parametrize("kind", ["FP32", "INT64", "BOOL"])
async def test_tensors_as_json_pass_unchanged(clients, kind: str) -> None:
    async def ask(client: Client) -> Any:
        one = given(f"IN_{kind}", ARRAYS[kind], kind, binary=False)
        wanted = [client_of.InferRequestedOutput(f"OUT_{kind}", binary_data=False)]
        return (await client.infer(ECHO, [one], outputs=wanted)).get_response()

    assert (await same(clients, ask))["outputs"][0]["data"]


async def test_errors_equal_the_servers(clients) -> None:
    text = given("text_input", np.array([b"x"], dtype=np.object_), "BYTES")
    wrong = given("text_input", np.array([1], dtype=np.int32), "INT32")
    for model, inputs in ((MODEL, [text]), (WHOLE, []), (WHOLE, [wrong]), ("absent", [text])):
        status, message = await same(clients, lambda c, m=model, i=inputs: c.infer(m, i))
        assert status in ("400", "404", "501")
        assert message


def binary(size: int, shape: list[int], data: bytes, head_length: int = 0) -> tuple[str, bytes]:
    """Return (stated header length, body) of an FP32 tensor in binary form."""
    told = {"binary_data_size": size}
    one = {"name": "IN_FP32", "datatype": "FP32", "shape": shape, "parameters": told}
    head = json.dumps({"inputs": [one]}).encode()
    return str(len(head) + head_length), head + data


SIXTEEN = bytes(16)  # four FP32
MALFORMED = {
    "fewer bytes than the shape": binary(12, [1, 4], SIXTEEN[:12]),
    "more bytes than the shape": binary(20, [1, 4], SIXTEEN + bytes(4)),
    "fewer bytes than told": binary(16, [1, 4], SIXTEEN[:9]),
    "more bytes than told": binary(16, [1, 4], SIXTEEN + bytes(9)),
    "no bytes": binary(16, [1, 4], b""),
    "a size below zero": binary(-1, [1, 4], SIXTEEN),
    "a shape below zero": binary(16, [1, -4], SIXTEEN),
    "a shape beyond 64 bits": binary(16, [1 << 40, 1 << 40], SIXTEEN),
    "a size beyond all": binary(1 << 62, [1, 4], SIXTEEN),
    "a header that is too short": binary(16, [1, 4], SIXTEEN, -1),
    "a header that is too long": binary(16, [1, 4], SIXTEEN, 1),
    "a header beyond the body": binary(16, [1, 4], SIXTEEN, 1 << 20),
    "a header's length that is no number": ("many", b"{}"),
    "texts whose lengths are wrong": (
        lambda head: (str(len(head)), head + b"\xff\xff\xff\x7fabcd")
    )(
        b'{"inputs":[{"name":"IN_BYTES","datatype":"BYTES","shape":[1,1],'
        b'"parameters":{"binary_data_size":8}}]}'
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
async def test_malformed_tensors_are_refused_in_tritons_form(triton: Pool, what: str) -> None:
    """Malformed tensors are refused with the server's own error; no worker is blamed, and the next
    request is answered.
    """
    length, body = MALFORMED[what]
    headers = {"Inference-Header-Content-Length": length, "Accept-Encoding": "identity"}
    path = f"/v2/models/{ECHO}/infer"
    server, router = triton.servers[0].url, triton.router
    direct, routed = [
        await answer_of(url, "POST", path, body, **headers) for url in (server, router.url)
    ]
    assert routed == direct
    assert routed[0] in (400, 500)  # Triton's answer to JSON that it cannot read
    assert set(json.loads(routed[2])) == {"error"}
    assert [(await router.row(n))["state"] for n in range(2)] == ["ready", "ready"]
    length, body = binary(16, [1, 4], SIXTEEN)
    headers["Inference-Header-Content-Length"] = length
    assert (await answer_of(router.url, "POST", path, body, **headers))[0] == 200
    await router.assert_idle()


@pytest.mark.parametrize("path", ["versions/x/infer", "versions/%31/infer", "%69nfer", "infer;x=1"])
async def test_a_404_for_one_path_does_not_block_paths_of_other_clients(
    triton: Pool, path: str
) -> None:
    """A 404 for one client's path does not make the router believe that the server lacks the path
    for other clients; Triton does not decode escapes in paths.
    """
    length, body = binary(16, [1, 4], SIXTEEN)
    headers = {"Inference-Header-Content-Length": length}
    url, router = f"/v2/models/{ECHO}/{path}", triton.router
    for base in (triton.servers[0].url, router.url, router.url):
        target = URL(f"{base}{url}", encoded=True)
        async with router.http.post(target, data=body, headers=headers) as reply:
            assert (reply.status, await reply.read()) == (404, b'{"error":"Not Found"}')
    assert (await answer_of(router.url, "POST", f"/v2/models/{ECHO}/infer", body, **headers))[
        0
    ] == 200


async def test_calls_beside_inference_give_the_servers_results(clients) -> None:
    for ask in (
        lambda c: c.is_server_live(),
        lambda c: c.is_server_ready(),
        lambda c: c.is_model_ready(ECHO),
        lambda c: c.is_model_ready("absent"),
        lambda c: c.get_model_metadata(ECHO),
        lambda c: c.get_model_metadata(ECHO, "1"),
        lambda c: c.get_model_config(ECHO),
        lambda c: c.get_model_config("absent"),
        lambda c: c.get_model_repository_index(),
    ):
        await same(clients, ask)
    router, _ = clients
    assert (await router.get_server_metadata())["name"] == "warmroute"
    assert "statistics" in (await router.get_server_metadata())["extensions"]
    with pytest.raises(utils.InferenceServerException, match="passes on no settings"):
        await router.load_model(ECHO)
    with pytest.raises(utils.InferenceServerException, match="shared memory"):
        await router.register_system_shared_memory("a", "/a", 8)


async def test_statistics_are_the_sum_of_all_servers(triton: Pool, clients) -> None:
    async def counts(url: str) -> int:
        _, _, body = await answer_of(url, "GET", f"/v2/models/{WHOLE}/stats", None)
        return int(json.loads(body)["model_stats"][0]["inference_count"])

    before = await counts(triton.router.url)
    for serial in range(6):
        body = json.dumps(tensors(f"{serial}", 1)).encode()
        assert (await answer_of(triton.router.url, "POST", INFER, body))[0] == 200

    async def counted() -> bool:  # servers count after they have answered
        each = [await counts(server.url) for server in triton.servers]
        return await counts(triton.router.url) == sum(each) == before + 6

    await until(counted, "the sum to be that of both servers")


async def test_a_stream_equals_the_servers(triton: Pool) -> None:
    body = text_request("What is it?", 9, stream=True)
    routed = await answer_of(triton.router.url, "POST", STREAM, body)
    assert routed == await answer_of(triton.servers[0].url, "POST", STREAM, body)
    assert routed[2].count(b"data: {") == 9


async def test_sequences_stick_to_one_server(triton: Pool, clients) -> None:
    """All requests of a sequence go to one server, which alone can add up the sequence's inputs."""
    router, _ = clients

    async def whole(sequence: int) -> list[int]:
        sums = []
        for number in range(6):
            one = given("VALUE", np.array([[number]], dtype=np.int32), "INT32")
            flags = {"sequence_start": number == 0, "sequence_end": number == 5}
            found = await router.infer(KEPT, [one], sequence_id=sequence, **flags)
            sums.append(int(found.as_numpy("SUM")[0][0]))
        return sums

    found = await asyncio.gather(*(whole(sequence) for sequence in range(1, 9)))
    assert found == [[0, 1, 3, 6, 10, 15]] * 8
    alone = [given("VALUE", np.array([[1]], dtype=np.int32), "INT32")]
    status, message = await same(clients, lambda client: client.infer(KEPT, alone))
    assert (status, "correlation ID" in message) == ("400", True)


async def test_a_repeated_prompt_goes_to_its_server_and_explain_shows_why(triton: Pool) -> None:
    prompt = "The same words, again and again, until they fill some blocks. " * 12

    async def why(path: str, body: bytes) -> dict[str, Any]:
        headers = {"x-warmroute-explain": "1"}
        url = f"{triton.router.url}{path}"
        async with triton.router.http.post(url, data=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            found: dict[str, Any] = decision_in(reply.headers["x-warmroute-explain"])
            return found

    body = text_request(prompt, 1)
    seen: list[dict[str, Any]] = []

    async def found() -> bool:  # servers that tell their sizes with a first answer begin anew
        seen.append(await why(GENERATE, body))
        return bool(seen[-1]["expected_hit_tokens"] > 0)

    await until(found, "a prompt to be found again")
    assert seen[-1]["worker"] in [each["worker"] for each in seen[:-1]]
    assert seen[-1]["routed_by"] == "python: text_input"
    other = await why(INFER, json.dumps(tensors(prompt, 1)).encode())
    assert other["expected_hit_tokens"] == 0, "another model has another cache"
    echo = {"inputs": [{"name": "IN_FP32", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    by_load = await why(f"/v2/models/{ECHO}/infer", json.dumps(echo).encode())
    assert by_load["routed_by"] == "by load alone"


async def test_unary_requests_survive_kill_9(triton: Pool) -> None:
    """No unary request fails when a server is killed: the requests at that server are sent to the
    other one.
    """
    victim, few = triton.servers[0], asyncio.Semaphore(AT_ONCE)
    done = 0

    async def one(serial: int) -> int:
        nonlocal done
        async with few:
            body = json.dumps(tensors(f"{serial}", 1)).encode()
            status, _, _ = await answer_of(triton.router.url, "POST", INFER, body)
            done += 1
            return status

    asking = [asyncio.create_task(one(serial)) for serial in range(REQUESTS)]

    async def half() -> bool:
        return done >= REQUESTS // 4

    await until(half, "some requests to be answered")
    await victim.kill()
    try:
        assert await asyncio.gather(*asking) == [200] * REQUESTS
        await triton.router.until_state(0, "down")
        assert await triton.router.metric("warmroute_inflight_requests") == 0
    finally:
        await victim.start()
        await victim.until_healthy()
    await triton.router.until_state(0, "ready")
