"""Tests of bad input over real HTTP: the router answers clearly, does not crash, and charges no
load.
"""

from __future__ import annotations

import asyncio
import json
from itertools import count

import aiohttp
import pytest
import zmq
import zmq.asyncio

from tests.live.conftest import BODY_LIMIT
from tests.live.hostile.corpus import refused
from tests.live.stack import MODEL, Stack, exchanged, misbehaving, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

OK_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def stack(shared: Stack) -> Stack:
    return shared


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"model": "tiny", "prompt": "x"', "JSON"),
        (b"\xff\xfe\x00", "JSON"),
        (b"[]", "object"),
        (b'{"model": 5, "prompt": "x"}', "model"),
        (b'{"model": "tiny", "prompt": {"a": 1}}', "prompt"),
        (b'{"model": "tiny", "prompt": [1, "a"]}', "prompt"),
        (b'{"model": "tiny", "prompt": [-1]}', "prompt"),
        (b'{"model": "tiny", "prompt": ""}', "empty"),
        (b'{"model": "tiny", "prompt": []}', "empty"),
        (b'{"model": "tiny"}', "prompt"),
        (b'{"model": "tiny", "prompt": "x", "stream": "yes"}', "stream"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": 1.5}', "max_tokens"),
        (b"[" * 100_000, "object"),
        (b'{"model": "tiny", "prompt": ' + b"[" * 100_000, "nested"),
    ],
)
async def test_the_error_for_an_invalid_body_names_the_field(stack, body, words) -> None:
    status, answer = await stack.post(body)
    assert status == 400
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert words.lower() in (error["message"] + str(error["param"])).lower()


async def test_the_error_for_an_invalid_chat_names_the_field(stack) -> None:
    path = "/v1/chat/completions"
    for body, word in (
        (b'{"model": "tiny", "messages": []}', "message"),
        (b'{"model": "tiny", "messages": "hi"}', "messages"),
        (b'{"model": "tiny", "messages": [1]}', "messages"),
    ):
        status, answer = await stack.post(body, path)
        assert status == 400
        assert word in answer["error"]["message"] + str(answer["error"]["param"])


async def test_the_error_for_an_unknown_model_lists_the_served_models(stack) -> None:
    status, answer = await stack.complete([1, 2], model="gpt-nothing")
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert MODEL in answer["error"]["message"]


async def test_a_prompt_longer_than_the_context_is_rejected_before_dispatch(stack) -> None:
    before = await stack.metric("warmroute_prompt_tokens_total")
    status, answer = await stack.complete([1] * 140_000)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "140000" in answer["error"]["message"]
    assert await stack.metric("warmroute_prompt_tokens_total") == before


async def test_the_error_for_a_body_over_the_limit_names_the_limit(stack) -> None:
    status, answer = await stack.post(b'{"model":"tiny","prompt":"' + b"x" * BODY_LIMIT + b'"}')
    assert status == 413
    assert str(BODY_LIMIT) in answer["error"]["message"]


async def test_a_chat_of_ten_thousand_messages_is_served(stack) -> None:
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"m{i}"} for i in range(10_001)
    ]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode()
    status, answer = await stack.post(body, "/v1/chat/completions")
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] > 10_000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/metrics", 404),
        ("GET", "/workers", 404),
        ("POST", "/v1/images/generations", 404),
        ("POST", "/v1/completions/../../workers", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
    ],
)
async def test_only_the_allowed_paths_are_served(stack, method, path, status) -> None:
    async with stack.http.request(method, f"{stack.url}{path}") as reply:
        assert reply.status == status
        message = (await reply.json())["error"]["message"]
    assert ("/v1/completions" if status == 404 else "takes POST") in message


async def test_unknown_fields_and_formatting_reach_the_worker_byte_for_byte(stack) -> None:
    reply = OK_JSON
    body = b'{ "model":"echo",\n "x_unknown": {"a":[1, 2.50e1]}, "prompt" : "h\\u00e9" ,"n":1 }'
    async with misbehaving(reply, "echo") as (url, seen):
        worker_id = await stack.add(url)
        status, _ = await stack.post(body)
        await stack.remove(worker_id)
    assert status == 200
    assert seen == [body]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"this is not HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops",
    ],
)
async def test_a_request_moves_from_a_worker_that_fails_before_the_first_byte(
    stack, answer
) -> None:
    """When one worker answers garbage, another one answers its requests, and every client gets a
    real answer.
    """
    first = count(100 * len(answer))  # prompts in no cache: known ones go to their worker
    async with misbehaving(answer) as (url, seen):
        worker_id = await stack.add(url)

        async def tried() -> bool:
            prompts = [[next(first)] * 64 for _ in range(24)]
            answers = await asyncio.gather(*(stack.complete(prompt) for prompt in prompts))
            assert {status for status, _ in answers} == {200}
            return bool(seen)

        await until(tried, "the misbehaving worker to be tried")
        await stack.remove(worker_id)


async def test_a_worker_that_dies_before_its_first_byte_gives_502(stack) -> None:
    """When a worker dies before its first byte, the client gets a 502, because an incomplete answer
    must not look complete.
    """
    half = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\nhalf"
    async with misbehaving(half, "half") as (url, _):
        worker_id = await stack.add(url)
        status, answer = await stack.complete([1], model="half")
        await stack.remove(worker_id)
    assert (status, answer["error"]["code"]) == (502, "worker_error")


async def test_a_worker_that_dies_in_mid_stream_cuts_the_clients_connection(stack) -> None:
    """When a worker dies in the middle of a stream, the client's connection is broken off, so that
    half an answer does not look whole.
    """
    event = b'data: {"choices":[{"index":0,"text":"half"}]}\n\n'
    half = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 900\r\n\r\n"
    async with misbehaving(half + event, "half") as (url, _):
        worker_id = await stack.add(url)
        body = {"model": "half", "prompt": [1], "stream": True}
        with pytest.raises(aiohttp.ClientError):
            async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
                await reply.read()
        await stack.remove(worker_id)


async def test_the_last_error_of_workers_that_all_fail_reaches_the_client(stack) -> None:
    answer = b"HTTP/1.1 500 Oops\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\noops"
    async with misbehaving(answer, "broken") as (url, _):
        worker_id = await stack.add(url)
        body = {"model": "broken", "prompt": [1]}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
            assert (reply.status, await reply.text()) == (500, "oops")
        await stack.remove(worker_id)


async def test_client_errors_of_workers_pass_through_and_eject_no_worker(stack) -> None:
    for _ in range(20):
        status, answer = await stack.complete([1, 2, 3], max_tokens=-5)
        assert status == 400, answer
    assert await stack.metric("warmroute_ejections_total") == 0
    assert {row["state"] for row in await stack.rows()} == {"ready"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_body_with_content_encoding_gets_415_before_dispatch(stack, path) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = json.dumps({"model": MODEL, "prompt": "x", "messages": messages}).encode()
    names = ('warmroute_client_errors_total{status="415"}', "warmroute_retries_total")
    before = [await stack.metric(name) for name in names]
    for coding in ("gzip", "Zstd", "identity, br"):
        headers = {"Content-Encoding": coding}
        async with stack.http.post(f"{stack.url}{path}", data=body, headers=headers) as reply:
            assert reply.status == 415
            assert reply.headers["Accept-Encoding"] == "identity"
            error = (await reply.json())["error"]
            assert error["code"] == "unsupported_content_encoding"
            assert "Content-Encoding" in error["message"]
    headers = {"Content-Encoding": "Identity"}
    async with stack.http.post(f"{stack.url}{path}", data=body, headers=headers) as reply:
        assert reply.status == 200
    after = [await stack.metric(name) for name in names]
    assert after == [before[0] + 3, before[1]]


async def test_malformed_event_frames_are_counted_and_otherwise_ignored(stack, request) -> None:
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    request.addfinalizer(lambda: context.destroy(linger=0))
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    reply = OK_JSON
    frames = [
        [b"", b"\0" * 8, b"\xc1 not msgpack"],
        [b"", b"\0" * 8, b"\x93\xcb?\xf8"],
        [b"", b"short", b""],
        [b"only one"],
        [b"", b"\0" * 8, b"\xdd\xff\xff\xff\xff"],
        [b"", b"\0" * 8, b"\x92" * 5000],
    ]
    async with misbehaving(reply, "noisy") as (url, _):
        worker_id = await stack.add(f"{url},events=tcp://127.0.0.1:{port}")

        async def counted() -> bool:
            for message in frames:
                await publisher.send_multipart(message)
            async with stack.http.get(f"{stack.admin}/metrics") as answer:
                text = await answer.text()
            label = f'warmroute_kv_events_total{{kind="malformed_frames",worker="{worker_id}"}}'
            counts = [line.split()[-1] for line in text.splitlines() if line.startswith(label)]
            return bool(counts) and float(counts[0]) >= len(frames)

        await until(counted, "malformed frames to be counted")
        status, _ = await stack.complete([1], model="noisy")
        assert status == 200
        await stack.remove(worker_id)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("not a url", "http"),
        ("http://127.0.0.1:1,colour=red", "colour"),
        ("http://127.0.0.1:1,max_kv_fraction=7", "max_kv_fraction"),
        ({"url": "http://127.0.0.1:1", "role": "chef"}, "role"),
        (17, "worker"),
    ],
)
async def test_the_admin_port_rejects_an_invalid_worker_and_names_the_error(
    stack, spec, words
) -> None:
    async with stack.http.post(f"{stack.admin}/workers", json=spec) as reply:
        assert reply.status == 400
        assert words in (await reply.json())["error"]["message"]


async def test_the_admin_port_rejects_cross_origin_browser_requests(stack) -> None:
    headers = {"Content-Type": "text/plain"}
    url = f"{stack.admin}/workers"
    async with stack.http.post(url, data=b'"http://127.0.0.1:1"', headers=headers) as reply:
        assert reply.status == 415
    async with stack.http.delete(f"{stack.admin}/workers/999") as reply:
        assert reply.status == 404


@pytest.mark.parametrize("path", ["/explain", "/ui", "/ui/state", "/workers", "/metrics", "/kv"])
async def test_a_page_after_dns_rebinding_cannot_read_the_admin_port(stack, path) -> None:
    """The admin port refuses a page whose host name was rebound to it: after DNS rebinding, the
    Host header still has the page's own name.
    """
    for host in ("evil.example:8081", "localhost.evil.example", "127.0.0.1.evil.example", "[x]"):
        status, body = await exchanged(stack.admin, f"GET {path}", f"Host: {host}")
        assert status == 421, (host, body)
        error = json.loads(body)["error"]
        assert error["code"] == "unknown_host"
        assert "admin_allowed_hosts" in error["message"]


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost.:8081", "127.0.0.1:8081", "[::1]:8081", "10.1.2.3", "[fe80::1]"],
)
async def test_the_admin_port_accepts_any_ip_address_and_localhost_as_host(stack, host) -> None:
    """The admin port answers to any IP address, which Prometheus and Kubernetes use, and to
    localhost, which a forwarded port uses.
    """
    for path in ("/workers", "/metrics", "/ui"):
        assert (await exchanged(stack.admin, f"GET {path}", f"Host: {host}"))[0] == 200


async def test_only_the_admin_ports_root_links_to_the_pages(stack) -> None:
    status, body = await exchanged(stack.admin, "GET /", "Host: localhost")
    assert status == 200
    assert b'href="ui"' in body
    for path in ("/", "/ui", "/workers"):
        assert (await exchanged(stack.url, f"GET {path}", "Host: localhost"))[0] == 404, path


async def test_the_admin_port_answers_probes_under_any_host_name(stack) -> None:
    for path in ("/health", "/ready"):
        assert (await exchanged(stack.admin, f"GET {path}", "Host: router.example"))[0] == 200
    request = b"GET /workers HTTP/1.0\r\n\r\n"  # as load balancers ask, which are not browsers
    assert (await exchanged(stack.admin, request))[0] == 200


@pytest.mark.parametrize("field", ["Origin: http://localhost", "Sec-Fetch-Site: same-origin"])
async def test_requests_of_browser_pages_change_nothing_at_the_admin_port(stack, field) -> None:
    for line in ("POST /workers/0/drain", "POST /drain", "DELETE /workers/0?force=true"):
        assert (await exchanged(stack.admin, line, "Host: localhost", field))[0] == 403, line
    assert (await stack.row(0))["state"] == "ready"


async def test_the_admin_port_rejects_ambiguous_requests(stack) -> None:
    for name, status, request in refused():
        got, body = await exchanged(stack.admin, request)
        assert got == (421 if status == 404 else status), (name, body)  # they use the host x
        json.loads(body)


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request", b"500 Oh"])
@pytest.mark.parametrize("stream", [False, True])
async def test_x_warmroute_response_headers_of_an_engine_are_removed(stack, status, stream) -> None:
    lies = b"x-warmroute-worker: 77\r\nX-WarmRoute-Explain: {}\r\nx-warmroute-migratable: 1\r\n"
    answer = b"HTTP/1.1 %s\r\n%sX-Own: 1\r\nContent-Length: 2\r\n\r\n{}" % (status, lies)
    async with misbehaving(answer, "lies") as (url, _):
        worker_id = await stack.add(url)
        body = {"model": "lies", "prompt": [1], "stream": stream}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
            assert reply.status == int(status.split()[0])
        await stack.remove(worker_id)
    assert reply.headers["X-Own"] == "1"
    said = [(k, v) for k, v in reply.headers.items() if k.lower().startswith("x-warmroute-")]
    # A reply that is passed on only because no better one came names no worker.
    ours = [("x-warmroute-worker", str(worker_id))]
    assert said == (ours if status.startswith(b"400") else [])


async def test_client_headers_pass_except_the_routers_internal_ones(stack) -> None:
    heads: list[bytes] = []
    headers = {"x-warmroute-internal-worker": "0", "X-Custom": "kept", "traceparent": "00-1-2-03"}
    async with misbehaving(OK_JSON, "heads", heads) as (url, _):
        worker_id = await stack.add(url)
        status, _ = await stack.complete([1], model="heads", headers=headers)
        await stack.remove(worker_id)
    assert status == 200
    (head,) = heads
    assert b"x-warmroute-internal" not in head.lower()
    assert b"X-Custom: kept\r\n" in head
    assert b"traceparent: 00-1-2-03\r\n" in head
