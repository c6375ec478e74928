"""Tests of a request's trace spans, as a real collector receives them from a real router."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.live.access_lines import until_logged
from tests.live.collector import Seen, collecting
from tests.live.stack import MODEL, Stack, misbehaving, running, until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
SECRET = "the-text-of-a-prompt"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"
BROKEN = b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\n{}"


async def ask(stack: Stack, headers: dict[str, str] | None = None, **fields: Any) -> int:
    body = {"model": MODEL, "prompt": SECRET, "max_tokens": 4} | fields
    url = f"{stack.url}/v1/completions"
    async with stack.http.post(url, json=body, headers=headers) as reply:
        await reply.read()
        return reply.status


def spans_named(spans: list[Seen], name: str) -> list[Seen]:
    return sorted((s for s in spans if s.name == name), key=lambda s: s.start_ns)


def root_of(spans: list[Seen]) -> Seen:
    """Return the request's own span; check that all others are its children and within its time."""
    (root,) = [span for span in spans if span.kind == "server"]
    for span in spans:
        assert span is root or span.parent == root.id
        slack_ns = 1_000_000
        assert root.start_ns - slack_ns <= span.start_ns <= span.end_ns
        assert span.end_ns <= root.end_ns + slack_ns
    assert len({span.id for span in spans}) == len(spans)
    return root


@pytest.mark.parametrize("flags", [["--relay", "auto"], ["--relay", "python"]])
async def test_a_request_has_a_tree_of_spans(tmp_path: Path, flags: list[str]) -> None:
    access = tmp_path / "access"
    async with collecting() as collector:
        router = [*flags, *collector.flags, "--access-log", str(access), "--policy", "hybrid"]
        async with running(tmp_path, router=[*router, "--tracing-service-name", "edge"]) as stack:
            prompt = [7] * 64
            assert await ask(stack, prompt=prompt) == 200
            headers = {"traceparent": PARENT, "tracestate": "v=1", "x-request-id": "mine"}
            usage = {"stream": True, "stream_options": {"include_usage": True}}
            assert await ask(stack, headers, prompt=prompt, **usage) == 200
            assert await ask(stack, {"x-request-id": "who"}, model="nobody's") == 404
            traces = await collector.traces(3)
            lines = await until_logged(access, 3)
    assert not set(json.dumps([s.about for s in collector.seen])) & {SECRET}
    spans = traces[TRACE]
    root = root_of(spans)
    assert (root.parent, root.state, root.service) == (SPAN, "v=1", "edge")
    assert (root.name, root.failed) == ("POST /v1/completions", False)
    line, about = lines["mine"], root.about
    assert line["trace"] == TRACE
    assert about["warmroute.request_id"] == "mine"
    assert about["http.response.status_code"] == 200
    assert (about["warmroute.finish"], about["warmroute.blame"]) == ("ok", "none")
    assert about["gen_ai.request.model"] == MODEL
    assert (about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]) == (64, 4)
    assert about["warmroute.cached_tokens"] == line["cached_tokens"] == 48
    assert root.start_ns < root.events["first token"] < root.end_ns
    (tokens,), (decision,), (sent,) = (
        spans_named(spans, name) for name in ("tokenize", "decide", "dispatch")
    )
    assert len(spans) == 4
    assert tokens.about["warmroute.prompt_tokens"] == 64
    assert decision.about["warmroute.policy"] == "hybrid"
    assert decision.about["warmroute.reason"] == "policy"
    assert decision.about["warmroute.worker"] == line["worker"] == sent.about["warmroute.worker"]
    assert decision.about["warmroute.expected_hit_tokens"] == line["expected_hit_tokens"]
    assert decision.about["warmroute.runner_up.worker"] == 1 - line["worker"]
    assert any(name.startswith("warmroute.term.") for name in decision.about)
    assert decision.about["warmroute.regret_hit_tokens"] == 0
    assert sent.kind == "client"
    assert sent.about["http.response.status_code"] == 200
    assert sent.about["server.port"] == int(stack.workers[line["worker"]].url.split(":")[-1])
    assert sent.start_ns < sent.events["first token"] < sent.end_ns
    (lost,) = [spans for spans in traces.values() if root_of(spans).about.get("warmroute.code")]
    assert root_of(lost).about["warmroute.blame"] == "client"
    assert root_of(lost).about["warmroute.request_id"] == "who"
    assert root_of(lost).trace == lines["who"]["trace"]
    assert not spans_named(lost, "dispatch")


def parents(heads: list[bytes]) -> list[bytes]:
    """Return the trace headers of each request head that a worker got."""
    of_trace = (b"traceparent", b"tracestate")
    return [
        b"|".join(line for line in head.split(b"\r\n") if line.lower().startswith(of_trace))
        for head in heads
    ]


async def test_workers_get_the_trace_headers_of_their_dispatch_span(tmp_path: Path) -> None:
    heads: list[bytes] = []
    unsampled, wrong = PARENT[:-1] + "0", {"traceparent": "00-zz-zz-01", "tracestate": "v=1"}
    async with collecting() as collector, misbehaving(OK, heads=heads) as (url, _):
        flags = [*collector.flags, "--tracing-sample", "0"]
        async with running(tmp_path, workers=0, router=flags) as stack:
            await stack.add(f"{url},kind=openai")
            for headers in (
                {"traceparent": PARENT, "tracestate": "v=1"},
                {"Traceparent": unsampled, "Tracestate": "v=1"},
                wrong,
                {},
            ):
                assert await ask(stack, headers) == 200
            (spans,) = (await collector.traces(1)).values()
    followed, untouched, replaced, told = parents(heads)
    (sent,) = spans_named(spans, "dispatch")
    assert followed == f"traceparent: 00-{TRACE}-{sent.id}-01|tracestate: v=1".encode()
    assert untouched == f"Traceparent: {unsampled}|Tracestate: v=1".encode()
    for parent in (replaced, told):
        assert parent.startswith(b"traceparent: 00-")
        assert parent.endswith(b"-00")
        assert len(parent) == len(b"traceparent: ") + 55


async def test_without_tracing_trace_headers_pass_unchanged(tmp_path: Path) -> None:
    heads: list[bytes] = []
    wrong = {"traceparent": "00-zz-zz-01", "tracestate": "V"}
    async with (
        misbehaving(OK, heads=heads) as (url, _),
        running(tmp_path, workers=0) as stack,
    ):
        await stack.add(f"{url},kind=openai")
        for headers in ({}, wrong):
            assert await ask(stack, headers) == 200
    assert parents(heads) == [b"", b"traceparent: 00-zz-zz-01|tracestate: V"]


@pytest.mark.parametrize("form", ["text", "json"])
async def test_a_retry_has_its_own_span_and_a_log_line_with_the_same_ids(
    tmp_path: Path, form: str
) -> None:
    async with collecting() as collector, misbehaving(BROKEN) as (url, _):
        flags = [*collector.flags, "--policy", "round_robin", "--log-format", form]
        async with running(tmp_path, workers=1, router=flags) as stack:
            bad = await stack.add(f"{url},kind=openai")
            for _ in range(2):
                assert await ask(stack) == 200
            traces = await collector.traces(2)
    (spans,) = [spans for spans in traces.values() if len(spans_named(spans, "dispatch")) == 2]
    first, second = spans_named(spans, "dispatch")
    assert (first.about["warmroute.worker"], second.about["warmroute.worker"]) == (bad, 0)
    assert (first.about["error.type"], first.failed) == ("status_5xx", True)
    assert (second.about["http.request.resend_count"], second.failed) == (1, False)
    assert first.end_ns <= second.start_ns
    assert spans_named(spans, "decide")[1].about["warmroute.reason"] == "retry"
    root = root_of(spans)
    assert (root.about["warmroute.attempts"], root.about["warmroute.blame"]) == (2, "none")
    number, said = root.about["warmroute.request_id"], (tmp_path / "router.log").read_text()
    if form == "text":
        assert f" [request={number} trace={root.trace}]\n" in said
        return
    lines = [json.loads(line) for line in said.splitlines() if not line.startswith("ready ")]
    (told,) = [line for line in lines if "request" in line]
    assert (told["request"], told["trace"]) == (number, root.trace)
    assert (told["level"], told["logger"]) == ("warning", "router.request.settling")


async def test_a_stream_that_moves_has_a_span_at_each_worker(tmp_path: Path) -> None:
    async with collecting() as collector:
        flags = [*collector.flags, "--migration-moves", "2"]
        async with running(tmp_path, workers=2, router=flags, speed=1) as stack:
            body = {"model": MODEL, "prompt": [5] * 40, "max_tokens": 120, "stream": True}
            async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
                for _ in range(20):
                    await reply.content.readline()
                victim = int(reply.headers["x-warmroute-worker"])
                stack.workers[victim].process.kill()
                assert (await reply.read()).endswith(b"data: [DONE]\n\n")
            (spans,) = (await collector.traces(1)).values()
    first, second = spans_named(spans, "dispatch")
    assert (first.about["warmroute.worker"], first.about["warmroute.resumable"]) == (victim, True)
    assert (second.about["warmroute.worker"], second.failed) == (1 - victim, False)
    assert first.failed
    assert spans_named(spans, "decide")[1].about["warmroute.reason"] == "migration"
    assert root_of(spans).about["warmroute.migrations"] == 1


async def test_a_wait_has_a_span_even_if_its_client_gave_up(tmp_path: Path) -> None:
    async with collecting() as collector:
        flags = [*collector.flags, "--limits-worker-requests", "1"]
        async with running(tmp_path, workers=1, router=flags, speed=1) as stack:
            long = asyncio.create_task(ask(stack, max_tokens=80))

            async def running_now() -> bool:
                return await stack.metric("warmroute_inflight_requests") == 1

            await until(running_now, "one at the worker")
            waits = asyncio.create_task(ask(stack))
            leaves = asyncio.create_task(ask(stack))

            async def held() -> bool:
                return await stack.metric("warmroute_held_requests") == 2

            await until(held, "two to be held")
            leaves.cancel()
            assert (await long, await waits) == (200, 200)
            traces = await collector.traces(3)
    waited = {root_of(spans).about["warmroute.finish"]: spans for spans in traces.values()}
    (gone,) = spans_named(waited["client_left"], "queue")
    assert gone.about["warmroute.code"] == "given_up"
    assert not spans_named(waited["client_left"], "dispatch")
    assert root_of(waited["client_left"]).about["http.response.status_code"] == 499
    (spans,) = [
        s for s in traces.values() if spans_named(s, "queue") and spans_named(s, "dispatch")
    ]
    (queue,), (decision,), (sent,) = (
        spans_named(spans, n) for n in ("queue", "decide", "dispatch")
    )
    assert queue.end_ns - queue.start_ns > 1_000_000
    assert queue.end_ns <= decision.start_ns <= decision.end_ns <= sent.start_ns
    assert decision.about["warmroute.reason"] == "held"
    assert decision.about["warmroute.held_s"] > 0


async def test_a_client_that_disconnects_in_mid_stream_ends_the_trace(tmp_path: Path) -> None:
    async with collecting() as collector:
        flags = collector.flags
        async with running(tmp_path, workers=1, router=flags, speed=1) as stack:
            body = {"model": MODEL, "prompt": [5], "max_tokens": 5_000, "stream": True}
            reply = await stack.http.post(f"{stack.url}/v1/completions", json=body)
            await reply.content.readline()
            reply.close()
            (spans,) = (await collector.traces(1)).values()
    root = root_of(spans)
    assert (root.about["warmroute.finish"], root.about["warmroute.blame"]) == (
        *("client_left",),
        "client",
    )
    assert len(spans_named(spans, "dispatch")) == 1


@pytest.mark.parametrize(
    "trouble", ["down", "slow", 503, pytest.param(400, marks=pytest.mark.full)]
)
async def test_a_failing_collector_loses_traces_and_nothing_else(
    tmp_path: Path, trouble: Any
) -> None:
    async with collecting() as collector:
        collector.answer = trouble
        flags = collector.flags
        if trouble == "down":
            flags = ["--tracing-endpoint", "http://127.0.0.1:9", "--tracing-sample", "1"]
        async with running(tmp_path, router=flags) as stack:
            for _ in range(3):
                assert await ask(stack) == 200

            async def lost() -> bool:
                return await stack.metric('warmroute_traces_total{result="lost"}') >= 1

            await until(lost, "traces to be lost")
            collector.answer = 200
            if trouble != "down":
                assert await ask(stack) == 200
                await collector.traces(1)
            stack.router.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(stack.router.process.wait(), 20) == 0
    said = (tmp_path / "router.log").read_text()
    assert said.count("tracing: traces are lost") == 1
    assert ("/v1/traces: the connection is refused: does" in said) == (trouble == "down")
    assert "Traceback" not in said
    assert "opentelemetry" not in said


async def test_exported_traces_are_counted(tmp_path: Path) -> None:
    async with collecting() as collector:
        flags = collector.flags
        async with running(tmp_path, router=flags) as stack, aiohttp.ClientSession() as other:
            for http in (stack.http, other) * 4:
                body = {"model": MODEL, "prompt": [1], "max_tokens": 1}
                async with http.post(f"{stack.url}/v1/completions", json=body) as reply:
                    assert reply.status == 200
            await collector.traces(8)

            async def counted() -> bool:
                return await stack.metric('warmroute_traces_total{result="exported"}') == 8

            await until(counted, "eight traces to be counted")
