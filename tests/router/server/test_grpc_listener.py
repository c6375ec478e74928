"""Tests that a gRPC server which waits for its calls to end can be told to end them sooner."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from router.server.grpc_listener import GrpcListener
from router.settings.ports import grpc_port_settings
from router.settings.schema import Config, TimeoutSettings

METHOD = "/test/Wait"


async def test_a_stop_cuts_a_long_wait_for_calls_short() -> None:
    begun = asyncio.Event()

    async def wait(message: bytes, context: Any) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        return b""

    handler = grpc.unary_unary_rpc_method_handler(wait)
    config = Config(grpc_port=0, timeouts=TimeoutSettings(handover_s=3_600.0, shutdown_s=0.1))
    listener = GrpcListener(
        lambda method: handler if method == METHOD else None,
        lambda _: True,
        lambda: grpc_port_settings(config),
    )
    await listener.listen()
    at = listener.address
    async with grpc.aio.insecure_channel(at) as channel:
        call = channel.unary_unary(METHOD)(b"")
        asking = asyncio.ensure_future(_code(call))
        await asyncio.wait_for(begun.wait(), 30)
        listener.accept_no_more()
        left = asyncio.ensure_future(listener.left())
        done, _ = await asyncio.wait([left, asking], timeout=0.3)
        assert not done, "it has its hour"
        await asyncio.wait_for(listener.aclose(), 30)
        await asyncio.wait_for(left, 30)
        assert await asking in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


async def _code(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()
