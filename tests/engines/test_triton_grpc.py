"""Tests of Triton's gRPC clients through the router to real Triton servers."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub as Stub

from simulator import CHECKOUT
from tests.engines.pool import SERIALS, Pool, routed
from tests.engines.triton_asked import gauges_of
from tests.engines.triton_grpc_asked import infer_request
from tests.engines.triton_server import KEPT, WHOLE, TritonServer
from tests.engines.vllm_server import MODEL
from tests.live.stack import Stack, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

MANY = 8_000  # tokens, of 5 ms each: for longer than a test waits
TOKENS = 12
REQUESTS = 200  # of one stream
WORDS = ("worker", "pool", "block", "prefix", "router", "cache", "token", "prompt")
FAULTS = 100  # streams, and as many unary calls


def words(prompt: str, count: int) -> list[str]:
    """Return the words of the model's answer, as in `triton_model.py`, which only Triton can
    import.
    """
    return [WORDS[zlib.crc32(f"{prompt} {n}".encode()) % len(WORDS)] for n in range(count)]


def with_end(request: pb.ModelInferRequest) -> pb.ModelInferRequest:
    """Return the request with an option that makes Triton end its answers with an empty
    final one.
    """
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def text_of(answer: pb.ModelInferResponse) -> str:
    """Return the text of an answer."""
    return b"".join(raw[4:] for raw in answer.raw_output_contents).decode()


@asynccontextmanager
async def stub_of(pool: Pool) -> AsyncIterator[Stub]:
    """Yield a gRPC stub of the router."""
    async with grpc.aio.insecure_channel(pool.router.router.facts["grpc"]) as channel:
        yield Stub(channel)


async def idle(pool: Pool) -> None:
    """Wait until the router charges no worker with a request."""

    async def nothing() -> bool:
        rows = await pool.router.rows()
        return not any(row["inflight_requests"] for row in rows)

    await until(nothing, "no request counted at any worker")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def three(triton: Pool) -> AsyncIterator[Pool]:
    """Yield three Triton servers and a router in front of them."""
    folder = triton.servers[0].folder.with_name(f"server-{next(SERIALS)}")
    third = TritonServer(triton.environment, triton.model, folder)
    await third.start()
    try:
        await third.until_healthy()
        servers = (*triton.servers, third)
        async with routed(triton, servers=servers, more=("--grpc-port", "0")) as pool:
            for worker_id in range(len(servers)):
                await pool.router.until_state(worker_id, "ready")

            async def found() -> bool:
                return all(row["grpc"] for row in await pool.router.rows())

            await until(found, "the gRPC of all three is found")
            yield pool
    finally:
        await third.stop()


async def streamed(stub: Stub, requests: Iterable[pb.ModelInferRequest], **more: Any) -> list[Any]:
    """Return all answers of one gRPC stream that sends these requests."""

    async def each() -> AsyncIterator[pb.ModelInferRequest]:
        for request in requests:
            yield request

    return [answer async for answer in stub.ModelStreamInfer(each(), **more)]


async def test_the_documented_command_finds_grpc_beside_http(three: Pool) -> None:
    page = (CHECKOUT / "docs" / "triton.md").read_text()
    (line,) = re.findall(r"^warmroute (serve .*--grpc-port.*)", page, re.MULTILINE)
    for port in ("--port 8000", "--grpc-port 8001"):
        line = line.replace(port, f"{port.split()[0]} 0")
    for n, server in enumerate(three.servers[:2], 1):
        line = line.replace(f"http://gpu{n}:8000", server.url)
    programs = three.router.programs
    program = await programs.start("docs", "router", [*line.split(), "--admin-port", "0"])
    stack = Stack(programs, program, [], three.router.http)
    for worker_id, server in enumerate(three.servers[:2]):
        await stack.until_state(worker_id, "ready")
        assert isinstance(server, TritonServer)
        beside = server.grpc == f"127.0.0.1:{server.port + 1}"  # where that port was free
        assert (await stack.row(worker_id))["grpc"] == (server.grpc if beside else None)
    async with grpc.aio.insecure_channel(program.facts["grpc"]) as channel:
        assert text_of(await Stub(channel).ModelInfer(infer_request(WHOLE, "1", "docs", 3)))
    program.process.terminate()
    await program.process.wait()


async def test_one_stream_of_200_requests_is_spread_over_three_servers(three: Pool) -> None:
    """One stream with 200 requests over three servers, a third of which the client cancels, loses
    none of the others and keeps the order of words in each answer.
    """
    ended = {n for n in range(REQUESTS) if n % 10 in (1, 4, 7)}
    whole: dict[str, list[str]] = {}
    ends: Counter[str] = Counter()
    async with stub_of(three) as stub:
        call = stub.ModelStreamInfer()
        for n in range(REQUESTS):
            tokens = MANY if n in ended else TOKENS
            request = infer_request(MODEL, str(n), f"prompt {n}", tokens, stream=True)
            await call.write(with_end(request))
        while len(ends) < REQUESTS:
            answer = await call.read()
            assert answer is not grpc.aio.EOF
            assert not answer.error_message
            said = answer.infer_response
            if said.parameters["triton_final_response"].bool_param:
                ends[said.id] += 1
                continue
            first = said.id not in whole
            whole.setdefault(said.id, []).append(text_of(said).strip())
            if first and int(said.id) in ended:
                await call.write(infer_request(MODEL, said.id, "", 1, stop=True))
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    assert ends == {str(n): 1 for n in range(REQUESTS)}
    for n in range(REQUESTS):
        expected = words(f"prompt {n}", MANY if n in ended else TOKENS)
        got = whole[str(n)]
        assert got == expected[: len(got)], n
        assert len(got) < MANY if n in ended else len(got) == TOKENS, n
    assert {line["worker"] for line in three.logged()} == {0, 1, 2}
    await idle(three)


async def test_answers_of_a_non_decoupled_model_come_in_order(three: Pool) -> None:
    requests = [
        infer_request(WHOLE, str(n), f"order {n}", 40 if n % 3 == 0 else 1) for n in range(12)
    ]
    requests.insert(5, infer_request("nobody", "wrong", "x", 1))
    async with stub_of(three) as stub:
        answers = await streamed(stub, requests)
    ids = [one.infer_response.id for one in answers]
    assert ids == [request.id for request in requests]
    failed = [one.error_message for one in answers if one.error_message]
    assert failed == ["Request for unknown model: 'nobody' is not found"]


async def test_errors_of_invalid_requests_equal_the_servers(three: Pool) -> None:
    """Errors of invalid requests are the server's own, as a message of the stream, even where a
    model's own errors end the stream.

    Each error has its own stream: two errors at once on one stream sometimes make Triton 2.51 abort
    (it writes both at the same time), and so does a model's own error under `triton_grpc_error`.
    """
    wrong, failing = infer_request(MODEL, "1", "x", 1), infer_request(MODEL, "3", "fail", 1)
    wrong.inputs[0].shape[0] = 7
    found = []
    async with (
        grpc.aio.insecure_channel(three.servers[0].grpc) as channel,
        stub_of(three) as through_the_router,
    ):
        for stub in (Stub(channel), through_the_router):
            told = [await streamed(stub, [one]) for one in (wrong, failing)]
            for one in (wrong, infer_request("nobody", "2", "x", 1)):
                ends = (("triton_grpc_error", "true"),)
                told.append(await streamed(stub, [one], metadata=ends))
            found.append([one for answers in told for one in answers])
    assert found[0] == found[1]
    assert [bool(one.error_message) for one in found[0]] == [True] * 4


async def test_requests_of_a_sequence_reach_one_server_in_order(three: Pool) -> None:
    requests, sums = [], {}
    for step in range(6):
        for sequence in range(1, 9):
            request = pb.ModelInferRequest(model_name=KEPT, id=f"{sequence}.{step}")
            request.parameters["sequence_id"].int64_param = sequence
            request.parameters["sequence_start"].bool_param = step == 0
            request.parameters["sequence_end"].bool_param = step == 5
            request.inputs.add(name="VALUE", datatype="INT32", shape=[1, 1])
            request.raw_input_contents.append((10**step).to_bytes(4, "little"))
            requests.append(request)
    async with stub_of(three) as stub:
        for one in await streamed(stub, requests):
            assert not one.error_message
            answer = one.infer_response
            sums[answer.id] = int.from_bytes(answer.raw_output_contents[0], "little")
    expected = {
        f"{sequence}.{step}": int("1" * (step + 1)) for sequence in range(1, 9) for step in range(6)
    }
    assert sums == expected


@pytest.mark.parametrize("how", ["stream", "unary"])
async def test_a_disconnect_ends_the_request_at_the_server(three: Pool, how: str) -> None:
    async with stub_of(three) as stub:
        if how == "stream":
            call = stub.ModelStreamInfer()
            await call.write(infer_request(MODEL, "1", "left", MANY, stream=True))
            assert not (await call.read()).error_message
        else:
            call = stub.ModelInfer(infer_request(WHOLE, "1", "left", 1))
            await until_counted(three)
        call.cancel()
        await idle(three)
        for server in three.servers:
            assert isinstance(server, TritonServer)

            async def still(server: TritonServer = server) -> bool:
                return await gauges_of(server, "active") == 0

            await until(still, "nothing runs at the server")


async def until_counted(pool: Pool) -> None:
    """Wait until a request is or was charged to a worker."""
    await pool.router.rows()


async def test_kill_9_fails_no_unary_call_and_only_started_streams(three: Pool) -> None:
    """When a server is killed, no unary call fails; of the streams, only those fail whose client
    has received a part of the answer.
    """
    begun: asyncio.Queue[int] = asyncio.Queue()

    async def stream(n: int) -> tuple[str, int]:
        """Run a stream; return (its error, number of answers). Streams with odd numbers answer with
        one piece after a second.
        """
        call, seen, failed, words_come = stub.ModelStreamInfer(), 0, "", n % 2 == 0
        tokens = MANY if words_come else 200
        await call.write(
            with_end(infer_request(MODEL, f"kill-{n}", f"kill {n}", tokens, stream=words_come))
        )
        await call.done_writing()
        while (answer := await call.read()) is not grpc.aio.EOF:
            if words_come and not seen:
                begun.put_nowait(n)
            seen += bool(answer.infer_response.outputs)
            failed = failed or answer.error_message
        return failed, seen

    async def unary(n: int) -> str:
        return text_of(await stub.ModelInfer(infer_request(WHOLE, str(n), f"unary {n}", 8)))

    victim = three.servers[1]
    async with stub_of(three) as stub:
        tasks = [asyncio.create_task(stream(n)) for n in range(FAULTS)]
        calls = [asyncio.create_task(unary(n)) for n in range(FAULTS)]
        for _ in range(FAULTS // 2):
            await begun.get()
        await victim.kill()
        try:
            answers = await asyncio.gather(*calls)
            whole = await asyncio.gather(*tasks[1::2])
            await three.router.until_state(1, "down")
            stops = [
                infer_request(MODEL, f"kill-{n}", "", 1, stop=True) for n in range(0, FAULTS, 2)
            ]
            await streamed(stub, stops)
            word_by_word = await asyncio.gather(*tasks[::2])
        finally:
            await victim.start()
            await victim.until_healthy()
    assert answers == [" ".join(words(f"unary {n}", 8)) for n in range(FAULTS)]
    assert whole == [("", 1)] * (FAULTS // 2)
    broken = [failed for failed, _ in word_by_word if failed]
    assert 0 < len(broken) < FAULTS // 2
    assert set(broken) == {"the worker failed in the middle of its answer"}
    assert all(0 < seen < MANY for _, seen in word_by_word)
    await idle(three)
    await three.router.until_state(1, "ready")


@pytest.mark.full
async def test_kill_9_fails_no_unary_request_over_http(three: Pool) -> None:
    """When a server is killed, no unary request over HTTP fails."""
    url, broken = f"{three.router.url}/v2/models", b"the worker failed in the middle of its answer"
    begun: asyncio.Queue[int] = asyncio.Queue()
    http = three.router.http

    async def stream(n: int) -> bytes:
        """Read a whole stream; those with even numbers come word by word, those with odd numbers in
        one piece after a second.
        """
        by_word = n % 2 == 0
        body = {"text_input": f"kill {n}", "max_tokens": 600 if by_word else 200, "stream": by_word}
        async with http.post(f"{url}/{MODEL}/generate_stream", json=body) as reply:
            assert reply.status == 200, await reply.text()
            first = await reply.content.readline()
            if by_word:
                begun.put_nowait(n)
            return first + await reply.read()

    async def unary(n: int) -> str:
        body = {"text_input": f"unary {n}", "max_tokens": 8}
        async with http.post(f"{url}/{WHOLE}/generate", json=body) as reply:
            assert reply.status == 200, await reply.text()
            return str((await reply.json())["text_output"])

    tasks = [asyncio.create_task(stream(n)) for n in range(FAULTS)]
    calls = [asyncio.create_task(unary(n)) for n in range(FAULTS)]
    for _ in range(FAULTS // 2):
        await begun.get()
    victim = three.servers[1]
    await victim.kill()
    try:
        answers, texts = await asyncio.gather(*calls), await asyncio.gather(*tasks)
    finally:
        await victim.start()
        await victim.until_healthy()
    assert answers == [" ".join(words(f"unary {n}", 8)) for n in range(FAULTS)]
    assert [text.count(b"data: {") for text in texts[1::2]] == [1] * (FAULTS // 2)
    assert not any(broken in text for text in texts[1::2])
    ended = [text for text in texts[::2] if broken in text]
    assert 0 < len(ended) < FAULTS // 2
    assert all(text.endswith(b'data: {"error":"%b"}\n\n' % broken) for text in ended)
    assert all(text.count(b"data: {") == 600 for text in texts[::2] if broken not in text)
    await idle(three)
    await three.router.until_state(1, "ready")
