"""Tests with real Tritons: answers correct the router's estimate of a cache, models are loaded and
unloaded at all servers, and sequences stay at one server.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from simulator.live.processes import Programs
from tests.engines.environment import NEWEST_TRITON, Environment
from tests.engines.triton_models import MODELS, NUMBER, SOURCE, WHOLE, Models, config_of
from tests.engines.triton_server import KEPT, TENSOR_CONFIGS, TENSORS, TritonServer
from tests.live.stack import Stack, until
from tests.told_decision import decision_in

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK, BLOCKS = 32, 100  # tokens; of the cache
PROMPT = 20 * BLOCK + 5  # words, or ids
ANSWER = 4
SERVERS = 2
ALL, SOME = "sk-all-aaaaaaaa", "sk-some-bbbbbbbb"  # models that keys are for
IDLE_S = 2.0  # after which Triton ends a sequence
SLOTS = 2  # sequences at once
TOLD = dict.fromkeys(("kv_cache_reused_blocks", "num_input_tokens", "num_output_tokens"), NUMBER)
REPORTING: Models = {
    name: (inputs, outputs | TOLD if name in ("ensemble", "tensorrt_llm") else outputs)
    for name, (inputs, outputs) in MODELS.items()
}
REPORTING = {**REPORTING, WHOLE: REPORTING["tensorrt_llm"]}


class ReportingTriton(TritonServer):
    """A Triton whose models report in each answer how many prompt tokens were cached. Lifetime:
    fixture.
    """

    def repository(self) -> Path:
        """Create a repository with reporting models and a sequence model; return its folder."""
        models = self.folder / "models"
        for name in REPORTING:
            version = models / name / "1"
            version.mkdir(parents=True, exist_ok=True)
            (models / name / "config.pbtxt").write_text(config_of(name, REPORTING, BLOCKS))
            if name != "ensemble":
                shutil.copy(SOURCE, version / "model.py")
        kept = models / KEPT / "1"
        kept.mkdir(parents=True, exist_ok=True)
        config = TENSOR_CONFIGS[KEPT].replace(": 60000000", f": {IDLE_S * 1e6:.0f}")
        config = config.replace("sequences: 64", f"sequences: {SLOTS}")
        (models / KEPT / "config.pbtxt").write_text(config)
        shutil.copy(TENSORS, kept / "model.py")
        return models


@dataclass(slots=True)
class Routed:
    """Two servers, a router of the first one that reads texts, and a router of both that may load
    models.

    Lifetime: module.
    """

    servers: list[ReportingTriton]
    stack: Stack
    both: Stack
    access_log: Path  # of the former

    @property
    def server(self) -> ReportingTriton:
        """The first of the two servers."""
        return self.servers[0]

    async def ask(self, form: str, prompt: list[int]) -> tuple[int, int]:
        """Send a prompt; return (cached tokens that the router expected, cached tokens that the
        worker reported).
        """
        path, body, headers = FORMS[form](prompt)
        headers = {**headers, "x-warmroute-explain": "1"}
        url = f"{self.stack.url}/v2/models/{path}"
        async with self.stack.http.post(url, data=body, headers=headers) as reply:
            answer = await reply.read()
            assert reply.status == 200, answer
            why = decision_in(reply.headers["x-warmroute-explain"])
            number = reply.headers["x-request-id"]
        told = cached_tokens_in(answer)

        async def logged() -> bool:
            return number in self.access_log.read_text()

        await until(logged, "its line")
        lines = map(json.loads, self.access_log.read_text().splitlines())
        line = next(one for one in lines if one["id"] == number)
        assert (line["cached_tokens"], line["output_tokens"]) == (told, ANSWER)
        return why["expected_hit_tokens"], told

    async def evict(self, prompt: list[int]) -> None:
        """Send a prompt directly to the server that fills its caches, so that everything else is
        evicted.
        """
        for form in ("generate", "json"):
            path, body, _ = FORMS[form](prompt)
            async with self.stack.http.post(f"{self.server.url}/v2/models/{path}", data=body) as r:
                assert r.status == 200, await r.text()


def cached_tokens_in(answer: bytes) -> int:
    """Return the number of cached tokens that an answer reports, parsed by other code than the
    router's.
    """
    if answer.startswith(b"data: "):
        answer = answer.split(b"\n\n")[0][6:]
    found, end = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
    if "outputs" not in found:
        return int(found["kv_cache_reused_blocks"]) * BLOCK
    for one in found["outputs"]:
        size = one.get("parameters", {}).get("binary_data_size")
        if one["name"] == "kv_cache_reused_blocks":
            blocks = one["data"][0] if size is None else np.frombuffer(answer, "<i4", 1, end)[0]
            return int(blocks) * BLOCK
        end += size or 0
    raise AssertionError(answer)


def fields(prompt: list[int]) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "input_lengths": len(prompt),
        "request_output_len": ANSWER,
    }


def listed(prompt: list[int]) -> list[dict[str, Any]]:
    shapes = {name: value if isinstance(value, list) else [value]
              for name, value in fields(prompt).items()}  # fmt: skip
    return [
        {"name": name, "datatype": "INT32", "shape": [len(data)], "data": data}
        for name, data in shapes.items()
    ]


def in_bytes(prompt: list[int]) -> tuple[str, bytes, dict[str, str]]:
    """Return an `infer` request with binary tensors in both directions, as (path, body,
    headers).
    """
    inputs, data = listed(prompt), b""
    for one in inputs:
        raw = np.array(one.pop("data"), "<i4").tobytes()
        one["parameters"] = {"binary_data_size": len(raw)}
        data += raw
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Accept-Encoding": "identity"}
    return f"{WHOLE}/infer", head + data, headers


def text(prompt: list[int]) -> tuple[str, bytes, dict[str, str]]:
    """Return a request with a text, whose words the router reads as bytes and the server as one
    token each.
    """
    words = " ".join(f"{token:07}" for token in prompt)
    body = {"text_input": words, "max_tokens": ANSWER}
    return "ensemble/generate", json.dumps(body).encode(), {}


FORMS = {
    "generate": lambda ids: ("tensorrt_llm/generate", json.dumps(fields(ids)).encode(), {}),
    "stream": lambda ids: ("tensorrt_llm/generate_stream", json.dumps(fields(ids)).encode(), {}),
    "json": lambda ids: (f"{WHOLE}/infer", json.dumps({"inputs": listed(ids)}).encode(), {}),
    "bytes": in_bytes,
    "text": text,
}


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[list[ReportingTriton]]:
    environment = Environment("triton", NEWEST_TRITON).or_skip()
    # Otherwise a server is not ready, for all its models, while one of them is loaded or unloaded.
    flags = ("--model-control-mode=explicit", "--load-model=*", "--strict-readiness=false")
    folders = [folder / f"triton-{number}" for number in range(SERVERS)]
    servers = [ReportingTriton(environment, folder, one, flags=flags) for one in folders]
    try:
        for server in servers:
            await server.start()
        for server in servers:
            await server.until_healthy()
        yield servers
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def routed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Routed]:
    folder = tmp_path_factory.mktemp("flow")
    keys = folder / "keys"
    keys.write_text(f"{ALL} operators\n{SOME} others models={WHOLE}\n")
    async with (
        started(folder) as servers,
        Programs(folder / "logs") as programs,
        aiohttp.ClientSession() as http,
    ):

        async def router(name: str, those: list[ReportingTriton], *more: str) -> Stack:
            arguments = ["serve", "--port", "0", "--admin-port", "0", *more]
            for server in those:
                arguments += ["--worker", server.spec]
            stack = Stack(programs, await programs.start(name, "router", arguments), [], http)
            for number in range(len(those)):
                await stack.until_state(number, "ready")
            return stack

        terms = ("--api-keys-file", str(keys), "--triton-admin", "load")
        access_log = folder / "access.jsonl"
        one = await router("one", servers[:1], "--access-log", str(access_log))
        both = await router("both", servers, *terms, "--intervals-health-s", "0.5")
        yield Routed(servers, one, both, access_log)
        for stack in (one, both):
            await stack.assert_idle()


@pytest.mark.parametrize("form", FORMS)
async def test_cached_tokens_in_an_answer_correct_the_mirror(routed: Routed, form: str) -> None:
    """An answer that reports fewer cached tokens corrects the router's estimate: the worker evicted
    two prompts, and from the answer to one of them the router also learns that the other is gone.
    """
    draw = random.Random(form)
    one, other = ([draw.randrange(1, 9_999_999) for _ in range(PROMPT)] for _ in range(2))
    whole = 20 * BLOCK
    for prompt in (one, other):
        assert await routed.ask(form, prompt) == (0, 0)
    expected, told = await routed.ask(form, one)
    assert told == whole
    assert expected > whole // 2  # of a text, in the router's own tokens
    await routed.evict([draw.randrange(1, 9_999_999) for _ in range((BLOCKS + 1) * BLOCK)])
    assert await routed.ask(form, one) == (expected, 0), "nobody told it"
    assert await routed.ask(form, other) == (0, 0), "the answer told it"
    assert await routed.ask(form, one) == (expected, whole)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status_and_error(stack: Stack, path: str, body: Any, key: str = ALL) -> tuple[int, str]:
    """Post a request to one of Triton's paths; return (status, error)."""
    async with stack.http.post(f"{stack.url}{path}", json=body, headers=bearer(key)) as reply:
        text = await reply.text()
        found = json.loads(text) if text else {}
        assert set(found) >= {"error"} or reply.status == 200
        return reply.status, found.get("error", "")


async def ready_at(server: ReportingTriton, model: str) -> bool:
    """Return whether the server itself says that it has the model."""
    async with aiohttp.request("GET", f"{server.url}/v2/models/{model}/ready") as reply:
        return reply.status == 200


async def test_models_are_loaded_at_all_servers_or_the_error_lists_failures(
    routed: Routed,
) -> None:
    servers, stack = routed.servers, routed.both
    load, unload = (f"/v2/repository/models/{WHOLE}/{verb}" for verb in ("load", "unload"))
    infer = (f"/v2/models/{WHOLE}/infer", {"inputs": listed([1, 2, 3])})
    assert await status_and_error(routed.stack, unload, {}) == (
        400,
        "this router passes on no settings; send this to each server itself",
    )
    assert (await status_and_error(stack, unload, {}, "sk-nobody"))[0] == 401
    status, error = await status_and_error(stack, unload, {}, SOME)
    assert (status, "for some models only" in error) == (403, True)
    assert (await status_and_error(stack, *infer))[0] == 200

    assert await status_and_error(stack, unload, {}) == (200, "")
    assert [await ready_at(server, WHOLE) for server in servers] == [False, False]
    status, error = await status_and_error(stack, *infer)  # the router knows it at once
    assert (status, error) == (404, f"Request for unknown model: '{WHOLE}' is not found")

    broken = servers[1].folder / "models" / WHOLE / "1" / "model.py"
    broken.write_text("")
    status, error = await status_and_error(stack, load, {"parameters": {}})
    assert 400 <= status <= 500
    assert f"load of '{WHOLE}' failed at 1 of 2 servers: {servers[1].url}: " in error
    assert servers[0].url not in error
    assert [await ready_at(server, WHOLE) for server in servers] == [True, False]
    for _ in range(4):
        assert (await status_and_error(stack, *infer))[0] == 200, "where it was loaded"

    shutil.copy(SOURCE, broken)
    assert await status_and_error(stack, load, {}) == (200, "")
    assert [await ready_at(server, WHOLE) for server in servers] == [True, True]
    async with stack.http.get(f"{stack.url}/v2", headers=bearer(ALL)) as reply:
        assert any("model_repository(" in one for one in (await reply.json())["extensions"])
    status, error = await status_and_error(stack, "/v2/repository/models/nobody/load", {})
    assert (status >= 400, "failed at 2 of 2 servers" in error) == (True, True)


async def summed(stack: Stack, sequence: int, **flags: bool) -> tuple[int, str]:
    """Send one request of a sequence; return (status, error)."""
    one = {"name": "VALUE", "datatype": "INT32", "shape": [1, 1], "data": [[1]]}
    parameters = {"sequence_id": sequence, **flags}
    return await status_and_error(
        stack, f"/v2/models/{KEPT}/infer", {"inputs": [one], "parameters": parameters}
    )


async def test_a_sequence_that_idles_too_long_ends_with_tritons_error(routed: Routed) -> None:
    pause_s = IDLE_S
    while True:  # Triton looks for idle sequences by its own clock
        assert (await summed(routed.both, 7, sequence_start=True))[0] == 200
        await asyncio.sleep(pause_s)
        status, error = await summed(routed.both, 7)
        if status != 200:
            break
        pause_s *= 1.5
        assert pause_s < 60, "it never ended"
    assert status == 400
    assert "must specify the START flag on the first request of the sequence" in error


async def test_sequences_beyond_the_slots_wait_for_a_free_slot(routed: Routed) -> None:
    """A third sequence waits until one of the two sequences in the server's two slots has ended."""
    for sequence in (11, 12):
        assert (await summed(routed.stack, sequence, sequence_start=True))[0] == 200
    third = asyncio.create_task(summed(routed.stack, 13, sequence_start=True))

    async def charged() -> bool:
        return bool((await routed.stack.row(0))["inflight_requests"] == 1)

    await until(charged, "the third to be there")
    while not third.done():  # keeps the sequences from becoming idle
        for sequence in (11, 12):
            last = {"sequence_end": True} if sequence == 12 else {}
            if (await summed(routed.stack, sequence, **last))[0] != 200:
                break
    assert (await third)[0] == 200
    for sequence in (11, 13):
        await summed(routed.stack, sequence, sequence_end=True)


async def test_a_sequence_whose_server_died_is_refused_until_restarted(
    routed: Routed,
) -> None:
    """A sequence whose server died is refused until it begins anew: it never goes to another
    server, nor to the restarted one as if that server knew it.
    """
    stack = routed.both
    body = {"inputs": [{"name": "VALUE", "datatype": "INT32", "shape": [1, 1], "data": [[1]]}]}
    body["parameters"] = {"sequence_id": 21, "sequence_start": True}  # type: ignore[assignment]
    url = f"{stack.url}/v2/models/{KEPT}/infer"
    async with stack.http.post(url, json=body, headers=bearer(ALL)) as reply:
        assert reply.status == 200
        worker = int(reply.headers["x-warmroute-worker"])
    victim = routed.servers[worker]
    await victim.kill()
    seen = {(await summed(stack, 21))[0] for _ in range(3)}
    assert seen <= {502, 503}
    await stack.until_state(worker, "down")
    status, error = await summed(stack, 21)
    assert (status, "are down" in error) == (503, True)
    assert (await summed(stack, 22, sequence_start=True))[0] == 200, "others go on"
    await victim.start()
    await victim.until_healthy()
    await stack.until_state(worker, "ready")
    status, error = await summed(stack, 21)
    assert (status, "must specify the START flag" in error) == (400, True)
    assert (await summed(stack, 21, sequence_start=True, sequence_end=True))[0] == 200
    await routed.stack.until_state(0, "ready")
