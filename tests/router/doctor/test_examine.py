"""Tests of the whole examination over HTTP: which requests the doctor sends, faulty servers, the
probe, the command.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router.cli.main import main
from router.doctor.examine import Options, examine
from router.doctor.probe import ProbeLimits, check_allowed
from router.doctor.report import DoctorError
from router.http.tls import server_tls
from tests.certs import Authority
from tests.engine.harness import eventually, running
from tests.router.doctor.pools import config
from tests.router.engines.engine_pages import CUT, HANGS, Pages, engine
from tests.served_app import served_by

OPTIONS = Options(seconds=0.4, timeout_s=1.0)
SLEEP_S = 0.01


class SmallTriton:
    """An HTTP server like Triton with one model that takes 10 ms a request, one at a time.
    Lifetime: test.
    """

    def __init__(self, **fields: Any) -> None:
        self.config: dict[str, Any] | None = config(**fields)
        self.asked: list[str] = []
        self.others: list[str] = []  # that are ready, and have no configuration
        self.running = self.most = self.done = 0
        self.queue_ns = self.compute_ns = 0
        self._free = asyncio.Lock()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a request for any path as the small Triton does."""
        self.asked.append(request.path)
        if request.path.endswith("/infer"):
            return await self._infer(await request.json())
        count = {"count": self.done, "ns": self.queue_ns}
        compute = {"count": self.done, "ns": self.compute_ns}
        total = {"count": self.done, "ns": self.queue_ns + self.compute_ns}
        zero = {"count": self.done, "ns": 0}
        phases = {"compute_input": zero, "compute_infer": compute, "compute_output": zero}
        stats = {
            "name": "m",
            "version": "1",
            "inference_count": self.done,
            "execution_count": self.done,
            "inference_stats": {"success": total, "queue": count, **phases},
            "batch_stats": [{"batch_size": 1, **phases}] if self.done else [],
        }
        pages = {
            "/v2": {"name": "triton", "version": "2.51.0", "extensions": []},
            "/v2/repository/index": [
                {"name": name, "version": "1", "state": "READY"} for name in ("m", *self.others)
            ],
            "/v2/models/m/config": self.config,
            "/v2/models/stats": {"model_stats": [stats]},
        }
        if request.path == "/metrics":
            return web.Response(text='nv_inference_count{model="m",version="1"} 1\n')
        page = pages.get(request.path)
        return web.Response(status=404) if page is None else web.json_response(page)

    async def _infer(self, body: dict[str, Any]) -> web.Response:
        loop = asyncio.get_running_loop()
        assert [one["shape"] for one in body["inputs"]] == [[1, 4]]
        begun_s = loop.time()
        self.running += 1
        self.most = max(self.most, self.running)
        async with self._free:
            at_s = loop.time()
            await asyncio.sleep(SLEEP_S)
            self.queue_ns += int((at_s - begun_s) * 1e9)
            self.compute_ns += int((loop.time() - at_s) * 1e9)
            self.done += 1
        self.running -= 1
        return web.json_response({"outputs": []})


@asynccontextmanager
async def small_triton(**fields: Any) -> AsyncIterator[tuple[str, SmallTriton]]:
    """Yield the URL of a Triton-like server, and the server."""
    model = SmallTriton(**fields)
    async with served_by(model.answer) as url:
        yield url, model


async def test_a_probe_finds_the_cause_and_stays_within_its_limits() -> None:
    limits = ProbeLimits(requests=60, concurrency=4, seconds=20.0)
    async with small_triton(dynamic_batching=None) as (url, model):
        report = await examine([url], Options(seconds=0.4, probe=limits))
    assert (report.findings[0].number, report.status) == (1, 1)
    assert model.done <= 60
    assert model.most == 4
    measured = report.measured
    assert measured is not None
    assert (measured["model"], measured["max_batch_size"], measured["instances"]) == ("m", 8, 1)
    (one,) = measured["sizes"]
    assert one["batch"] == 1
    assert one["count"] == 6 + 12 + 10  # half of them, without the two that warm it up
    assert one["seconds"] >= SLEEP_S


async def test_an_idle_server_gets_no_inference_request_and_has_no_finding() -> None:
    async with small_triton(dynamic_batching=None) as (url, model):
        report = await examine([url], OPTIONS)
    assert (report.findings, report.status, report.evidence.loaded) == ((), 0, False)
    assert "The servers had no load" in report.text()
    assert not any(path.endswith("infer") for path in model.asked)


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ({}, "is neither Triton nor vLLM"),
        ({"/metrics": "up 1\n"}, "is neither Triton nor vLLM"),
        ({"/v1/chat/completions/render": 405}, "it is a renderer, not a worker"),
        ({"/v2": "garbage"}, "/v2: JSON is malformed"),
        ({"/v2": {"name": "triton"}}, "without a ready model"),
        ({"/v2": {"name": "warmroute", "extensions": []}}, "is it the router?"),
        ({"/v2": HANGS}, "does not answer in time"),
        ({"/v2": CUT}, "is it an HTTP server?"),
        ({"/metrics": "vllm:num_requests_running NaN\n"}, "line 1: nan is not a load"),
        ({"/metrics": "vllm:num_requests_running -3\n"}, "is not a load"),
        ({"/metrics": 'vllm:num_requests_running{a="b" 3\n'}, "labels are not closed"),
    ],
)
async def test_the_error_for_an_unreadable_page_says_what_to_do(pages: Pages, says: str) -> None:
    async with engine(pages) as url:
        with pytest.raises(DoctorError) as raised:
            await examine([url], OPTIONS)
    assert says in str(raised.value)
    assert url in str(raised.value) or "metrics line" in str(raised.value)


async def test_a_model_without_a_readable_configuration_is_reported() -> None:
    async with small_triton() as (url, model):
        model.others.append("b/c")
        report = await examine([url], OPTIONS)
        told = f"model b/c, which is ready: GET {url}/v2/models/b%2Fc/config answered 404"
        assert told in report.unread
        assert f"not looked at: {told}" in report.text()
        model.config = None
        with pytest.raises(DoctorError, match="tells no model's configuration: model m, which is"):
            await examine([url], OPTIONS)


async def test_the_error_suggests_the_other_url_scheme(tmp_path: Path) -> None:
    async with small_triton() as (url, _):
        with pytest.raises(DoctorError, match=r"the TLS handshake fails .*http://"):
            await examine([url.replace("http:", "https:")], OPTIONS)
    authority = Authority(tmp_path)
    context = server_tls(authority.port(authority.signed("server")))
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context) as tls:
        address = "http://{}:{}".format(*tls.sockets[0].getsockname())
        with pytest.raises(DoctorError, match=r"is it an HTTP server\? https://"):
            await examine([address], OPTIONS)


async def test_an_endless_answer_is_cut_at_its_limit() -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse(headers={"Content-Length": str(10 << 30)})
        await answer.prepare(request)
        while True:
            await answer.write(bytes(1 << 16))
            sent += 1 << 16

    async with served_by(endless) as url:
        with pytest.raises(DoctorError, match="more than 4194304 bytes"):
            await examine([url], OPTIONS)
    assert sent < 64 << 20


def test_load_goes_to_loopback_unless_another_host_is_allowed() -> None:
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"):
        check_allowed(url, ())
    check_allowed("http://gpu1:8000", ("gpu1",))
    for url in (
        "http://gpu1:8000",
        "http://localhost.evil.test",
        "http://10.0.0.1",
        "http://0.0.0.0",
    ):
        with pytest.raises(DoctorError, match="--allow-host"):
            check_allowed(url, ("gpu2",))


async def test_the_warmroute_engine_reports_why_it_does_not_batch() -> None:
    """Our own engine reports why it does not batch; the worker is real, and its KV cache has room
    for one of eight requests.
    """
    async with running(kv_tokens=1600, speed=4.0) as worker:
        scheduler = worker.worker.runner.scheduler

        async def ask(first: int) -> None:
            prompt = [first, *range(20, 1019)]
            body = {"model": worker.worker.model, "prompt": prompt, "ignore_eos": True}
            await worker.post("/v1/completions", body | {"max_tokens": 400})

        async with asyncio.TaskGroup() as group:
            asks = [group.create_task(ask(first)) for first in range(8)]
            await eventually(lambda: scheduler.waiting == 7, "seven wait")
            told = Options(seconds=0.6, input_tokens=1000, max_tokens=400)
            report = await examine([worker.url], told)
            for one in asks:
                one.cancel()
    first = report.findings[0]
    assert first.number == 13, report.text()
    assert "the KV cache holds 1,600 tokens and a request needs 1,400" in first.found.evidence
    assert first.found.changes[0].name == "--kv-tokens"


def run(*arguments: str) -> int:
    return main(["doctor", *arguments])


def test_the_command_prints_errors_without_a_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments, says in (
        (("http://127.0.0.1:1",), "cannot connect"),
        (("nonsense",), "is no URL"),
        (("http://gpu1:8000", "--probe"), "--allow-host gpu1"),
        (("http://127.0.0.1:1", "--seconds", "nan"), "--seconds nan"),
        (("http://127.0.0.1:1", "--measure", "x.json"), "--measure needs --probe"),
        (("http://127.0.0.1:1,role=x",), "only ,metrics=URL"),
        ((), "0 servers"),
    ):
        assert run(*arguments) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.startswith("error: ")
        assert "Traceback" not in said


def test_the_command_lists_its_causes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--causes") == 0
    assert [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()] == [
        *range(1, 40)
    ]


async def test_the_command_prints_json_and_writes_its_measurements(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    times = tmp_path / "times.json"
    flags = ("--seconds", "0.3", "--json", "--probe", "--probe-requests", "30", "--measure")
    async with small_triton(dynamic_batching=None) as (url, _):
        status = await asyncio.to_thread(run, url, *flags, str(times), "--quiet")
    shown = json.loads(capsys.readouterr().out)
    assert (status, shown["status"], shown["loaded"]) == (1, 1, True)
    assert shown["findings"][0]["cause"] == 1
    assert shown["findings"][0]["changes"][0]["to"] == "dynamic_batching { }"
    assert json.loads(times.read_text())["sizes"] == shown["measured"]["sizes"]


async def test_shapes_and_input_sets_of_a_request_file_are_counted(tmp_path: Path) -> None:
    lines = [
        {"inputs": [{"name": "A", "shape": [1, n]}, *([{"name": "B", "shape": [1]}] * (n > 2))]}
        for n in range(1, 5)
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    async with small_triton() as (url, _):
        report = await examine([url], Options(seconds=0.3, requests=file))
        assert (report.evidence.facts.shapes, report.evidence.facts.input_sets) == (2, 2)
        file.write_text("{}")
        with pytest.raises(DoctorError, match="line 1"):
            await examine([url], Options(seconds=0.3, requests=file))
