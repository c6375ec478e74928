"""Opens gRPC stubs of Triton's inference service that call a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub as Stub

from tests.live.stack import Stack


@asynccontextmanager
async def stub_of(stack: Stack) -> AsyncIterator[Stub]:
    options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
    async with grpc.aio.insecure_channel(stack.router.facts["grpc"], options) as channel:
        yield Stub(channel)
