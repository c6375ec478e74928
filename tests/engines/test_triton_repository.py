"""Tests of our engine inside a real Triton with the sample repository, from the client to the
engine's batch.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from engine.timed import continuation
from simulator.live.processes import Programs
from tests.engine.harness import VOCAB, Running, running
from tests.engines.environment import NEWEST_TRITON, Environment
from tests.engines.triton_server import TritonServer
from tests.live.stack import Stack, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "docs" / "deploy" / "triton"
MODEL = "tensorrt_llm"
PAGE = ROOT / "docs" / "triton.md"
BASE = f"/v2/models/{MODEL}"
PLACES = 4
LONG = 4000  # tokens: longer than any test waits


@dataclass(slots=True)
class EngineTriton(TritonServer):
    """A `tritonserver` with the sample repository. Lifetime: fixture."""

    engine_url: str = ""
    places: int = PLACES

    def repository(self) -> Path:
        """Copy the sample repository, with another limit of requests in flight and more frequent
        checks for cancelled requests so that races can show; return its folder.
        """
        models = self.folder / "models"
        if not models.exists():
            shutil.copytree(REPOSITORY, models)
            path = models / MODEL / "config.pbtxt"
            text = path.read_text()
            changes = {"max_inflight_requests": self.places, "cancellation_check_period_ms": 5}
            for name, value in changes.items():
                pattern = rf'({name}" value: \{{ string_value: )"\d+"'
                text, count = re.subn(pattern, rf'\1"{value}"', text)
                assert count == 1, name
            path.write_text(text)
        return models

    def variables(self) -> dict[str, str]:
        """Return the server's environment variables with the engine's URL."""
        return {**TritonServer.variables(self), "WARMROUTE_ENGINE_URL": self.engine_url}


@dataclass(frozen=True, slots=True)
class Pair:
    """Triton and the engine behind it. Lifetime: module."""

    triton: EngineTriton
    engine: Running
    http: aiohttp.ClientSession

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return await self.triton.post(f"{BASE}/{path}", body)

    async def events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        url = f"{self.triton.url}{BASE}/generate_stream"
        async with self.http.post(url, json=body) as reply:
            assert reply.status == 200, await reply.text()
            *events, end = (await reply.text()).split("\n\n")
        assert end == ""
        return [json.loads(one.removeprefix("data: ")) for one in events]

    async def gauge(self, name: str, kind: str) -> float:
        async with self.http.get(self.triton.metrics_url) as reply:
            families = text_string_to_metric_families(await reply.text())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and kind in sample.labels.values()
        )

    @property
    def running(self) -> int:
        return self.engine.worker.unfinished


@asynccontextmanager
async def paired(folder: Path, places: int = PLACES, **settings: Any) -> AsyncIterator[Pair]:
    """Yield a simulated engine behind a Triton that sends it at most `places` requests at
    a time.
    """
    environment = Environment("triton", NEWEST_TRITON).or_skip()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running(**settings))
        triton = EngineTriton(environment, REPOSITORY, folder)
        triton.engine_url, triton.places = engine.url, places
        stack.push_async_callback(triton.stop)
        await triton.start()
        await triton.until_healthy()
        # Triton ends when its last connection has ended.
        closing = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        yield Pair(triton, engine, await stack.enter_async_context(closing))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Yield an engine with enough cache for all requests, behind a Triton that sends four at a
    time.
    """
    async with paired(tmp_path_factory.mktemp("triton"), speed=5.0, kv_tokens=65_536) as found:
        yield found


def answer(prompt: list[int], count: int) -> str:
    """Return the engine's expected answer to a prompt as text."""
    return "".join(f" t{token}" for token in continuation(prompt, count, VOCAB))


async def test_generate_gives_the_engines_answer(pair: Pair) -> None:
    body = {"text_input": "t1 t2 t3", "max_tokens": 5}
    status, told = await pair.post("generate", body)
    assert status == 200, told
    assert told["text_output"] == answer([1, 2, 3], 5)
    assert told["output_ids"] == list(continuation([1, 2, 3], 5, VOCAB))
    assert told["sequence_length"] == 5
    # Token ids instead of text, and TensorRT-LLM's own name for the limit.
    status, told = await pair.post("generate", {"input_ids": [1, 2, 3], "request_output_len": 5})
    assert (status, told["text_output"]) == (200, answer([1, 2, 3], 5))


async def test_a_stream_delivers_tokens_as_they_are_generated(pair: Pair) -> None:
    body = {"text_input": "t4 t5", "max_tokens": 40, "stream": True}
    events = await pair.events(body)
    assert "".join(event["text_output"] for event in events) == answer([4, 5], 40)
    assert len(events) >= 20  # two tokens may come in one piece
    assert sum(event["sequence_length"] for event in events) == 40


async def test_the_ensemble_answers_as_tensorrt_llms_ensemble(pair: Pair) -> None:
    """The sample repository's ensemble answers as TensorRT-LLM's does: the text passes the
    tokenizer's step, and streams and refusals reach the client.
    """
    ask = "/v2/models/ensemble/generate"
    body = {"text_input": "t1 t2 t3", "max_tokens": 5, "temperature": 0.0}
    status, told = await pair.triton.post(ask, body)
    assert (status, told.get("text_output")) == (200, answer([1, 2, 3], 5)), told
    async with pair.http.post(
        f"{pair.triton.url}{ask}_stream", json={**body, "stream": True, "max_tokens": 30}
    ) as reply:
        events = re.findall("^data: (.*)$", await reply.text(), re.MULTILINE)
    parts = [json.loads(one).get("text_output", "") for one in events]
    assert "".join(parts) == answer([1, 2, 3], 30)
    assert len([part for part in parts if part]) >= 15
    status, told = await pair.triton.post(ask, {**body, "max_tokens": 10**8})
    assert (status, "tokens of context" in told["error"]) == (400, True)
    for step in ("preprocessing", MODEL):
        async with pair.http.get(f"{pair.triton.url}/v2/models/{step}/stats") as reply:
            (found,) = (await reply.json())["model_stats"]
        assert found["inference_stats"]["success"]["count"] >= 2


async def test_the_engine_batches_many_streams(pair: Pair) -> None:
    """Many streams run together up to Triton's limit, and the engine batches them in its steps."""

    async def one(number: int) -> None:
        body = {"text_input": f"t{number + 1} t9", "max_tokens": 150, "stream": True}
        events = await pair.events(body)
        assert "".join(event["text_output"] for event in events) == answer([number + 1, 9], 150)

    seen = asyncio.ensure_future(watched(pair))
    try:
        await asyncio.gather(*(one(number) for number in range(12)))
        assert not seen.done()
    finally:
        seen.cancel()
    (told,) = json.loads(await pair.engine.get("/v2/models/stats"))["model_stats"]
    sizes = {row["batch_size"] for row in told["batch_stats"]}
    assert max(sizes) == PLACES  # as many as there are places, and never more


async def watched(pair: Pair) -> None:
    """Fail as soon as more requests run than the limit allows; otherwise run until cancelled."""
    while True:
        assert pair.running <= PLACES
        await asyncio.sleep(0.005)


async def test_requests_beyond_the_limit_wait_in_tritons_queue(pair: Pair) -> None:
    url = f"{pair.triton.url}{BASE}/generate_stream"
    body = {"text_input": "t7", "max_tokens": LONG, "stream": True}
    async with AsyncExitStack() as stack:
        for _ in range(PLACES):
            reply = await stack.enter_async_context(pair.http.post(url, json=body))
            await reply.content.readany()
        assert pair.running == PLACES
        late = asyncio.ensure_future(pair.events({**body, "max_tokens": 3}))
        assert await pair.gauge("nv_trt_llm_request_metrics", "active") <= PLACES

        async def shown() -> bool:
            return await pair.gauge("nv_trt_llm_request_metrics", "scheduled") == PLACES

        await until(shown, "Triton's gauges to show the engine's batch")
        assert await pair.gauge("nv_trt_llm_kv_cache_block_metrics", "tokens_per") == 16
        assert not late.done()
        assert pair.running == PLACES
    # The four clients have left, so their places are free and the waiting one is served.
    assert "".join(event["text_output"] for event in await late) == answer([7], 3)

    async def nobody() -> bool:
        return pair.running == 0

    await until(nobody, "the engine to have ended what nobody reads")


async def test_a_disconnect_ends_the_request_in_the_engine(pair: Pair) -> None:
    """A client that leaves a stream ends its request in the engine; Triton 2.51 does not notice
    clients that leave before an unstreamed answer.
    """
    url = f"{pair.triton.url}{BASE}/generate_stream"
    aborted = pair.engine.worker.counters.finished["abort"]
    for left in range(1, 4):
        body = {"text_input": f"t8 t{left}", "max_tokens": LONG, "stream": True}
        async with pair.http.post(url, json=body) as reply:
            await reply.content.readany()
            assert pair.running == 1

        async def ended() -> bool:
            return pair.running == 0

        await until(ended, "it to end in the engine")
        assert pair.engine.worker.counters.finished["abort"] == aborted + left


async def test_perf_metrics_report_reused_blocks(pair: Pair) -> None:
    prompt = [*range(1000, 1048)]
    body = {"input_ids": prompt, "max_tokens": 2, "return_perf_metrics": True}
    _, first = await pair.post("generate", body)
    _, again = await pair.post("generate", body)
    assert first["kv_cache_reused_blocks"] == 0
    assert again["kv_cache_reused_blocks"] == 2  # the last token is computed, so its block is, too
    assert (again["num_input_tokens"], again["num_output_tokens"]) == (48, 2)


async def test_the_ensemble_returns_perf_metrics_on_request(pair: Pair) -> None:
    words = " ".join(f"t{n}" for n in range(2000, 2048))
    ask, body = "/v2/models/ensemble/generate", {"text_input": words, "max_tokens": 2}
    reused = []
    for _ in range(2):
        url = f"{pair.triton.url}{ask}"
        async with pair.http.post(url, json=body | {"return_perf_metrics": True}) as reply:
            told = await reply.json()
            reused.append(told["kv_cache_reused_blocks"])
            assert (told["num_input_tokens"], told["num_output_tokens"]) == (48, 2)
    assert reused == [0, 2]
    async with pair.http.post(f"{pair.triton.url}{ask}", json=body) as reply:
        assert "num_input_tokens" not in await reply.json()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_tokens": 3}, "give either text_input or input_ids"),
        ({"text_input": "t1", "input_ids": [1]}, "give either text_input or input_ids"),
        ({"input_ids": [10**6], "max_tokens": 3}, "token ids must be below"),
        ({"text_input": "t1", "max_tokens": 10**8}, "tokens of context"),
    ],
)
async def test_requests_that_the_engine_refuses_get_tritons_error(
    pair: Pair, body: dict[str, Any], told: str
) -> None:
    status, answered = await pair.post("generate", body)
    assert status == 400
    assert told in answered["error"]
    assert pair.running == 0


async def test_an_engine_that_shuts_down_is_reported_as_unavailable(pair: Pair) -> None:
    pair.engine.worker.draining = True
    try:
        status, answered = await pair.post("generate", {"text_input": "t1", "max_tokens": 3})
    finally:
        pair.engine.worker.draining = False
    # `generate` answers 400 for any cause; only the text tells it from a client's fault.
    assert (status, answered["error"]) == (400, "this worker is shutting down")


async def test_the_documented_commands_reach_the_engine(pair: Pair) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed (Debian package: curl)")
    page = PAGE.read_text().split("## Our engine inside Triton")[1]
    block = page.split("```sh\n")[1].partition("```")[0]
    ports = {"8000": pair.triton.port, "8001": pair.triton.events[0], "8002": pair.triton.events[1]}
    ports["8101"] = int(pair.engine.url.rpartition(":")[2])
    said = []
    for line in block.splitlines():
        here = re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda found: str(ports[found[0]]), line)
        process = await asyncio.create_subprocess_shell(here, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert process.returncode == 0, line
        said.append(out.decode())
    whole, streamed, gauges, explained = said
    assert json.loads(whole)["text_output"] == answer([1, 2, 3], 4)
    assert streamed.count("data: ") >= 2
    for kind in ("active", "scheduled", "max", "waiting"):
        assert f'request_type="{kind}"' in gauges
    assert json.loads(explained)["active"] == 0


async def test_answers_through_router_triton_and_engine_are_right(
    pair: Pair, tmp_path: Path
) -> None:
    """Answers through router, Triton and engine are right, and no request is left at any
    of them.
    """
    spec = f"{pair.triton.url},metrics={pair.triton.metrics_url}"
    async with Programs(tmp_path) as programs:
        arguments = ["serve", "--port", "0", "--admin-port", "0", "--worker", spec]
        program = await programs.start("router", "router", arguments)
        router = Stack(programs, program, [], pair.http)
        await router.until_state(0, "ready")

        async def one(model: str, number: int) -> None:
            body = {"text_input": f"t{number} t7", "max_tokens": 30, "stream": True}
            url = f"{router.url}/v2/models/{model}/generate_stream"
            async with pair.http.post(url, json=body) as reply:
                assert reply.status == 200, await reply.text()
                events = re.findall("^data: (.*)$", await reply.text(), re.MULTILINE)
            texts = [json.loads(event).get("text_output", "") for event in events]
            assert "".join(texts) == answer([number, 7], 30)

        async def of_the_ensemble() -> None:
            # Triton 2.51 stalls one stream in a thousand if an ensemble has several of them.
            for number in range(1, 7):
                await one("ensemble", number)

        await asyncio.gather(of_the_ensemble(), *(one(MODEL, number) for number in range(1, 7)))
        await router.assert_idle()
    assert pair.running == 0


@pytest.mark.full
async def test_gauges_show_eight_active_and_one_scheduled_through_triton(tmp_path: Path) -> None:
    """With a cache for one request, TensorRT-LLM's gauges show eight active requests and one
    scheduled one, the engine gives the reasons, and the doctor names the cause at either server.
    """
    names = ("active", "scheduled", "waiting")
    async with paired(tmp_path, places=8, speed=0.3, kv_tokens=64) as pair:

        async def client(number: int) -> None:
            body = {"input_ids": [number, *range(100, 139)], "max_tokens": 20}
            while (await pair.post("generate", body))[0] == 200:
                pass

        async def shown() -> bool:
            found = [await pair.gauge("nv_trt_llm_request_metrics", name) for name in names]
            return found == [8.0, 1.0, 7.0]

        clients = [asyncio.ensure_future(client(number)) for number in range(1, 9)]
        await until(shown, "the gauges to say 8 active, 1 scheduled")
        explained = json.loads(await pair.engine.get("/explain"))
        assert set(explained["waiting_for"]) <= {"kv_blocks", "priority"}
        triton = f"{pair.triton.url},metrics={pair.triton.metrics_url}"
        for said in await asyncio.gather(*(examined(url) for url in (triton, pair.engine.url))):
            assert said["findings"][0]["cause"] == 13
        pair.engine.worker.cut_all()
        pair.engine.worker.draining = True
        await asyncio.gather(*clients)


async def examined(url: str) -> Any:
    """Return the JSON report of `warmroute doctor` on a server."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "doctor", url, "--seconds", "4", "--quiet", "--json"),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 1, out
    return json.loads(out)
