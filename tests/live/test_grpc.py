"""Tests of KServe's gRPC through the router: faults of workers, faults of clients, and data that is
not gRPC.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub as Stub

from router.body.scan import LONG_BYTES
from tests.certs import Authority
from tests.live.grpc_stubs import stub_of
from tests.live.grpc_worker import (
    FLOOD,
    MODEL,
    GrpcWorker,
    grpc_worker,
    infer_request,
    metrics_page,
)
from tests.live.ports import lasting_port
from tests.live.stack import Stack, running, until
from tests.served_app import served_by

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY_BYTES = 1 << 20
ROUTER = (
    *("--grpc-port", "0", "--limits-body-bytes", str(BODY_BYTES), "--unknown-paths", "refuse"),
    *("--waiting-wait-s", "0"),  # without a worker, requests are refused at once
)
INFER = "/inference.GRPCInferenceService/ModelInfer"
PAST_DEADLINE = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
ERRORS_END = ("triton_grpc_error", "true")
Pair = tuple[Stack, GrpcWorker, GrpcWorker]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running(tmp_path_factory.mktemp("logs"), workers=0, router=ROUTER) as stack:
        yield stack


@asynccontextmanager
async def behind(stack: Stack, *workers: GrpcWorker) -> AsyncIterator[list[int]]:
    """Add the workers to the router; at the end check that none is charged with a request."""
    ids = [await stack.add(f"{one.url},grpc={one.address}") for one in workers]
    try:
        yield ids
        await stack.assert_idle()
    finally:
        for worker_id in ids:
            await stack.remove(worker_id)


async def streamed(stub: Stub, requests: Iterable[Any], **more: Any) -> list[Any]:
    async def each() -> AsyncIterator[Any]:
        for request in requests:
            yield request

    return [answer async for answer in stub.ModelStreamInfer(each(), **more)]


async def failed(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status code and the message of a call, which must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details() or ""


def bytes_field(count: int) -> bytes:
    """Return a raw tensor of `count` bytes, encoded as a field of a gRPC message."""
    field: bytes = pb.ModelInferRequest(raw_input_contents=[bytes(count)]).SerializeToString()
    return field


def spoil(path: str) -> None:
    Path(path).write_text("no certificate")


def bytes_of(path: str) -> bytes:
    return Path(path).read_bytes()


async def test_a_call_is_forwarded_to_a_worker_and_its_answer_to_the_client(stack: Stack) -> None:
    async with grpc_worker() as one, behind(stack, one), stub_of(stack) as stub:
        call = stub.ModelInfer(infer_request("ok"), metadata=(("x-request-id", "7"), ("mine", "a")))
        answer = await call
        assert (answer.id, answer.raw_output_contents) == ("ok", [b"answer"])
        told = dict(await call.trailing_metadata())
        assert told["x-warmroute-worker"].isdigit()
        assert one.metadata[0]["mine"] == "a"
        assert one.metadata[0]["x-request-id"] == "7"


async def test_a_call_moves_from_a_worker_that_is_full_or_fails(stack: Stack) -> None:
    async with grpc_worker(full=True) as full, grpc_worker() as free, stub_of(stack) as stub:
        async with behind(stack, full, free) as ids:
            for n in range(8):
                assert (await stub.ModelInfer(infer_request(f"full-{n}"))).id == f"full-{n}"
                answers = await streamed(stub, [infer_request(f"full-s{n}")])
                assert [one.infer_response.id for one in answers] == [f"full-s{n}"] * 3
            assert sum(full.seen.values()) > 0
            assert (await stack.row(ids[0]))["failures"] == 0
            code = await failed(stub.ModelInfer(infer_request("internal")))
            assert code == (grpc.StatusCode.INTERNAL, "out of memory"), "its own word at last"
            assert full.seen["internal"] + free.seen["internal"] > 1
        async with behind(stack, full):
            code = await failed(stub.ModelInfer(infer_request("full")))
            assert code == (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
            (answer,) = await streamed(stub, [infer_request("full-2")])
            assert answer.error_message == "Exceeds maximum queue size"
            assert answer.infer_response.id == "full-2"


async def test_a_request_that_breaks_off_gets_one_error_and_other_requests_continue(
    stack: Stack,
) -> None:
    async with grpc_worker() as one, behind(stack, one), stub_of(stack) as stub:
        answers = await streamed(
            stub, [infer_request("cut"), infer_request("ok"), infer_request("none")]
        )
        of: dict[str, list[str]] = {"cut": [], "ok": []}
        for answer in answers:
            of[answer.infer_response.id].append(answer.error_message)
        broken = "the worker failed in the middle of its answer"
        assert of == {"cut": ["", broken], "ok": ["", "", ""]}
        ends = (ERRORS_END,)
        code = await failed(streamed(stub, [infer_request("refused")], metadata=ends))
        assert code == (grpc.StatusCode.INVALID_ARGUMENT, "as asked")
        (answer,) = await streamed(stub, [infer_request("refused")])
        assert answer.error_message == "as asked"
        code = await failed(streamed(stub, [infer_request("cut")], metadata=ends))
        assert code == (grpc.StatusCode.UNAVAILABLE, broken)


async def test_disconnects_and_deadlines_end_the_calls_at_the_worker(stack: Stack) -> None:
    async with grpc_worker() as one, behind(stack, one), stub_of(stack) as stub:

        async def gone(id: str) -> None:
            async def left() -> bool:  # a deadline may pass before the request arrives
                return one.left[id] == one.seen[id]

            await until(left, f"{id} to be ended at the worker")
            await stack.assert_idle()

        async def begun(id: str) -> None:
            async def seen() -> bool:
                return one.seen[id] == 1

            await until(seen, f"{id} at the worker")

        call = stub.ModelInfer(infer_request("hang-1"))
        waiting = asyncio.ensure_future(call)
        await begun("hang-1")
        call.cancel()
        await asyncio.wait((waiting,))
        await gone("hang-1")
        assert await failed(stub.ModelInfer(infer_request("hang-2"), timeout=0.3)) == PAST_DEADLINE
        await gone("hang-2")
        told = (("x-request-timeout-ms", "300"),)
        assert (
            await failed(stub.ModelInfer(infer_request("hang-4"), metadata=told)) == PAST_DEADLINE
        )
        await gone("hang-4")
        each = [
            stub.ModelInfer(infer_request(f"hang-5{n}"), timeout=0.2 + n / 7e3) for n in range(32)
        ]
        assert await asyncio.gather(*map(failed, each)) == [PAST_DEADLINE] * 32
        late = [f"hang-late-{n}" for n in range(8)]  # the whole stream ends, not one message
        calls = [
            streamed(stub, [infer_request(id)], timeout=0.3 + n / 1e3) for n, id in enumerate(late)
        ]
        assert await asyncio.gather(*map(failed, calls)) == [PAST_DEADLINE] * 8
        for id in late:
            await gone(id)
        # The deadline of each request, not of the call.
        answer, late = await streamed(stub, [infer_request("stuck-1")], metadata=told)
        assert (answer.infer_response.id, late.infer_response.id) == ("stuck-1", "stuck-1")
        assert late.error_message == "the request's deadline passed in the middle of its answer"
        code = await failed(
            streamed(stub, [infer_request("stuck-2")], metadata=(*told, ERRORS_END))
        )
        assert code == (grpc.StatusCode.DEADLINE_EXCEEDED, late.error_message)
        await gone("stuck-2")
        stream = stub.ModelStreamInfer()
        await stream.write(infer_request("hang-3"))
        await stream.write(infer_request("ok"))
        assert [(await stream.read()).infer_response.id for _ in range(3)] == ["ok"] * 3
        await begun("hang-3")
        stream.cancel()
        await gone("hang-3")


async def test_a_slow_reader_pauses_only_its_own_stream(stack: Stack) -> None:
    async with grpc_worker() as one, behind(stack, one), stub_of(stack) as stub:
        stream = stub.ModelStreamInfer()
        await stream.write(infer_request("flood"))
        await stream.done_writing()
        assert (await stream.read()).infer_response.id == "flood"
        sent = 0
        while one.seen["flooded"] > sent:  # windows and sockets buffer a part of it
            sent = one.seen["flooded"]
            for n in range(5):  # meanwhile; each takes a tenth of a second
                assert (await stub.ModelInfer(infer_request(f"slow-{n}"))).id == f"slow-{n}"
        assert sent < FLOOD, "it waits for its reader"
        for _ in range(sent):  # all of these, and one more
            assert (await stream.read()).infer_response.id == "flood"
        assert one.seen["flooded"] > sent, "it goes on"
        one.enough, count = True, 1 + sent
        while await stream.read() is not grpc.aio.EOF:
            count += 1
        assert count == one.seen["flooded"]


async def test_malformed_messages_and_unknown_methods_get_grpc_errors(stack: Stack) -> None:
    address = stack.router.facts["grpc"]
    async with grpc_worker() as one, behind(stack, one):
        async with grpc.aio.insecure_channel(address) as channel:
            infer = channel.unary_unary(INFER)
            for message in (b"\xff\xff", b"\x0a\x05a", b"\x3a\xff\xff\xff\xff\x0f"):
                code, why = await failed(infer(message))
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert "no ModelInferRequest" in why
            torn = b"\x2a\x03\xff\xff\xff"  # a broken input, after the fields that routing needs
            for more in (b"", bytes_field(LONG_BYTES)):
                code, why = await failed(
                    infer(infer_request("x").SerializeToString() + torn + more)
                )
                assert (code, "no ModelInferRequest" in why) == (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    True,
                )
            code, why = await failed(infer(infer_request("x", model="nobody").SerializeToString()))
            assert (code, why) == (
                grpc.StatusCode.NOT_FOUND,
                "Request for unknown model: 'nobody' is not found",
            )
            for method in ("Nothing", "ModelInferAgain"):
                code, _ = await failed(
                    channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"")
                )
                assert code is grpc.StatusCode.UNIMPLEMENTED
            shared = infer_request("x")
            shared.inputs[0].parameters["shared_memory_region"].string_param = "a"
            code, why = await failed(infer(shared.SerializeToString()))
            assert (code, "shared memory" in why) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            big = infer_request("x", text=bytes(2 * BODY_BYTES)).SerializeToString()
            code, _ = await failed(infer(big))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with stub_of(stack) as stub:
            (answer,) = await streamed(stub, [infer_request("x", model="nobody")])
            assert "unknown model" in answer.error_message
            for call in ("CudaSharedMemoryStatus", "LogSettings", "TraceSetting"):
                request = getattr(pb, f"{call}Request")()
                code, why = await failed(getattr(stub, call)(request))
                assert code is grpc.StatusCode.INVALID_ARGUMENT, why
        assert one.seen == {}


async def test_bytes_that_are_not_grpc_disturb_no_other_client(stack: Stack) -> None:
    draw = random.Random(5)
    host, _, port = stack.router.facts["grpc"].rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

    async def send(data: bytes) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(10):
                while await reader.read(65_536):
                    pass
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with grpc_worker() as one, behind(stack, one), stub_of(stack) as stub:
        rubbish = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00" * 20]
        rubbish += [preface + draw.randbytes(draw.randrange(200)) for _ in range(100)]
        rubbish += [draw.randbytes(500) for _ in range(20)]
        await asyncio.gather(*map(send, rubbish))
        assert (await stub.ModelInfer(infer_request("ok"))).id == "ok"


async def test_a_worker_without_grpc_gets_no_grpc_call(stack: Stack) -> None:
    async with grpc_worker() as one, stub_of(stack) as stub:
        worker_id = await stack.add(f"{one.url},grpc=none")
        row = await stack.row(worker_id)
        assert row["grpc"] is None
        assert INFER in row["lacks"]
        code, why = await failed(stub.ModelInfer(infer_request("ok")))
        assert code is grpc.StatusCode.NOT_FOUND, why
        assert INFER in why
        await stack.remove(worker_id)
        async with behind(stack, one) as ids:
            assert (await stack.row(ids[0]))["grpc"] == one.address


async def test_a_wrong_grpc_address_does_not_affect_http(stack: Stack) -> None:
    async with grpc_worker() as one, grpc_worker() as wrong, stub_of(stack) as stub:
        await wrong.stop_grpc()
        async with behind(stack, wrong) as ids:
            for _ in range(8):
                code, why = await failed(stub.ModelInfer(infer_request("ok")))
                assert code is grpc.StatusCode.UNAVAILABLE, "clients try it again"
                assert "speaks gRPC now" in why
            row = await stack.row(ids[0])
            assert (row["state"], row["failures"]) == ("ready", 0)
            assert f"check grpc={wrong.address}" in row["advice"]
            async with behind(stack, one):
                for _ in range(8):
                    assert (await stub.ModelInfer(infer_request("ok"))).id == "ok"


async def test_grpc_and_metrics_that_start_later_than_http_are_found(stack: Stack) -> None:
    """The router finds gRPC and metrics of a worker that were not ready when it recognized the
    worker: its gRPC port accepted connections without answering.
    """
    ports = [lasting_port() for _ in range(3)]
    while ports[2] != ports[0] + 2:
        ports = [*ports[1:], lasting_port()]
    http_port, beside, metrics_port = ports
    slow = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", beside)
    async with grpc_worker(http_port=http_port) as one, stub_of(stack) as stub:
        worker_id = await stack.add(one.url)
        row = await stack.row(worker_id)
        assert (row["grpc"], row["kv_capacity_tokens"]) == (None, None)
        slow.close()
        await one.stop_grpc()
        one.port = beside
        await one.start_grpc()
        async with served_by(metrics_page, metrics_port):

            async def found() -> bool:
                row = await stack.row(worker_id)
                return (row["grpc"], row["kv_capacity_tokens"]) == (one.address, 64_000)

            await until(found, "its gRPC and its figures are found")
            assert (await stub.ModelInfer(infer_request("ok"))).id == "ok"
            await stack.remove(worker_id)


async def test_grpc_health_reflects_the_pool(stack: Stack) -> None:
    from grpc import aio

    async with aio.insecure_channel(stack.router.facts["grpc"]) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"") == b"\x08\x02"
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watch.read() == b"\x08\x02"
        async with grpc_worker() as one, behind(stack, one):
            assert await check(b"") == b"\x08\x01"
            assert await check(b"\x0a\x1einference.GRPCInferenceService") == b"\x08\x01"
            assert await watch.read() == b"\x08\x01"
            code, _ = await failed(check(b"\x0a\x03abc"))
            assert code is grpc.StatusCode.NOT_FOUND
            code, _ = await failed(check(b"\xff"))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert await watch.read() == b"\x08\x02"
        watch.cancel()


async def test_grpc_requires_api_keys_and_supports_tls(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("secure")
    authority, keys = Authority(folder), folder / "keys"
    pair = authority.signed("router")
    keys.write_text("secret tenant\n")
    keys.chmod(0o600)
    files = ("--tls-cert", pair.cert, "--tls-key", pair.key, "--api-keys-file", str(keys))
    trusted = grpc.ssl_channel_credentials(bytes_of(authority.pair.cert))
    async with running(folder, workers=0, router=(*ROUTER, *files)) as stack:
        address = stack.router.facts["grpc"]
        async with grpc_worker() as one, grpc.aio.secure_channel(address, trusted) as channel:
            await stack.add(f"{one.url},grpc={one.address}")
            stub = Stub(channel)
            for wrong in ((), (("authorization", "Bearer guess"),)):
                code, why = await failed(stub.ModelInfer(infer_request("ok"), metadata=wrong))
                assert (code, why) == (
                    grpc.StatusCode.UNAUTHENTICATED,
                    "the API key is missing or wrong",
                )
                code, _ = await failed(stub.ModelConfig(pb.ModelConfigRequest(name=MODEL)))
                assert code is grpc.StatusCode.UNAUTHENTICATED
            right = (("authorization", "Bearer secret"),)
            assert (await stub.ModelInfer(infer_request("ok"), metadata=right)).id == "ok"
            assert "authorization" not in one.metadata[0]
            assert (await stub.ServerLive(pb.ServerLiveRequest())).live
            spoil(pair.cert)
            stack.router.process.send_signal(signal.SIGHUP)

            async def logged() -> bool:
                return "not read anew for gRPC" in stack.router.log.read_text()

            await until(logged, "the router to say that it cannot read the file")
        async with grpc.aio.secure_channel(address, trusted) as anew:
            assert (await Stub(anew).ServerLive(pb.ServerLiveRequest())).live
        async with grpc.aio.insecure_channel(address) as plain:
            code, _ = await failed(Stub(plain).ServerLive(pb.ServerLiveRequest(), timeout=10))
            assert code is grpc.StatusCode.UNAVAILABLE


async def test_idle_streams_and_watches_do_not_delay_the_shutdown(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("listened")
    lasting = (*ROUTER, "--timeouts-shutdown-s", "300")
    async with running(folder, workers=0, router=lasting) as stack, grpc_worker() as one:
        await stack.add(f"{one.url},grpc={one.address}")
        async with grpc.aio.insecure_channel(stack.router.facts["grpc"]) as channel:
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            assert await watch.read() == b"\x08\x01"
            idle, busy = Stub(channel).ModelStreamInfer(), Stub(channel).ModelStreamInfer()
            await idle.write(infer_request("ok-1"))
            assert [(await idle.read()).infer_response.id for _ in range(3)] == ["ok-1"] * 3
            await busy.write(infer_request("slow-1"))
            await busy.done_writing()

            async def under_way() -> bool:  # a stop ends a stream of which nothing was read
                return one.seen["slow-1"] == 1

            await until(under_way, "the request to be at the worker")
            stack.router.process.terminate()
            assert await watch.read() == b"\x08\x02"
            assert await watch.read() is grpc.aio.EOF
            assert await failed(idle.read()) == (
                grpc.StatusCode.UNAVAILABLE,
                "the router is stopping",
            )
            while await busy.read() is not grpc.aio.EOF:
                pass
            assert await busy.code() is grpc.StatusCode.OK
            assert await asyncio.wait_for(stack.router.process.wait(), 60) == 0


async def test_a_restarted_worker_gets_grpc_calls_again(stack: Stack) -> None:
    port = lasting_port()
    async with grpc_worker(port=port) as one, stub_of(stack) as stub:
        worker_id = await stack.add(f"{one.url},grpc={one.address}")
        assert (await stub.ModelInfer(infer_request("ok"))).id == "ok"
        await one.stop_grpc()
        one.well = False
        await stack.until_state(worker_id, "down")
        for _ in range(3):
            code, _ = await failed(stub.ModelInfer(infer_request("ok")))
            assert code is grpc.StatusCode.UNAVAILABLE
        await one.start_grpc()
        one.well = True
        await stack.until_state(worker_id, "ready")
        assert (await stub.ModelInfer(infer_request("ok"))).id == "ok"
        await stack.remove(worker_id)


async def test_running_calls_end_before_the_router_stops(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("stopped")
    async with running(folder, workers=0, router=ROUTER) as stack, grpc_worker() as one:
        await stack.add(f"{one.url},grpc={one.address}")
        async with stub_of(stack) as stub:
            calls = [
                asyncio.ensure_future(stub.ModelInfer(infer_request(f"slow-{n}"))) for n in range(5)
            ]

            async def begun() -> bool:
                return sum(one.seen.values()) == 5

            await until(begun, "all of them at the worker")
            stack.router.process.terminate()
            assert [answer.id for answer in await asyncio.gather(*calls)] == [
                f"slow-{n}" for n in range(5)
            ]
            assert await stack.router.process.wait() == 0
        assert "leaked" not in stack.router.log.read_text(), "by the native objects' own account"


async def test_requests_over_a_models_limit_wait_and_are_refused_like_by_triton(
    tmp_path: Path,
) -> None:
    """Requests that wait for a model's limit are served in the order of Triton's priorities, and
    refused as by a full Triton after their own timeout.
    """
    limits = ("--model-limits", f"{MODEL}:max_requests=1", "--limits-hold-requests", "2")
    async with (
        running(tmp_path, workers=0, router=(*ROUTER, *limits)) as stack,
        grpc_worker() as one,
        behind(stack, one),
        stub_of(stack) as stub,
    ):

        async def held(count: int) -> None:
            async def reached() -> bool:
                return await stack.metric("warmroute_held_requests") == count

            await until(reached, f"{count} requests to be held")

        async def sent() -> bool:
            return one.seen["hang-9"] == 1

        hanging = stub.ModelInfer(infer_request("hang-9"))
        await until(sent, "the first one to be there")
        brief = infer_request("brief")
        brief.parameters["timeout"].int64_param = 200_000
        code, why = await failed(stub.ModelInfer(brief))
        assert code == grpc.StatusCode.UNAVAILABLE
        assert why.startswith("Request timeout expired: ")
        assert why.endswith("the model's limit of 1 requests is reached")
        late = asyncio.ensure_future(stub.ModelInfer(infer_request("late")))
        await held(1)
        first = infer_request("first")
        first.parameters["priority"].uint64_param = 1
        soon = asyncio.ensure_future(stub.ModelInfer(first))
        await held(2)
        call = stub.ModelInfer(infer_request("beyond"))
        code, why = await failed(call)
        assert (code, why[:28]) == (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size: ")
        assert int(dict(await call.trailing_metadata())["retry-after"]) >= 1
        hanging.cancel()
        await asyncio.gather(soon, late)
        assert list(one.seen) == ["hang-9", "first", "late"]
