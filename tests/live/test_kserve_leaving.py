"""Tests of KServe clients that disconnect: their server learns of it at once, and the router keeps
charging what may still run there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.live.grpc_stubs import stub_of
from tests.live.grpc_worker import GrpcWorker, infer_request
from tests.live.stack import Stack, running, until
from tests.pauses import running_s
from tests.served_app import served_app

SOON_S = 5.0  # for things that take a few ms
ENGINE, BLS, ENSEMBLE = "tensorrt_llm", "tensorrt_llm_bls", "ensemble"
ALONE = {"backend": "python", "input": [{"name": "text_input", "data_type": "TYPE_STRING"}]}
IDS = [{"name": "input_ids", "data_type": "TYPE_INT32"}]
LENGTH = [{"name": "request_output_len", "data_type": "TYPE_INT32"}]
TEXT = [
    {"name": "text_input", "data_type": "TYPE_STRING"},
    {"name": "max_tokens", "data_type": "TYPE_INT32"},
]
STEP = {
    "model_name": ENGINE,
    "input_map": {"input_ids": "text_input", "request_output_len": "max_tokens"},
    "output_map": {"output_ids": "text_output"},
}
POOL = {
    ENGINE: {"backend": "tensorrtllm", "input": [*IDS, *LENGTH]},
    BLS: {"backend": "python", "input": TEXT},
    ENSEMBLE: {"platform": "ensemble", "input": TEXT, "ensemble_scheduling": {"step": [STEP]}},
}


@dataclass
class Triton(GrpcWorker):
    """A Triton server whose models begin to answer and then wait. Lifetime: test."""

    models: dict[str, Any] = field(default_factory=dict)
    running: int | None = None  # the gauge; None: the server has none
    began: int = 0
    left_s: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Triton]:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._page)
        await self.start_grpc()
        try:
            async with served_app(app, handler_cancellation=True) as self.url:
                yield self
        finally:
            await self.stop_grpc()

    @property
    def spec(self) -> str:
        metrics = "" if self.running is None else f",metrics={self.url}/metrics"
        return f"{self.url},grpc={self.address}{metrics}"

    async def _metrics(self, request: web.Request) -> web.Response:
        name = (
            f'nv_trt_llm_request_metrics{{model="{ENGINE}",version="1",request_type="scheduled"}}'
        )
        return web.Response(text="" if self.running is None else f"{name} {self.running}\n")

    async def _page(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith(("/infer", "/generate", "/generate_stream")):
            return await self._hangs(request)
        parts = request.path.split("/")
        pages: dict[str, Any] = {
            "/v2": {"name": "triton", "extensions": []},
            "/v2/repository/index": [{"name": name, "state": "READY"} for name in self.models],
        }
        if request.path in pages:
            return web.json_response(pages[request.path])
        if request.path == "/v2/health/ready" or parts[-1] == "ready":
            return web.json_response({})
        if parts[-1] == "config" and parts[3] in self.models:
            return web.json_response({"name": parts[3], **self.models[parts[3]]})
        return web.json_response({"error": "Not Found"}, status=404)

    async def _hangs(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await request.read()
        if request.path.endswith("_stream"):
            await reply.prepare(request)
            await reply.write(b'data: {"text_output":"a"}\n\n')
        self.began += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.left_s.append(time.monotonic())
        return reply


@asynccontextmanager
async def routed(tmp_path: Path, **fields: Any) -> AsyncIterator[tuple[Stack, Triton]]:
    flags = ["--grpc-port", "0"]
    async with Triton(**fields).serving() as server, running(tmp_path, 0, flags) as stack:
        await stack.add(server.spec)
        yield stack, server


async def charged(stack: Stack) -> int:
    return int((await stack.row(0))["inflight_requests"])


async def left(stack: Stack, server: Triton, path: str, count: int = 8, **fields: Any) -> float:
    """Let `count` clients send a request and disconnect once all are running; return the longest
    time in seconds until the server learns of it.
    """
    url, before = f"{stack.url}/v2/models/{path}", server.began
    asking = [asyncio.create_task(stack.http.post(url, json=fields)) for _ in range(count)]

    async def at_server() -> bool:
        return server.began == before + count

    async def all_left() -> bool:
        return len(server.left_s) == server.began

    await until(at_server, "the requests")
    assert await charged(stack) >= count
    left_s = time.monotonic()
    for one in asking:
        one.cancel()
        with_reply = await asyncio.gather(one, return_exceptions=True)
        if not isinstance(with_reply[0], BaseException):
            with_reply[0].close()
    assert await running_s(until(all_left, "the server to hear that they left")) < SOON_S
    return max(server.left_s) - left_s


def infer(name: str, tokens: int) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a b c"]},
            {"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [tokens]},
        ]
    }


def body_of(call: str, name: str, tokens: int) -> dict[str, Any]:
    if call == "infer":
        return infer(name, tokens)
    return {"text_input": "a b c", "max_tokens": tokens}


CALLS = ("generate_stream", "generate", "infer")


@pytest.mark.parametrize("call", CALLS)
async def test_a_models_name_alone_does_not_make_it_a_bls_model(tmp_path: Path, call: str) -> None:
    """A model that has a BLS model's name but calls no other model is treated like any other: its
    server ends a request when its client leaves.
    """
    async with routed(tmp_path, models={BLS: ALONE}) as (stack, server):
        took_s = await left(stack, server, f"{BLS}/{call}", **body_of(call, BLS, 100_000))
        print(f"\n{call}: known after {1e3 * took_s:.0f} ms")
        await stack.assert_idle()


FULL = pytest.mark.full  # CI takes each call once, and both models


@pytest.mark.parametrize(
    ("model", "call"),
    [
        (BLS, "generate_stream"),
        (ENSEMBLE, "generate"),
        (BLS, "infer"),
        pytest.param(ENSEMBLE, "generate_stream", marks=FULL),
        pytest.param(BLS, "generate", marks=FULL),
        pytest.param(ENSEMBLE, "infer", marks=FULL),
    ],
)
async def test_requests_that_cannot_be_cancelled_stay_charged_without_a_connection(
    tmp_path: Path, model: str, call: str
) -> None:
    async with routed(tmp_path, models=POOL) as (stack, server):
        body = body_of(call, model, 400)  # 6 s, by the step time that the router believes
        took_s = await left(stack, server, f"{model}/{call}", **body)
        print(f"\n{model}, {call}: known after {1e3 * took_s:.0f} ms")
        assert await charged(stack) == 8
        await stack.assert_idle()
        await left(stack, server, f"{ENGINE}/{call}", 1, **body_of(call, ENGINE, 100_000))
        await stack.assert_idle()  # a request sent to an engine itself can be cancelled


async def test_requests_of_clients_that_left_are_charged_until_gauges_show_their_end(
    tmp_path: Path,
) -> None:
    async with routed(tmp_path, models=POOL, running=8) as (stack, server):
        body = body_of("generate", ENSEMBLE, 100_000)
        await left(stack, server, f"{ENSEMBLE}/generate", **body)
        assert await charged(stack) == 8
        for still in (3, 0):
            server.running = still

            async def is_charged(still: int = still) -> bool:
                return await charged(stack) == still

            await until(is_charged, f"{still} to be charged")
        await stack.assert_idle()


@pytest.mark.parametrize("streamed", [True, False])
async def test_grpc_calls_of_clients_that_left_are_cancelled_or_stay_charged(
    tmp_path: Path, streamed: bool
) -> None:
    async with routed(tmp_path, models=POOL) as (stack, server), stub_of(stack) as stub:
        for model in (ENSEMBLE, BLS, ENGINE):
            request = infer_request(f"hang-{model}", model)

            async def seen(id: str = request.id) -> bool:
                return server.seen[id] == 1

            async def ended(id: str = request.id) -> bool:
                return server.left[id] == 1

            if streamed:
                call = stub.ModelStreamInfer()
                await call.write(request)
            else:
                call = stub.ModelInfer(request)
                waiting = asyncio.ensure_future(call)
            await until(seen, "the request")
            call.cancel()
            if not streamed:
                await asyncio.wait((waiting,))
            hears = until(ended, "the server to hear that its client left")
            assert await running_s(hears) < SOON_S
            if model != ENGINE:
                assert await charged(stack) == 1
            await stack.assert_idle()
