"""Tests of the picker with a real Envoy and the sample bootstraps: bytes, answers, and faults of
each part.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import pytest_asyncio
import yaml

from tests.engines.echo_worker import EVENTS, MODEL, EchoWorker, echo_worker, event
from tests.engines.envoy import (
    ENVOY,
    Envoy,
    cluster_of,
    duplex,
    filters_of,
    picker_of,
    running_envoy,
)
from tests.engines.picked import PATH, body_of
from tests.live.stack import Stack, running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ORIGINAL_DST, OVERRIDE_HOST = "original-dst.yaml", "override-host.yaml"
BODIES = 1_000
DECISION_S = 0.5
ROUTER = (
    *("--picker-port", "0", "--picker-decision-s", str(DECISION_S)),
    *("--limits-body-bytes", str(16 << 20), "--intervals-health-s", "0.5"),
    *("--picker-objectives", "batch=10", "--picker-health-port", "0"),
    *("--model-limits", "full:max_requests=1", "--slow-start-s", "0"),
)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    ENVOY.or_skip()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Yield a router with a picker and no workers."""
    folder = tmp_path_factory.mktemp("logs")
    more = ("--access-log", str(folder / "access.jsonl"), *ROUTER)
    async with running(folder, workers=0, router=more) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def listing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Yield a router whose picker names three endpoints for each request."""
    folder, more = tmp_path_factory.mktemp("logs"), ("--picker-endpoints", "3", *ROUTER)
    async with running(folder, workers=0, router=more) as stack:
        yield stack


@asynccontextmanager
async def behind(stack: Stack, count: int = 2) -> AsyncIterator[list[EchoWorker]]:
    """Add workers to the router; at the end, check that the router charges no worker with a
    request.
    """
    async with AsyncExitStack() as all_of:
        workers = [await all_of.enter_async_context(echo_worker()) for _ in range(count)]
        ids = [await stack.add(f"{one.url},kind=openai,model={MODEL}") for one in workers]
        try:
            yield workers
            await stack.assert_idle()
        finally:
            for worker_id in ids:
                await stack.remove(worker_id)


@asynccontextmanager
async def edge(
    folder: Path, stack: Stack, workers: list[EchoWorker], file: str, **more: Any
) -> AsyncIterator[Envoy]:
    """Run Envoy with a sample bootstrap in front of the router's picker and the workers."""
    engines = [one.address for one in workers]
    picker = stack.router.facts["picker"]
    async with running_envoy(folder, file, [picker], engines, **more) as envoy:
        yield envoy


@asynccontextmanager
async def served(
    stack: Stack, folder: Path, file: str, count: int = 2, **more: Any
) -> AsyncIterator[tuple[Envoy, list[EchoWorker]]]:
    """Run workers and an Envoy in front of them; yield both."""
    async with AsyncExitStack() as all_of:
        workers = await all_of.enter_async_context(behind(stack, count))
        found = edge(folder, stack, workers, file, **more)
        yield await all_of.enter_async_context(found), workers


def modes(request: str, response: str) -> Any:
    """Return a function that sets the bootstrap's body modes for requests and responses."""

    def change(config: Any) -> None:
        mode = picker_of(config)["processing_mode"]
        mode |= {"request_body_mode": request, "response_body_mode": response}
        if request == "FULL_DUPLEX_STREAMED":
            mode["request_trailer_mode"] = "SEND"

    return change


def random_body(draw: random.Random) -> bytes:
    """Return a body of 40 bytes to 5 MB; its size is log-uniform."""
    size = int(2 ** draw.uniform(0, 22.3))
    return body_of(draw.randbytes((size + 1) // 2).hex()[:size])


async def metric(stack: Stack, line: str) -> float:
    """Return the router's metric sample with this full name and labels."""
    async with stack.http.get(f"{stack.admin}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(float(one.rsplit(" ", 1)[1]) for one in lines if one.startswith(f"{line} "))


async def error_of(reply: aiohttp.ClientResponse) -> tuple[int, str]:
    return reply.status, (await reply.json())["error"]["code"]


FILES_AND_MODES = [
    pytest.param(ORIGINAL_DST, None, id="original-dst"),
    pytest.param(OVERRIDE_HOST, None, id="override-host"),
    pytest.param(ORIGINAL_DST, duplex, id="original-dst-duplex"),
    pytest.param(OVERRIDE_HOST, duplex, id="override-host-duplex"),
]


def _no_change(config: Any) -> None:
    """Leave the bootstrap as it is."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
@pytest.mark.parametrize(("file", "change"), FILES_AND_MODES)
async def test_random_bodies_pass_unchanged_in_both_directions(
    stack: Stack, tmp_path: Path, file: str, change: Any, http2: bool
) -> None:
    draw = random.Random(24)
    bodies = [random_body(draw) for _ in range(BODIES // len(FILES_AND_MODES) // 2)]
    async with behind(stack) as workers:
        found = edge(tmp_path, stack, workers, file, change=change or _no_change)
        client = httpx.AsyncClient(http1=not http2, http2=http2, timeout=60)
        async with found as envoy, client:
            slots = asyncio.Semaphore(8)

            async def one(body: bytes) -> None:
                async with slots:
                    reply = await client.post(f"{envoy.url}{PATH}", content=body)
                assert reply.status_code == 200, reply.text
                assert reply.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
                assert reply.content == body

            async with asyncio.TaskGroup() as group:
                for body in bodies:
                    group.create_task(one(body))
            assert await envoy.stats("ext_proc.spurious_msgs_received") == 0
            assert await envoy.stats("ext_proc.streams_failed") == 0


@pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
@pytest.mark.parametrize(("file", "change"), FILES_AND_MODES)
async def test_events_pass_unchanged_and_at_once(
    stack: Stack, tmp_path: Path, file: str, change: Any, http2: bool
) -> None:
    wanted = b"".join(map(event, range(EVENTS))) + b"data: [DONE]\n\n"
    async with behind(stack) as workers:
        found = edge(tmp_path, stack, workers, file, change=change or _no_change)
        client = httpx.AsyncClient(http1=not http2, http2=http2, timeout=60)
        async with found as envoy, client:
            before = await envoy.stats("ext_proc.stream_msgs_sent")
            headers = {"x-do": "events", "content-type": "application/json"}
            sent = client.stream(
                "POST", f"{envoy.url}{PATH}", content=body_of("a", stream=True), headers=headers
            )
            at_s, data = [], b""
            async with sent as reply:
                async for piece in reply.aiter_raw():
                    at_s.append(time.monotonic())
                    data += piece
                assert reply.headers["x-warmroute-worker"].isdigit()
            assert data == wanted
            assert at_s[-1] - at_s[0] > 0.005 * EVENTS, "they were held back"
            await stack.assert_idle()
            said = await envoy.stats("ext_proc.stream_msgs_sent") - before
            if change is None:
                assert said <= 4, "a message for each piece"
            else:
                assert said > EVENTS


@pytest.mark.parametrize(("file", "change"), FILES_AND_MODES)
async def test_requests_without_a_body_and_with_100_continue_are_answered(
    stack: Stack, tmp_path: Path, file: str, change: Any
) -> None:
    found = served(stack, tmp_path, file, change=change or _no_change)
    async with found as (envoy, _):
        async with envoy.http.get(f"{envoy.url}/v1/models") as reply:
            assert [one["id"] for one in (await reply.json())["data"]] == [MODEL]
        async with envoy.http.post(f"{envoy.url}{PATH}") as reply:
            assert await error_of(reply) == (400, "invalid_json")
        async with envoy.http.get(f"{envoy.url}/else") as reply:
            assert reply.status == 404
        body = body_of("a" * 100_000)
        sent = envoy.http.post(f"{envoy.url}{PATH}", data=body, expect100=True)
        async with sent as reply:
            assert await reply.read() == body

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(body), 7_000):
                yield body[at : at + 7_000]
                await asyncio.sleep(0)

        async with envoy.http.post(f"{envoy.url}{PATH}", data=pieces()) as reply:
            assert await reply.read() == body


@pytest.mark.parametrize(
    ("request_mode", "response_mode"),
    [
        ("BUFFERED", "BUFFERED"),
        ("BUFFERED", "STREAMED"),
        ("BUFFERED_PARTIAL", "NONE"),
        ("FULL_DUPLEX_STREAMED", "NONE"),
        ("STREAMED", "NONE"),
        ("NONE", "NONE"),
        ("NONE", "STREAMED"),
    ],
)
async def test_each_body_mode_is_handled(
    stack: Stack, tmp_path: Path, request_mode: str, response_mode: str
) -> None:
    change = modes(request_mode, response_mode)
    found = served(stack, tmp_path, ORIGINAL_DST, change=change)
    async with found as (envoy, _):
        for size in (1, 50_000):
            body = body_of("a" * size)
            async with envoy.http.post(f"{envoy.url}{PATH}", data=body) as reply:
                assert (reply.status, await reply.read()) == (200, body)
        headers = {"x-do": "events"}
        sent = body_of("a", stream=True)
        async with envoy.http.post(f"{envoy.url}{PATH}", data=sent, headers=headers) as reply:
            assert (await reply.read()).endswith(b"data: [DONE]\n\n")
        assert await envoy.stats("ext_proc.spurious_msgs_received") == 0


@pytest.mark.parametrize("change", [_no_change, duplex], ids=["buffered", "duplex"])
async def test_bodies_over_the_limit_get_413_from_envoy_or_the_picker(
    stack: Stack, tmp_path: Path, change: Any
) -> None:
    large = body_of("a" * ((16 << 20) + 1_000))
    async with served(stack, tmp_path, ORIGINAL_DST, change=change) as (envoy, _):
        assert await status_of(envoy, large) == 413


@pytest.mark.parametrize(("file", "change"), FILES_AND_MODES)
async def test_clients_cannot_choose_a_destination(
    stack: Stack, tmp_path: Path, file: str, change: Any
) -> None:
    found = served(stack, tmp_path, file, change=change or _no_change)
    async with found as (envoy, workers), echo_worker() as stranger:
        if envoy:
            headers = {
                "x-gateway-destination-endpoint": stranger.address,
                "x-gateway-destination-endpoint-subset": stranger.address,
                "x-data-parallel-rank": "3",
                "x-prefiller-host-port": stranger.address,
                "x-mine": "kept",
            }
            for _ in range(8):
                sent = envoy.http.post(f"{envoy.url}{PATH}", data=body_of("a"), headers=headers)
                async with sent as reply:
                    assert reply.status == 200
            assert not stranger.heads
            seen = [head for one in workers for head in one.heads]
            assert len(seen) == 8
            addresses = {one.address for one in workers}
            for head in seen:
                named = head["x-gateway-destination-endpoint"].split(",")
                assert addresses.issuperset(named)
                assert not {"x-data-parallel-rank", "x-prefiller-host-port"} & head.keys()
                assert head["x-mine"] == "kept"


def by_header(config: Any) -> None:
    """Add a filter in front of the picker's filter that reads the allowed endpoints from
    a header.
    """
    space, key = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
    told = {"metadata_namespace": space, "key": key, "type": "STRING"}
    kind = "envoy.extensions.filters.http.header_to_metadata.v3.Config"
    rules = [{"header": "x-subset", "on_header_present": told}]
    typed = {"@type": f"type.googleapis.com/{kind}", "request_rules": rules}
    named = {"name": "envoy.filters.http.header_to_metadata", "typed_config": typed}
    filters_of(config).insert(0, named)


async def test_a_subset_hint_restricts_the_endpoints(stack: Stack, tmp_path: Path) -> None:
    found = served(stack, tmp_path, OVERRIDE_HOST, count=3, change=by_header)
    async with found as (envoy, workers):
        if workers:

            async def answer_with_hint(hint: str) -> aiohttp.ClientResponse:
                sent = envoy.http.post(
                    f"{envoy.url}{PATH}", data=body_of("a"), headers={"x-subset": hint}
                )
                async with sent as reply:
                    await reply.read()
                    return reply

            for _ in range(6):
                assert (await answer_with_hint(workers[1].address)).status == 200
            assert [len(one.heads) for one in workers] == [0, 6, 0]
            both = f"{workers[0].address}, {workers[2].address}"
            assert (await answer_with_hint(both)).status == 200
            assert len(workers[1].heads) == 6
            assert (await answer_with_hint("127.0.0.1")).status == 200
            none = await answer_with_hint("127.0.0.9:1,nonsense")
            assert none.status == 503
            assert none.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


async def test_headers_of_the_conformance_tests_need_the_pickers_option(tmp_path: Path) -> None:
    """The headers of the gateway API's conformance tests (GatewayFollowingEPPRouting,
    DestinationEndpointServed) work only if the picker's option enables them.
    """
    chosen, served_by = "test-epp-endpoint-selection", "x-conformance-test-served-endpoint"
    for more in ((), ("--picker-conformance", "true")):
        folder = tmp_path / ("with" if more else "without")
        async with AsyncExitStack() as all_of:
            router = running(folder, workers=0, router=(*ROUTER, *more))
            stack = await all_of.enter_async_context(router)
            found = served(stack, tmp_path, OVERRIDE_HOST, count=3)
            envoy, workers = await all_of.enter_async_context(found)
            last = workers[2].address
            for _ in range(6):
                headers = {chosen: last}
                sent = envoy.http.post(f"{envoy.url}{PATH}", data=body_of("a"), headers=headers)
                async with sent as reply:
                    assert reply.status == 200
                    assert reply.headers.get(served_by) == (last if more else None)
            assert ([len(one.heads) for one in workers] == [0, 0, 6]) is bool(more)


async def test_a_pool_without_pods_gets_503_with_a_reason(stack: Stack, tmp_path: Path) -> None:
    def blind(config: Any) -> None:
        del cluster_of(config, "picker")["health_checks"]

    async with edge(tmp_path, stack, [], ORIGINAL_DST, change=blind) as envoy:
        assert envoy.process.pid
        async with envoy.http.post(f"{envoy.url}{PATH}", data=body_of("a")) as reply:
            assert await error_of(reply) == (503, "no_worker_available")
            assert reply.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
            assert int(reply.headers["retry-after"]) >= 1


async def test_a_dead_endpoint_is_skipped_and_the_serving_worker_is_charged(
    listing: Stack, tmp_path: Path
) -> None:
    stack = listing
    lost = AsyncExitStack()
    third = await lost.enter_async_context(echo_worker())
    found, told = behind(stack), 'warmroute_picker_elsewhere_total{to="moved"}'
    async with found as workers, edge(tmp_path, stack, [*workers, third], OVERRIDE_HOST) as envoy:
        worker_id = await stack.add(f"{third.url},kind=openai,model={MODEL}")
        await lost.aclose()  # it refuses now, and no probe has noticed yet
        hung = [
            asyncio.create_task(
                status_of(envoy, body_of(f"{n} " * 40), {"x-do": "events", "x-pause-s": "0.2"})
            )
            for n in range(12)
        ]

        async def where_they_are() -> bool:
            rows = {row["url"]: row["inflight_requests"] for row in await stack.rows()}
            there = {one.url: len(one.heads) for one in workers}
            return rows == there | {third.url: 0} and sum(there.values()) == len(hung)

        await until(where_they_are, "all charges to be at the workers that live")
        assert await metric(stack, told) > 0
        row = await stack.row(worker_id)
        assert row["failures"] or row["state"] != "ready", "nobody blames it"
        for task in hung:
            task.cancel()
        await stack.assert_idle()
        await stack.remove(worker_id)


async def status_of(envoy: Envoy, body: bytes, headers: Any = None) -> int:
    async with envoy.http.post(f"{envoy.url}{PATH}", data=body, headers=headers) as reply:
        await reply.read()
        return reply.status


async def test_a_refusing_endpoint_gives_503_under_original_dst(
    stack: Stack, tmp_path: Path
) -> None:
    lost = AsyncExitStack()
    only = await lost.enter_async_context(echo_worker())
    worker_id = await stack.add(f"{only.url},kind=openai,model={MODEL}")
    try:
        async with edge(tmp_path, stack, [], ORIGINAL_DST) as envoy:
            await lost.aclose()
            async with envoy.http.post(f"{envoy.url}{PATH}", data=body_of("a")) as reply:
                assert reply.status == 503
                assert await reply.read()
            await stack.assert_idle()
            assert (await stack.row(worker_id))["failures"] >= 1
    finally:
        await stack.remove(worker_id)


@pytest.mark.parametrize("change", [_no_change, duplex], ids=["buffered", "duplex"])
async def test_disconnects_and_worker_failures_leave_no_charge(
    stack: Stack, tmp_path: Path, change: Any
) -> None:
    found = served(stack, tmp_path, ORIGINAL_DST, change=change)
    async with found as (envoy, _):
        for what in ("hang", "events"):
            headers = {"x-do": what, "x-pause-s": "0.1"}
            sent = status_of(envoy, body_of("a", stream=True), headers)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sent, 0.3)
            await stack.assert_idle()
        headers = {"x-do": "fail"}
        async with envoy.http.post(
            f"{envoy.url}{PATH}", data=body_of("a"), headers=headers
        ) as reply:
            assert reply.status == 500
            assert "as asked" in await reply.text()

        async def counted() -> bool:
            return sum(row["failures"] for row in await stack.rows()) == 1

        await until(counted, "its failure to be counted")


async def test_a_deadline_ends_a_request_that_waits_for_an_answer(
    stack: Stack, tmp_path: Path
) -> None:
    found = served(stack, tmp_path, ORIGINAL_DST)
    async with found as (envoy, _):
        headers = {"x-do": "hang", "x-request-timeout-ms": "300"}
        began_s = time.monotonic()
        async with envoy.http.post(
            f"{envoy.url}{PATH}", data=body_of("a"), headers=headers
        ) as reply:
            assert await error_of(reply) == (504, "deadline_exceeded")
        assert time.monotonic() - began_s < 0.6


async def test_a_request_at_the_models_limit_waits_for_the_decision_time(
    stack: Stack, tmp_path: Path
) -> None:
    full = json.dumps({"model": "full", "prompt": "a"}).encode()
    async with echo_worker() as worker:
        worker_id = await stack.add(f"{worker.url},kind=openai,model=full")
        async with edge(tmp_path, stack, [worker], ORIGINAL_DST) as envoy:
            hung = asyncio.create_task(status_of(envoy, full, {"x-do": "hang"}))

            async def charged() -> bool:
                return bool((await stack.row(worker_id))["inflight_requests"])

            await until(charged, "the first one to be there")
            for _ in range(3):
                began_s = time.monotonic()
                async with envoy.http.post(f"{envoy.url}{PATH}", data=full) as reply:
                    took_s = time.monotonic() - began_s
                    assert await error_of(reply) == (503, "hold_timeout")
                    assert reply.headers["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
                    assert int(reply.headers["retry-after"]) >= 1
                assert 0.5 * DECISION_S < took_s < DECISION_S + 0.1
            hung.cancel()
            await stack.assert_idle()
        await stack.remove(worker_id)


async def test_health_checks_work_for_every_service_name(stack: Stack) -> None:
    import grpc

    known = ("", "envoy.service.ext_proc.v3.ExternalProcessor", "readiness", "inference-extension")

    async def health_of(address: str, service: str) -> bytes:
        async with grpc.aio.insecure_channel(address) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            name = service.encode()
            return bytes(await check(b"\x0a" + bytes([len(name)]) + name if name else b""))

    for place in ("picker", "health"):
        address = stack.router.facts[place]
        for name in known:
            assert await health_of(address, name) == b"\x08\x02", "no worker takes requests"
        assert await health_of(address, "liveness") == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await health_of(address, "else")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
    async with behind(stack):
        for name in known:
            assert await health_of(stack.router.facts["health"], name) == b"\x08\x01"


async def test_the_sample_files_remove_clients_destination_headers() -> None:
    for file in (ORIGINAL_DST, OVERRIDE_HOST):
        config = yaml.safe_load(
            (Path(__file__).parents[2] / "docs/deploy/envoy" / file).read_text()
        )
        first, second, *_ = filters_of(config)
        assert first["name"] == "envoy.filters.http.header_mutation"
        removed = first["typed_config"]["mutations"]["request_mutations"]
        assert {"remove": "x-gateway-destination-endpoint"} in removed
        assert second["name"] == "envoy.filters.http.ext_proc"
