"""A server that looks like Triton with one model; a request's id says how its gRPC answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from tests.served_app import served_by

MODEL = "small"
BIG_BYTES = 1 << 20
FLOOD = 512  # messages of that size: more than all buffers on their way hold


def infer_request(id: str, model: str = MODEL, text: bytes = b"hello") -> pb.ModelInferRequest:
    """Return an inference request; its id says how the worker answers."""
    request = pb.ModelInferRequest(model_name=model, id=id)
    request.inputs.add(name="T", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    return request


def answer_to(request: pb.ModelInferRequest, data: bytes = b"answer") -> pb.ModelInferResponse:
    """Return one answer to the request."""
    answer = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
    answer.outputs.add(name="O", datatype="UINT8", shape=[len(data)])
    answer.raw_output_contents.append(data)
    return answer


@dataclass
class GrpcWorker(GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A gRPC worker whose answer depends on the part of a request's id before a dash.

    Unary calls: ok, slow (a tenth of a second), full, internal, hang. Streams: ok (three answers),
    none (no answer), full, refused (by the stream's status), cut (one answer, then the stream
    breaks), hang, stuck (one answer, then it hangs), slow, flood (big answers, until `enough`).
    Lifetime: test.
    """

    url: str = ""
    address: str = ""
    seen: Counter[str] = field(default_factory=Counter)  # by id
    left: Counter[str] = field(default_factory=Counter)  # those cancelled
    metadata: list[dict[str, str]] = field(default_factory=list)
    full: bool = False  # the worker answers `full`
    well: bool = True  # its health by HTTP
    enough: bool = False  # a flood ends with the next answer
    port: int = 0
    server: Any = None

    async def start_grpc(self) -> None:
        """Start listening for gRPC calls."""
        options = (("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0))
        self.server = grpc.aio.server(options=options)
        add_GRPCInferenceServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.address = f"127.0.0.1:{self.port}"
        await self.server.start()

    async def stop_grpc(self) -> None:
        """End all calls and stop listening."""
        await self.server.stop(0)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """Answer a unary call."""
        self.seen[request.id] += 1
        self.metadata.append(dict(context.invocation_metadata()))
        match request.id.partition("-")[0]:
            case "full" if self.full:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
            case "internal":
                await context.abort(grpc.StatusCode.INTERNAL, "out of memory")
            case "slow":
                await asyncio.sleep(0.1)
            case "hang":
                await self._hang(request.id)
        return answer_to(request)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        """Answer a streaming call; the request's id decides how many answers it gets."""
        async for request in requests:
            self.seen[request.id] += 1
            match request.id.partition("-")[0]:
                case "full" if self.full:
                    yield pb.ModelStreamInferResponse(error_message="Exceeds maximum queue size")
                case "none":
                    pass
                case "refused":
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "as asked")
                case "cut":
                    yield pb.ModelStreamInferResponse(infer_response=answer_to(request))
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                case "hang":
                    await self._hang(request.id)
                case "stuck":
                    yield pb.ModelStreamInferResponse(infer_response=answer_to(request))
                    await self._hang(request.id)
                case "slow":
                    await asyncio.sleep(0.1)
                    yield pb.ModelStreamInferResponse(infer_response=answer_to(request))
                case "flood":
                    big = answer_to(request, bytes(BIG_BYTES))
                    while self.seen["flooded"] < FLOOD and not self.enough:
                        self.seen["flooded"] += 1
                        yield pb.ModelStreamInferResponse(infer_response=big)
                case _:
                    for _ in range(3):
                        yield pb.ModelStreamInferResponse(infer_response=answer_to(request))

    async def _hang(self, id: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.left[id] += 1


def _pages(decoupled: bool) -> dict[str, Any]:
    config = {
        "name": MODEL,
        "backend": "python",
        "input": [{"name": "T", "data_type": "TYPE_STRING"}],
        "model_transaction_policy": {"decoupled": decoupled},
    }
    return {
        "/v2": {"name": "triton", "extensions": []},
        "/v2/repository/index": [{"name": MODEL, "version": "1", "state": "READY"}],
        f"/v2/models/{MODEL}/config": config,
        f"/v2/models/{MODEL}/ready": {},
    }


async def metrics_page(request: web.Request) -> web.Response:
    """Return Triton's metrics after a batch with one request."""
    of = f'model="{MODEL}",version="1"'
    requests, blocks = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
    figures = [f'{requests}{{{of},request_type="scheduled"}} 0']
    for kind, value in {"max": 1000, "used": 0, "tokens_per": 64}.items():
        figures.append(f'{blocks}{{{of},kv_cache_block_type="{kind}"}} {value}')
    return web.Response(text="\n".join((*figures, "")))


@asynccontextmanager
async def grpc_worker(
    decoupled: bool = True, port: int = 0, http_port: int = 0, **flags: bool
) -> AsyncIterator[Any]:
    """Yield a running worker. Its gRPC listens at `port`; with 0 the system chooses the port."""
    worker, pages = GrpcWorker(port=port, **flags), _pages(decoupled)

    async def page(request: web.Request) -> web.Response:
        status = (200 if request.path in pages else 404) if worker.well else 400
        return web.json_response(pages.get(request.path, {"error": "Not Found"}), status=status)

    await worker.start_grpc()
    try:
        async with served_by(page, http_port) as worker.url:
            yield worker
    finally:
        await worker.stop_grpc()
