"""Tests of a prefill worker and a decode worker: what each receives, and which one is blamed for a
fault.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.live.stack import MODEL, Stack, misbehaving, running, until
from tests.told_decision import decision_in

PARAMS = (
    b'{"remote_engine_id":"e", "remote_request_id":"r-1","remote_port": 5600,'
    b'"remote_block_ids": [[3,1,2]],"remote_host":"10.0.0.7", "tp_size":1, "new":{"a":[]}}'
)
CACHED = b'"prompt_tokens_details":{"cached_tokens":4}'
USAGE = b'"usage":{"prompt_tokens":9,"completion_tokens":%d,' + CACHED + b"}"


def answer(payload: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, kind, len(payload)) + payload


FIRST = answer(
    b'{"choices":[{"text":" x","finish_reason":"length"}],"kv_transfer_params":%b,%b}'
    % (PARAMS, USAGE % 1)
)
SECOND = answer(b'{"choices":[{"text":" a b","finish_reason":"stop"}],%b}' % (USAGE % 2))
EVENTS = (
    b'data: {"choices":[{"text":" a"}]}\n\ndata: {"choices":[{"text":" b"}]}\n\ndata: [DONE]\n\n'
)
STREAM = answer(EVENTS, kind=b"text/event-stream")
BROKEN = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"
ERROR = answer(b'{"error":{"message":"no"}}', b"500 Internal Server Error")
REFUSAL = answer(b'{"error":{"message":"bad tool","code":"bad_tool"}}', b"400 Bad Request")


@dataclass(frozen=True, slots=True)
class Pair:
    stack: Stack
    prefilled: list[bytes]  # bodies sent to the prefill worker
    decoded: list[bytes]  # bodies sent to the decode worker
    heads: tuple[list[bytes], list[bytes]]
    log: Path

    async def ask(self, **fields: Any) -> tuple[int, bytes]:
        body = {"model": MODEL, "prompt": "a b c", "max_tokens": 16} | fields
        url = f"{self.stack.url}/v1/completions"
        async with self.stack.http.post(url, data=json.dumps(body)) as reply:
            return reply.status, await reply.read()

    async def explained(self, asked: str, status: int = 200, **fields: Any) -> dict[str, Any]:
        """Send a completion and return the decision in its explain header."""
        body = {"model": MODEL, "prompt": "a b c", "max_tokens": 16} | fields
        url, headers = f"{self.stack.url}/v1/completions", {"x-warmroute-explain": asked}
        async with self.stack.http.post(url, json=body, headers=headers) as reply:
            assert reply.status == status, await reply.text()
            why: dict[str, Any] = decision_in(reply.headers["x-warmroute-explain"])
            assert reply.headers["x-warmroute-worker"] == str(why["worker"])
            return why

    async def failures(self) -> list[int]:
        return [row["failures"] for row in await self.stack.rows()]


@asynccontextmanager
async def pair(
    tmp_path: Path,
    first: bytes = FIRST,
    second: bytes = SECOND,
    group: str = "g",
    metrics: bytes = b"",
) -> AsyncIterator[Pair]:
    heads: tuple[list[bytes], list[bytes]] = [], []
    log = tmp_path / "access.jsonl"
    flags = ["--disaggregation", "always", "--access-log", str(log), "--retries-backoff-s", "0"]
    async with (
        misbehaving(first, heads=heads[0], metrics=metrics) as (one, prefilled),
        misbehaving(second, heads=heads[1]) as (other, decoded),
        running(tmp_path / "logs", 0, flags) as stack,
    ):
        for url, role, name in ((one, "prefill", "g"), (other, "decode", group)):
            await stack.add(f"{url},kind=vllm,events=none,role={role},group={name}")
        yield Pair(stack, prefilled, decoded, heads, log)


async def test_the_decode_leg_has_the_kv_parameters_of_the_prefill_answer(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        status, body = await both.ask(temperature=0, stop=["x"])
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, " a b")
        ((sent,), (told,)) = both.prefilled, both.decoded
        assert json.loads(sent) | {"max_tokens": 16} == {
            "model": MODEL,
            "prompt": "a b c",
            "max_tokens": 16,
            "temperature": 0,
            "stop": ["x"],
            "kv_transfer_params": json.loads(sent)["kv_transfer_params"],
        }
        assert json.loads(sent)["max_tokens"] == 1
        assert json.loads(sent)["kv_transfer_params"]["do_remote_decode"] is True
        assert b'"kv_transfer_params":%b' % PARAMS in told, "byte for byte"
        assert json.loads(told)["max_tokens"] == 16
        ids = [
            [h for h in head.split(b"\r\n") if h.lower().startswith(b"x-request-id")]
            for (head,) in both.heads
        ]
        assert ids[0] == ids[1] != []
        await both.stack.assert_idle()
        assert await both.stack.metric("warmroute_reported_hit_tokens_total") == 4, "once"
    (line,) = map(json.loads, both.log.read_text().splitlines())
    assert (line["attempts"], line["status"]) == (2, 200)
    assert (line["prefill_worker"], line["worker"], line["cached_tokens"]) == (0, 1, 4)
    assert line["output_tokens"] == 2, "of the client's answer"
    assert line["bytes_out"] == len(body)
    assert 0 < line["prefill_ms"] < line["total_ms"]
    assert "10.0.0.7" not in both.log.read_text() + (tmp_path / "logs" / "router.log").read_text()


async def test_a_stream_comes_from_the_decode_worker(tmp_path: Path) -> None:
    async with pair(tmp_path, second=STREAM) as both:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        assert await both.ask(**options) == (200, EVENTS)
        ((sent,), (told,)) = both.prefilled, both.decoded
        assert (json.loads(sent)["stream"], json.loads(sent)["stream_options"]) == (False, None)
        assert json.loads(told)["stream"] is True
        await both.stack.assert_idle()
        assert await both.stack.metric("warmroute_prefill_leg_seconds_count") == 1
    (line,) = map(json.loads, both.log.read_text().splitlines())
    assert line["output_tokens"] == 3, "events of the second leg: the first one had no usage here"
    assert line["ttft_ms"] >= line["prefill_ms"], "its client saw nothing of the first leg"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_explain_header_names_the_worker_that_prefilled(
    tmp_path: Path, stream: bool
) -> None:
    async with pair(tmp_path, second=STREAM if stream else SECOND) as both:
        for asked, columns in (("1", False), ("full", True)):
            why = await both.explained(asked, stream=stream)
            assert (why["worker"], why["prefill_worker"]) == (1, 0)
            first = why["prefill"]
            assert [one["worker"] for one in first["best"]] == [0]
            assert first["reason"] == "only_worker"
            assert first["expected_hit_tokens"] == 0
            assert (list(why.get("columns", ())), list(first.get("columns", ()))) == (
                (["1"], ["0"]) if columns else ([], [])
            )
        why = await both.explained("full", max_tokens=1)
        assert "prefill_worker" not in why, "one worker does all of it"
        assert "prefill" not in why


async def test_the_explain_header_of_a_prefill_refusal_describes_the_prefill_leg(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, first=REFUSAL) as both:
        why = await both.explained("1", status=400)
        assert (why["worker"], why.get("prefill_worker")) == (0, None)


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"echo": True}, {"max_tokens": 1}, {"prompt_logprobs": 1}], ids=str
)
async def test_requests_that_cannot_be_split_go_to_one_worker(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with pair(tmp_path) as both:
        assert (await both.ask(**fields))[0] == 200
        assert (len(both.prefilled), len(both.decoded)) == (0, 1)
        assert b"kv_transfer_params" not in both.decoded[0]


async def test_kv_that_was_fetched_too_late_is_counted_and_logged(tmp_path: Path) -> None:
    gauges = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    late = b"vllm:nixl_num_notifications_after_expiry_total 3\n"
    async with pair(tmp_path, metrics=gauges + late) as both:
        counted = 'warmroute_worker_kv_transfer_faults_total{fault="late",worker="0"}'

        async def is_counted() -> bool:
            return await both.stack.metric(counted) == 3

        await until(is_counted, "the worker's own count")
    log = (tmp_path / "logs" / "router.log").read_text()
    assert "KV was fetched 3 times after it had been freed" in log


LACKING = PARAMS.replace(b'"remote_request_id":"r-1",', b"")
NULL = PARAMS.replace(b"5600", b"null")


@pytest.mark.parametrize("params", [b"null", b"[1]", b"{}", LACKING, NULL], ids=bytes.decode)
async def test_without_kv_parameters_the_decode_worker_computes_the_prompt(
    tmp_path: Path, params: bytes
) -> None:
    """If the prefill answer lacks KV parameters, the decode worker computes the prompt itself,
    because a vLLM that has to fetch KV without a name would end with all its requests.
    """
    async with pair(tmp_path, answer(b'{"choices":[],"kv_transfer_params":%b}' % params)) as both:
        assert (await both.ask())[0] == 200
        assert b"kv_transfer_params" not in both.decoded[0]


async def test_the_client_gets_the_refusal_of_the_prefill_leg(tmp_path: Path) -> None:
    async with pair(tmp_path, first=REFUSAL) as both:
        status, body = await both.ask()
        assert (status, json.loads(body)["error"]["code"]) == (400, "bad_tool")
        assert both.decoded == []
        assert await both.failures() == [0, 0]
        await both.stack.assert_idle()


@pytest.mark.parametrize("first", [BROKEN, ERROR, b""], ids=["broken", "500", "closed"])
async def test_a_failed_prefill_counts_against_the_prefill_worker(
    tmp_path: Path, first: bytes
) -> None:
    """A failed prefill is counted against the prefill worker, and the decode worker does the whole
    request.
    """
    async with pair(tmp_path, first=first) as both:
        assert (await both.ask())[0] == 200
        assert (len(both.prefilled), len(both.decoded)) == (1, 1)
        assert await both.failures() == [1, 0]
        await both.stack.assert_idle()


async def test_a_failed_decode_does_not_count_against_the_prefill_worker(tmp_path: Path) -> None:
    async with pair(tmp_path, second=BROKEN) as both:
        status, _ = await both.ask()
        assert status in (200, 502)
        assert (await both.failures())[1] >= 1
        assert (await both.failures())[0] == 0
        await both.stack.assert_idle()


async def test_workers_of_different_groups_form_no_pair(tmp_path: Path) -> None:
    async with pair(tmp_path, group="another") as both:
        assert (await both.ask())[0] == 200
        assert (len(both.prefilled), len(both.decoded)) == (0, 1)


async def test_clients_may_not_set_the_kv_transfer_field(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        status, body = await both.ask(kv_transfer_params={"remote_host": "10.0.0.9"})
        assert (status, json.loads(body)["error"]["code"]) == (400, "transfer_field")
        assert both.prefilled + both.decoded == []


async def test_a_client_that_disconnects_during_prefill_leaves_no_request(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            ok = head.startswith((b"GET /v1/models", b"GET /health"))
            models = b'{"object":"list","data":[{"id":"%b"}]}' % MODEL.encode()
            writer.write(answer(models, b"200 OK" if ok else b"404 Not Found"))
            await writer.drain()
        else:
            begun.set()
            await reader.read()  # until the router hangs up
            left.set()
        writer.close()

    left = asyncio.Event()
    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    flags = ["--disaggregation", "always"]
    async with (
        server,
        misbehaving(SECOND) as (other, decoded),
        running(tmp_path, 0, flags) as stack,
    ):
        for one, role in ((url, "prefill"), (other, "decode")):
            await stack.add(f"{one},kind=vllm,events=none,role={role},group=g")
        body = {"model": MODEL, "prompt": "a b c", "max_tokens": 16}
        asking = asyncio.create_task(stack.http.post(f"{stack.url}/v1/completions", json=body))
        await asyncio.wait_for(begun.wait(), 10)
        asking.cancel()
        await asyncio.wait_for(left.wait(), 10)
        await stack.assert_idle()
        assert decoded == []


class Keeper:
    """A worker like our engine that keeps KV for a decode worker and never completes its answer.
    Lifetime: test.
    """

    def __init__(self, answer: bytes) -> None:
        """Create the worker; it writes `answer` to a prefill request and then waits until the
        router hangs up.
        """
        self.answer = answer
        self.asked: list[Any] = []  # `kv_transfer_params` of the legs
        self.released: list[Any] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(length_of(head))
        if head.startswith(b"POST /kv/release"):
            self.released.append(json.loads(body))
            writer.write(answer(b'{"released":true}'))
        elif head.startswith(b"POST"):
            self.asked.append(json.loads(body)["kv_transfer_params"])
            writer.write(self.answer)
            await reader.read()
        else:
            ok = head.startswith((b"GET /v1/models", b"GET /health"))
            models = b'{"object":"list","data":[{"id":"%b"}]}' % MODEL.encode()
            writer.write(answer(models, b"200 OK" if ok else b"404 Not Found"))
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()


def length_of(head: bytes) -> int:
    lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
    return next((int(value) for name, _, value in lines if name == b"content-length"), 0)


UNREAD = {
    "client left": (b"", {}, {}),
    "client left in the answer": (FIRST[:-4], {}, {}),
    "deadline": (b"", {"x-request-timeout-ms": "300"}, {}),
    "timeout": (b"", {}, {"--timeouts-whole-answer-s": "0.3"}),
    "garbage": (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", {}, {}),
}


@pytest.mark.parametrize("case", UNREAD)
@pytest.mark.parametrize("relay", ["auto", "python"])
async def test_kv_with_an_unread_prefill_answer_is_released_by_the_routers_own_id(
    tmp_path: Path, case: str, relay: str
) -> None:
    said, headers, more = UNREAD[case]
    keeper = Keeper(said)
    server = await asyncio.start_server(keeper.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    flags = ["--disaggregation", "always", "--relay", relay]
    flags += [one for pair in more.items() for one in pair]
    async with (
        server,
        misbehaving(SECOND) as (other, _),
        running(tmp_path, 0, flags, headers=headers) as stack,
    ):
        for one, role in ((url, "prefill"), (other, "decode")):
            await stack.add(f"{one},kind=warmroute,events=none,role={role},group=g")
        body = {"model": MODEL, "prompt": "a b c", "max_tokens": 16}
        asking = asyncio.create_task(stack.http.post(f"{stack.url}/v1/completions", json=body))

        async def prefill_arrived() -> bool:
            return bool(keeper.asked)

        async def released() -> bool:
            return len(keeper.released) == len(keeper.asked)

        await until(prefill_arrived, "the first leg")
        if case.startswith("client left"):
            asking.cancel()
        await until(released, "its KV to be given back")
        names = [{"transfer_id": one["transfer_id"]} for one in keeper.asked]
        assert keeper.released == names
        await asyncio.wait((asking,))
        await stack.assert_idle()
