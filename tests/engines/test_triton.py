"""Tests of the router with real Triton servers through Triton's own HTTP API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.engines.pool import Pool
from tests.engines.triton_asked import (
    GENERATE,
    INFER,
    STREAM,
    Answer,
    answer_of,
    gauges_of,
    tensors,
    text_request,
)
from tests.engines.triton_server import ECHO, KEPT, WHOLE, TritonServer
from tests.engines.vllm_server import BLOCK_SIZE, BLOCKS, MODEL
from tests.live.stack import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

TIMES = 6  # more failures in a row than a worker is allowed
STREAMS = 6
TOKENS = 300  # of a stream, which takes 5 ms for each
MANY = 8000  # tokens: less than its cache holds, and for longer than a test waits


async def equal_answers(
    pool: Pool, method: str, path: str, body: bytes | None, model: str = MODEL, **headers: str
) -> Answer:
    """Return the router's answer, after checking that it equals a server's own."""
    url = pool.router.url
    routed = await answer_of(url, method, f"{path}?model={model}", body, **headers)
    direct = await answer_of(pool.servers[0].url, method, path, body, **headers)
    assert routed == direct
    return routed


def binary_tensors(prompt: str) -> tuple[bytes, dict[str, str]]:
    """Return a request whose binary tensors follow its JSON, and the header with the length of the
    JSON.
    """
    data = len(prompt).to_bytes(4, "little") + prompt.encode()
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    text |= {"parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [text], "parameters": {"binary_data_output": True}}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


class Streaming:
    """A streamed answer through the router, in progress. Lifetime: test."""

    def __init__(self, reply: aiohttp.ClientResponse, first: bytes) -> None:
        self._reply, self._first = reply, first
        self.worker = int(reply.headers["x-warmroute-worker"])

    @classmethod
    async def begin(cls, pool: Pool, prompt: str, max_tokens: int = TOKENS) -> Streaming:
        """Send a request and return the stream once its first word has come."""
        body = {"model": MODEL, "text_input": prompt, "max_tokens": max_tokens, "stream": True}
        reply = await pool.router.http.post(f"{pool.router.url}{STREAM}", json=body)
        assert reply.status == 200, await reply.text()
        return cls(reply, await reply.content.readline())

    async def words(self) -> int:
        """Read the stream to its end; return the number of words, negative if the stream
        broke off.
        """
        events = (self._first + await self._reply.read()).split(b"\n\n")[:-1]
        broken = events[-1] == b'data: {"error":"the worker failed in the middle of its answer"}'
        return 1 - len(events) if broken else len(events)

    def leave(self) -> None:
        """Close the connection before the answer has ended."""
        self._reply.close()


def triton_servers(pool: Pool) -> Iterator[TritonServer]:
    """Yield the pool's servers, typed as TritonServer."""
    for server in pool.servers:
        assert isinstance(server, TritonServer)
        yield server


async def test_a_server_is_recognized_by_its_metrics(triton: Pool) -> None:
    for row in await triton.router.rows():
        assert (row["kind"], row["state"]) == ("triton", "ready")
        assert sorted(row["models"]) == sorted([MODEL, WHOLE, ECHO, KEPT])
        assert (row["events"], row["events_from"], row["advice"]) == (None, None, None)


async def test_cache_sizes_are_known_after_the_first_request(triton: Pool) -> None:
    for worker, server in enumerate(triton_servers(triton)):
        assert (await answer_of(server.url, "POST", GENERATE, text_request("x", 1)))[0] == 200

        async def known(worker: int = worker) -> bool:
            row = await triton.router.row(worker)
            return bool(row["kv_capacity_tokens"] == BLOCKS * BLOCK_SIZE)

        await until(known, "the router to read how large the cache is")
        await triton.router.until_state(worker, "ready")
        row = await triton.router.row(worker)
        assert row["block_size"] % BLOCK_SIZE == 0  # a multiple, because no events report blocks


@pytest.mark.parametrize("coding", ["identity", "gzip"])
async def test_routed_answers_equal_the_servers(triton: Pool, coding: str) -> None:
    accept = {"Accept-Encoding": coding}
    for serial in range(6):
        prompt = f"What is {serial}? " * (serial + 1)
        status, _, said = await equal_answers(
            triton, "POST", GENERATE, text_request(prompt, serial + 1), **accept
        )
        assert status == 200
        assert len(json.loads(said)["text_output"].split()) == serial + 1
        body = text_request(prompt, serial + 1, stream=True, id=str(serial))
        status, kind, said = await equal_answers(triton, "POST", STREAM, body, **accept)
        assert (status, kind) == (200, "text/event-stream; charset=utf-8")
        assert said.count(b"data: {") == serial + 1
        body = json.dumps(tensors(prompt, serial + 1)).encode()
        assert (await equal_answers(triton, "POST", INFER, body, WHOLE, **accept))[0] == 200
        body, head = binary_tensors(prompt)
        assert (await equal_answers(triton, "POST", INFER, body, WHOLE, **head, **accept))[0] == 200
    for path in (f"/v2/models/{MODEL}", f"/v2/models/{WHOLE}/config", "/v2/health/ready"):
        assert (await equal_answers(triton, "GET", path, None, **accept))[0] == 200


async def test_tritons_client_gets_the_servers_answers(triton: Pool) -> None:
    module = pytest.importorskip("tritonclient.http")
    client_of, tensor_of = module.InferenceServerClient, module.InferInput

    def infer(url: str) -> tuple[Any, ...]:
        client, query = client_of(url.removeprefix("http://")), {"model": WHOLE}
        text, count = tensor_of("text_input", [1], "BYTES"), tensor_of("max_tokens", [1], "INT32")
        text.set_data_from_numpy(np.array([b"What is it?"], dtype=np.object_))
        count.set_data_from_numpy(np.array([9], dtype=np.int32))
        try:
            answer = client.infer(WHOLE, [text, count], request_id="7", query_params=query)
            about = client.get_model_metadata(WHOLE, query_params=query)
            live = client.is_server_live(query_params=query)
            return answer.get_response(), answer.as_numpy("text_output").tolist(), about, live
        finally:
            client.close()

    routed = await asyncio.to_thread(infer, triton.router.url)
    assert routed == await asyncio.to_thread(infer, triton.servers[0].url)


async def test_errors_equal_the_servers_and_count_against_no_worker(
    triton: Pool,
) -> None:
    """A body that Triton cannot read gets Triton's own 500, and the router blames no worker, since
    every server would refuse it.
    """
    absent = "/v2/models/absent/generate"
    of_infer = f"/v2/models/{MODEL}/infer"
    not_text = json.dumps({"text_input": 5}).encode()
    wrong = [
        (404, absent, text_request("x", 1)),
        (501, of_infer, json.dumps(tensors("x", 1)).encode()),
        (400, GENERATE, b"{}"),
        (500, GENERATE, b"{nonsense"),
        (500, STREAM, not_text),
        (500, INFER, b"{nonsense"),
        (500, INFER, b'{"inputs":5}'),
        (500, INFER, b'{"inputs":[],"parameters":5}'),
    ]
    retried = await triton.router.metric("warmroute_retries_total")
    for status, path, body in wrong:
        for _ in range(TIMES):
            assert (await equal_answers(triton, "POST", path, body))[0] == status
    assert await triton.router.metric("warmroute_retries_total") == retried
    for row in await triton.router.rows():
        assert (row["state"], row["failures"]) == ("ready", 0)


async def test_the_load_equals_the_servers_metrics(triton: Pool) -> None:
    stream = await Streaming.begin(triton, "x", MANY)
    used = -(-(1 + MANY) // BLOCK_SIZE) * BLOCK_SIZE

    async def kv_used(wanted: float) -> None:
        async def shown() -> bool:
            return bool((await triton.router.row(stream.worker))["kv_used_tokens"] == wanted)

        await until(shown, f"{wanted} tokens of KV in use")

    await kv_used(used)
    stream.leave()
    await kv_used(0)


async def test_a_disconnect_ends_the_request_at_the_server(triton: Pool) -> None:
    stream = await Streaming.begin(triton, "x", MANY)
    server = list(triton_servers(triton))[stream.worker]

    async def running(wanted: int) -> None:
        async def shown() -> bool:
            return await gauges_of(server, "active") == wanted

        await until(shown, f"{wanted} requests at the server")

    await running(1)
    stream.leave()
    await running(0)


async def answered_by(pool: Pool, count: int) -> set[int]:
    """Send `count` requests, check that each gets 200, and return the workers that answered."""
    workers = set()
    for serial in range(count):
        body = {"model": MODEL, "text_input": f"{serial}", "max_tokens": 2}
        async with pool.router.http.post(f"{pool.router.url}{GENERATE}", json=body) as reply:
            assert reply.status == 200, await reply.text()
            workers.add(int(reply.headers["x-warmroute-worker"]))
    return workers


async def test_a_drained_server_finishes_its_stream_and_gets_no_new_request(triton: Pool) -> None:
    router, stream = triton.router, await Streaming.begin(triton, "x")
    async with router.http.post(f"{router.admin}/workers/{stream.worker}/drain") as reply:
        assert reply.status == 200, await reply.text()
    try:
        assert (await router.row(stream.worker))["state"] == "draining"
        assert await answered_by(triton, 10) == {1 - stream.worker}
        assert await stream.words() == TOKENS
    finally:
        async with router.http.post(f"{router.admin}/workers/{stream.worker}/undrain") as reply:
            assert reply.status == 200, await reply.text()
    await router.until_state(stream.worker, "ready")


async def streams_at_both(pool: Pool) -> list[Streaming]:
    """Begin `STREAMS` streams and check that both servers have some of them."""
    begun = (Streaming.begin(pool, f"{serial}") for serial in range(STREAMS))
    streams = await asyncio.gather(*begun)
    assert {stream.worker for stream in streams} == {0, 1}
    return streams


async def test_requests_survive_kill_9_and_the_server_comes_back(triton: Pool) -> None:
    streams = await streams_at_both(triton)
    victim = triton.servers[0]
    lost = sum(stream.worker == 0 for stream in streams)
    await victim.kill()
    try:
        assert await answered_by(triton, 20) == {1}
        # Its answers have no token ids, so a stream cannot continue elsewhere: it breaks off.
        ended = await asyncio.gather(*(s.words() for s in streams))
        broken = [one for one in ended if one < 0]
        whole = [one for one in ended if one > 0]
        assert (len(broken), whole) == (lost, [TOKENS] * (STREAMS - lost))
        await triton.router.until_state(0, "down")
    finally:
        await victim.start()
        await victim.until_healthy()
    await triton.router.until_state(0, "ready")
    row = await triton.router.row(0)
    assert (row["kv_capacity_tokens"], row["resident_blocks"]) == (None, 0)
    # It tells its sizes with the first of these, and is recognized anew while they run.
    streams = await streams_at_both(triton)
    assert await asyncio.gather(*(s.words() for s in streams)) == [TOKENS] * STREAMS
    assert (await triton.router.row(0))["kv_capacity_tokens"] == BLOCKS * BLOCK_SIZE
