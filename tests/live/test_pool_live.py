"""Tests of a real router that follows InferencePools of an API server (`kubernetes_api.py`)."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest
import yaml

from router.picker.messages import PROCESS
from tests.live.light_engine import LightEngine
from tests.live.ports import lasting_port
from tests.live.stack import Stack, running, until
from tests.pauses import Ticks
from tests.router.discovery.kubernetes_api import (
    KubernetesApi,
    kubernetes_api,
    objective,
    pod,
    pool,
)
from tests.router.picker.picker_messages import message, read

pytestmark = pytest.mark.alone

CLIENTS = 4
LABELS = {"app": "vllm"}
GONE_WITHIN_S = 1.0


def kubeconfig(path: Path, url: str) -> Path:
    """Write a kubeconfig for the API server at `url`, as `kubectl` and the router read it outside a
    cluster.
    """
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "none"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@dataclass
class Cluster:
    """A cluster whose pods are engines at loopback addresses, all at one port. Lifetime: test."""

    api: KubernetesApi
    stack: Stack
    port: int
    engines: dict[str, LightEngine] = field(default_factory=dict)  # by the pod's name
    answers: Counter[int] = field(default_factory=Counter)  # of `asking`

    async def start(self, name: str, number: int, model: str = "tiny", app: str = "vllm") -> None:
        """Start an engine, then create its pod."""
        engine = LightEngine(model, port=self.port, host=f"127.0.0.{number}")
        await engine.start()
        self.engines[name] = engine
        await self.announce(name, app=app)

    async def announce(self, name: str, deleted: bool = False, app: str = "vllm") -> None:
        engine = self.engines[name]
        await self.api.put("pods", pod(name, engine.host, {"app": app}, deleted=deleted))

    async def urls(self) -> set[str]:
        """Return the URLs of workers that get requests."""
        rows = await self.stack.rows()
        return {row["url"] for row in rows if row["state"] == "ready" and not row["leaving"]}

    async def until_up(self, *names: str) -> float:
        """Wait until exactly these pods get requests; return the seconds that it took, without
        pauses of the machine.
        """
        began_s, wanted = time.monotonic(), {self.engines[name].url for name in names}

        async def reached() -> bool:
            return await self.urls() == wanted

        with Ticks() as ticks:
            await until(reached, f"{names} to be up")
        return time.monotonic() - began_s - ticks.paused_s

    async def until_rests(self, engine: LightEngine) -> None:
        """Wait until an engine that gets no new requests has answered all its requests."""

        async def rests() -> bool:
            rows = await self.stack.rows()
            return not any(row["inflight_requests"] for row in rows if row["url"] == engine.url)

        await until(rests, f"{engine.url} to have answered")

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Run clients that send one request after another during the block; each request must be
        answered.
        """
        over = asyncio.Event()

        async def ask(number: int) -> None:
            rng = random.Random(number)
            while not over.is_set():
                status, said = await self.stack.complete([rng.randrange(9) for _ in range(30)])
                self.answers[status] += 1
                assert status == 200, said

        clients = [asyncio.create_task(ask(number)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*clients)


@asynccontextmanager
async def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *sources: str, router: Sequence[str] = ()
) -> AsyncIterator[Cluster]:
    async with kubernetes_api() as api:
        port = lasting_port()
        await api.put("inferencepools", pool("chat", LABELS, port))
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", api.url)))
        flags = ["--slow-start-s", "0.1", "--waiting-wait-s", "0", *router]
        for source in sources or ("inferencepool:llm/chat",):
            flags += ["--discover", f"{source},kind=openai,events=none"]
        async with running(tmp_path, workers=0, router=flags) as stack:
            one = Cluster(api, stack, port)
            try:
                yield one
            finally:
                for engine in one.engines.values():
                    await engine.stop()


async def test_a_removed_pod_gets_no_request_after_one_second(tmp_path, monkeypatch) -> None:
    async with cluster(tmp_path, monkeypatch) as one:
        names = ["a", "b", "c", "d"]
        for number, name in enumerate(names, 1):
            await one.start(name, number)
        await one.until_up(*names)
        took: list[float] = []
        async with one.asking():
            for at, name in enumerate(names[:3]):
                if at < 2:  # `kubectl delete` gives the pod its grace period
                    await one.announce(name, deleted=True)
                else:  # with `--force` the pod is gone at once
                    await one.api.delete("pods", name)
                took.append(await one.until_up(*names[at + 1 :]))
                assert took[-1] < GONE_WITHIN_S
                await one.until_rests(one.engines[name])
                one.engines[name].closed = True
                asked = sum(engine.asked.total() for engine in one.engines.values())

                async def go_on(asked: int = asked) -> bool:
                    return sum(e.asked.total() for e in one.engines.values()) > asked + 100

                await until(go_on, "a hundred requests more")
        print(f"gone after {', '.join(f'{s:.3f}' for s in took)} s, {dict(one.answers)} answers")
        assert [engine.wrong for engine in one.engines.values()] == [0, 0, 0, 0]
        assert set(one.answers) == {200}
        await one.api.delete("pods", "d")  # the last pod: no outage, but what the operator wanted
        assert await one.until_up() < GONE_WITHIN_S
        assert (await one.stack.complete([1]))[0] == 503
        await one.stack.assert_idle()


@pytest.mark.parametrize("how", ["gone", "hangs", pytest.param("refuses", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "seconds", [3, pytest.param(60, marks=[pytest.mark.full, pytest.mark.timeout(300)])]
)
async def test_an_unreachable_api_server_costs_no_request(
    tmp_path, monkeypatch, how, seconds
) -> None:
    async with cluster(tmp_path, monkeypatch) as one:
        for number, name in enumerate(["a", "b", "c"], 1):
            await one.start(name, number)
        await one.until_up("a", "b", "c")
        async with one.asking():
            if how == "gone":
                await one.api.stop()
            else:
                one.api.illness = how
                await one.api.send_to_watches("break")
            await asyncio.sleep(seconds / 2)  # the outage itself
            await one.engines["b"].stop()  # probes notice engines that die meanwhile
            await one.until_up("a", "c")
            await asyncio.sleep(seconds / 2)
            answered = one.answers[200]
            assert await one.urls() == {one.engines["a"].url, one.engines["c"].url}
            await one.announce("c", deleted=True)  # the watch reports this once the server is back
            await one.start("d", 4)
            one.api.illness = ""
            if how == "gone":
                await one.api.start()
            took_s = await one.until_up("a", "d")
        print(f"{seconds} s {how}: {answered} answers meanwhile; in line {took_s:.2f} s after it")
        assert set(one.answers) == {200}
        assert answered > 100

        async def well() -> bool:
            return await one.stack.metric("warmroute_discovery_up") == 1

        await until(well, "the source to be well")
        assert one.api.lists("pods") == 1, "the watch was taken up where it was"


async def test_several_inference_pools_form_one_fleet_of_several_models(
    tmp_path, monkeypatch
) -> None:
    sources = ("inferencepool:llm/chat", "inferencepool:llm/embed")
    async with cluster(tmp_path, monkeypatch, *sources) as one:
        await one.start("a", 1, "tiny")
        await one.start("b", 2, "tiny")
        await one.start("e", 3, "embedder", app="embed")
        await one.until_up("a", "b")
        status, said = await one.stack.complete([1], model="embedder")
        assert (status, said["error"]["code"]) == (404, "model_not_found")
        await one.api.put("inferencepools", pool("embed", {"app": "embed"}, one.port))
        await one.until_up("a", "b", "e")
        for _ in range(5):
            assert (await one.stack.complete([1], model="embedder"))[0] == 200
            assert (await one.stack.complete([1]))[0] == 200
        assert one.engines["e"].asked == {"embedder": 5}
        async with one.stack.http.get(f"{one.stack.admin}/workers") as reply:
            told = await reply.json()
        assert [(s["workers"], s["trouble"]) for s in told["sources"]] == [(2, None), (1, None)]
        await one.api.delete("inferencepools", "chat")
        assert await one.until_up("e") < GONE_WITHIN_S
        assert (await one.stack.complete([1], model="embedder"))[0] == 200


async def test_a_picker_is_ready_while_its_pool_has_workers(tmp_path, monkeypatch) -> None:
    """The picker is ready while its pool has workers, whether or not the API server is reachable;
    probes and gateways check this by gRPC health.
    """
    flags = ("--picker-port", "0", "--picker-health-port", "0")
    async with cluster(tmp_path, monkeypatch, router=flags) as one:
        address = one.stack.router.facts["health"]
        async with grpc.aio.insecure_channel(address) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")

            async def is_ready(wanted: bool) -> None:
                async def reached() -> bool:
                    answer = await check(b"\x0a\x09readiness", timeout=5)
                    return bool(answer == (b"\x08\x01" if wanted else b"\x08\x02"))

                await until(reached, f"readiness to be {wanted}")

            await is_ready(False)
            await one.start("a", 1)
            await is_ready(True)
            await one.api.stop()
            await one.start("b", 2)
            await is_ready(True)
            await one.api.start()
            await one.until_up("a", "b")
            await one.api.delete("inferencepools", "chat")
            await is_ready(False)
            assert await check(b"\x0a\x08liveness", timeout=5) == b"\x08\x01"


async def test_a_request_gets_the_priority_of_the_objective_that_it_names(
    tmp_path, monkeypatch
) -> None:
    """A request gets the priority of the InferenceObjective that it names: a key that allows only
    priority 0 refuses it.
    """
    (tmp_path / "keys").write_text("secret grey priority=0..0\n", encoding="utf-8")
    flags = ("--picker-port", "0", "--picker-objectives", "fixed=7")
    flags += ("--api-keys-file", str(tmp_path / "keys"))
    async with cluster(tmp_path, monkeypatch, router=flags) as one:
        await one.api.put("inferenceobjectives", objective("fixed", "chat", 9))
        await one.start("a", 1)
        await one.until_up("a")

        async def answer(named: str) -> str:
            """Return the picker's answer to a request that names this objective."""
            headers = {":path": "/v1/completions", ":method": "POST", ":authority": "llm"}
            headers |= {"content-type": "application/json", "authorization": "Bearer secret"}
            headers["x-gateway-inference-objective"] = named
            body = b'{"model": "tiny", "prompt": [1], "max_tokens": 2}'
            place = one.stack.router.facts["picker"]
            async with grpc.aio.insecure_channel(place) as channel:
                call = channel.stream_stream(PROCESS)()
                await call.write(message("request_headers", pairs=tuple(headers.items())))
                await call.write(message("request_body", body=body, end_of_stream=True))
                (said,) = read([await call.read()])
                call.cancel()
            return str(said)

        async def gets(named: str, priority: int) -> None:
            placed = one.engines["a"].url.removeprefix("http://")
            refused = f"may ask for priorities 0..0, not {priority}"

            async def reached() -> bool:
                return (refused if priority else placed) in await answer(named)

            await until(reached, f"{named} to be {priority}")

        await gets("urgent", 0)  # nobody knows it
        await one.api.put("inferenceobjectives", objective("urgent", "chat", 12))
        await gets("urgent", -12)
        await gets("fixed", 7)
        await one.api.delete("inferenceobjectives", "urgent")
        await gets("urgent", 0)
