"""Caches behind a real Triton: the mirror is put right by what answers tell."""

from __future__ import annotations

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
from tests.engines.test_triton_routing import MODELS, NUMBER, SOURCE, WHOLE, Models, config_of
from tests.engines.triton_server import TritonServer
from tests.live.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK, BLOCKS = 32, 100  # tokens; of the cache
PROMPT = 20 * BLOCK + 5  # words, or ids
ANSWER = 4
TOLD = dict.fromkeys(("kv_cache_reused_blocks", "num_input_tokens", "num_output_tokens"), NUMBER)
TELLING: Models = {
    name: (inputs, outputs | TOLD if name in ("ensemble", "tensorrt_llm") else outputs)
    for name, (inputs, outputs) in MODELS.items()
}
TELLING = {**TELLING, WHOLE: TELLING["tensorrt_llm"]}


class Telling(TritonServer):
    """One whose models tell what they found in their cache. Lifetime: fixture."""

    def repository(self) -> Path:
        """As of `TritonServer`."""
        models = self.folder / "models"
        for name in TELLING:
            version = models / name / "1"
            version.mkdir(parents=True, exist_ok=True)
            (models / name / "config.pbtxt").write_text(config_of(name, TELLING, BLOCKS))
            if name != "ensemble":
                shutil.copy(SOURCE, version / "model.py")
        return models


@dataclass(slots=True)
class Routed:
    """A server and a router that reads texts as texts. Lifetime: module."""

    server: Telling
    stack: Stack

    async def ask(self, form: str, prompt: list[int]) -> tuple[int, int]:
        """(hit tokens that the router expected, those that the worker told)."""
        path, body, headers = FORMS[form](prompt)
        headers = {**headers, "x-warmroute-explain": "1"}
        url = f"{self.stack.url}/v2/models/{path}"
        async with self.stack.http.post(url, data=body, headers=headers) as reply:
            answer = await reply.read()
            assert reply.status == 200, answer
            why = json.loads(reply.headers["x-warmroute-explain"])
        return why["expected_hit_tokens"], told_in(answer)

    async def evict(self, prompt: list[int]) -> None:
        """Ask the server past the router, until nothing else is left in its caches."""
        for form in ("generate", "json"):
            path, body, _ = FORMS[form](prompt)
            async with self.stack.http.post(f"{self.server.url}/v2/models/{path}", data=body) as r:
                assert r.status == 200, await r.text()


def told_in(answer: bytes) -> int:
    """What the worker says that it reused, tokens; read otherwise than the router does."""
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
    """`infer` whose tensors are bytes, both ways."""
    inputs, data = listed(prompt), b""
    for one in inputs:
        raw = np.array(one.pop("data"), "<i4").tobytes()
        one["parameters"] = {"binary_data_size": len(raw)}
        data += raw
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Accept-Encoding": "identity"}
    return f"{WHOLE}/infer", head + data, headers


def text(prompt: list[int]) -> tuple[str, bytes, dict[str, str]]:
    """A text, whose words are read as bytes by the router and as a token each by the server."""
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
async def started(folder: Path) -> AsyncIterator[Telling]:
    environment = Environment("triton", NEWEST_TRITON)
    if not environment.installed:
        pytest.skip(f"{environment} is not installed: make test-engines")
    server = Telling(environment, folder, folder / "triton")
    await server.start()
    try:
        await server.until_healthy()
        yield server
    finally:
        await server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def routed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Routed]:
    folder = tmp_path_factory.mktemp("flow")
    async with started(folder) as server, Programs(folder / "logs") as programs:
        arguments = ["serve", "--port", "0", "--admin-port", "0", "--worker", server.spec]
        router = await programs.start("router", "router", arguments)
        async with aiohttp.ClientSession() as http:
            stack = Stack(programs, router, [], http)
            await stack.until_state(0, "ready")
            yield Routed(server, stack)
            await stack.assert_idle()


@pytest.mark.parametrize("form", FORMS)
async def test_what_an_answer_tells_puts_the_mirror_right(routed: Routed, form: str) -> None:
    """The worker evicted two prompts; by the answer to the one the router knows of the other."""
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
