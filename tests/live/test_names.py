"""Tests of model names: what workers get, what clients get, and which revision serves
which client.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
import pytest_asyncio

from tests.live.api_engine import STREAMS, ApiEngine, api_engine
from tests.live.stack import MODEL, Stack, running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = "llama"
ASKED = "claude-sonnet-4"
CHAT = [{"role": "user", "content": 'What is "model":"llama"? ' * 20}]
TOOL = [{"type": "function", "function": {"name": "model", "parameters": {}}}]
BODIES = {
    "/v1/responses": {"input": CHAT, "max_output_tokens": 9},
    "/v1/messages": {"messages": CHAT, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/chat/completions": {"messages": CHAT, "tools": TOOL},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/rerank": {"query": "q", "documents": ["a", "b"]},
}
CONFIG = """
names:
  aliases:
    gpt-4o: tiny
    claude-*: llama
    "*haiku*": tiny
    both: chat
  targets:
    chat: {tiny: 90, llama: 10}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "router.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory, config):
    logs = tmp_path_factory.mktemp("logs")
    flags = ["--config", str(config), "--access-log", str(config.parent / "access")]
    flags += ["--migration-moves", "1"]  # which reads their streams before they are edited
    async with running(logs, workers=1, router=flags) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def engine(stack):
    """Add a worker of another model with every API; it is removed after the test."""
    async with api_engine(OTHER, *BODIES) as engine:
        worker_id = await stack.add(engine.url)
        yield engine
        await stack.remove(worker_id)


def bytes_of(path: str, model: str = ASKED, **more: object) -> bytes:
    # Spelled with blanks and escapes that no encoder would write again.
    body = {"unknown": {"é": 1e2}, **BODIES[path], **more, "model": model, "z": {"model": "x"}}
    return json.dumps(body, indent=1).encode() + b"  "


async def raw(stack: Stack, path: str, body: bytes) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    async with stack.http.post(f"{stack.url}{path}", data=body, headers=headers) as reply:
        return reply.status, await reply.read()


def only_the_name(sent: bytes, came: bytes, asked: str, served: str) -> bool:
    """Return True if a worker got what the client sent, with only the model's name replaced."""
    places = [m.start() for m in re.finditer(re.escape(asked.encode()), sent)]
    end = len(asked)
    return came in [sent[:at] + served.encode() + sent[at + end :] for at in places]


@pytest.mark.parametrize("path", BODIES)
async def test_an_alias_changes_only_the_model_name_in_bodies_and_answers(
    stack, engine, path
) -> None:
    direct = await raw(stack, path, bytes_of(path, OTHER))
    renamed = await raw(stack, path, bytes_of(path))
    (_, first, _), (_, second, _) = engine.asked
    assert first == bytes_of(path, OTHER)
    assert second == first
    assert renamed[0] == direct[0] == 200
    if path == "/v1/messages/count_tokens":
        assert renamed == direct
    elif path == "/v1/rerank":  # its engine names another model
        assert renamed[1] == direct[1].replace(b'"model": "m"', b'"model": "%s"' % ASKED.encode())
    else:
        assert only_the_name(direct[1], renamed[1], OTHER, ASKED)
    assert json.loads(renamed[1]).get("model", ASKED) == ASKED


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_streams_have_the_alias_where_engines_write_the_model_name(
    stack, engine, path
) -> None:
    status, body = await raw(stack, path, bytes_of(path, stream=True))
    assert (status, body) == (200, b"".join(STREAMS[path](ASKED)))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("http", ["1.0", "1.1"])
async def test_the_warmroute_engine_streams_under_the_alias(stack, path, http) -> None:
    asks = {"prompt": "a b"} if path == "/v1/completions" else {"messages": CHAT}
    shown = []
    for name in (MODEL, "gpt-4o"):
        body = json.dumps({"model": name, **asks, "max_tokens": 3, "stream": True}).encode()
        shown.append(await raw(stack, path, body))
    models = [event_models(body) for _, body in shown]
    assert set(models[0]) == {MODEL}
    assert set(models[1]) == {"gpt-4o"}
    assert len(models[0]) == len(models[1]) > 2


def event_models(body: bytes) -> list[str]:
    lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
    return [json.loads(line)["model"] for line in lines]


async def test_errors_for_an_alias_are_the_workers_own(stack, engine) -> None:
    async with stack.http.get(f"{stack.url}/v1/models") as reply:
        names = {card["id"]: card for card in (await reply.json())["data"]}
    assert set(names) == {MODEL, OTHER, "gpt-4o", "both", "chat"}
    assert names["gpt-4o"]["root"] == MODEL
    async with stack.http.get(f"{stack.url}/v1/models/gpt-4o") as reply:
        assert (await reply.json())["id"] == "gpt-4o"
    async with stack.http.get(f"{stack.url}/ready?model=gpt-4o") as reply:
        assert reply.status == 200
    status, body = await stack.complete("x", model="unknown")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    status, body = await stack.complete("x" * 8, model="gpt-4o", max_tokens=-1)
    assert status == 400


async def test_of_two_model_fields_the_one_that_engines_read_is_replaced(stack, engine) -> None:
    text = json.dumps(BODIES["/v1/embeddings"])[1:-1]
    body = f'{{"model":"gpt-4o",{text},"mod\\u0065l" : "{ASKED}"}}'
    status, _ = await raw(stack, "/v1/embeddings", body.encode())
    assert status == 200
    ((_, came, _),) = engine.asked
    assert came == body.replace(ASKED, OTHER).encode()
    assert json.loads(came)["model"] == OTHER


async def test_a_canary_keeps_sessions_and_a_reload_moves_a_share(stack, engine, config) -> None:
    async def models(count: int) -> list[str]:
        found = []
        for n in range(count):
            body = {"model": "chat", "input": "a", "session_id": f"s{n}"}
            before = len(engine.asked)
            status, _ = await raw(stack, "/v1/embeddings", json.dumps(body).encode())
            found.append(OTHER if len(engine.asked) > before else str(status))
        return found

    first = await models(200)
    assert await models(200) == first
    assert 5 <= Counter(first)[OTHER] <= 40
    config.write_text(CONFIG.replace("tiny: 90, llama: 10", "tiny: 10, llama: 90"), "utf-8")
    stack.router.process.send_signal(signal.SIGHUP)

    async def moved() -> bool:
        return Counter(await models(50))[OTHER] > 30

    await until(moved, "the new weights")
    after = await models(200)
    stayed = next(one for one in first if one != OTHER)
    moves = {(a, b) for a, b in zip(first, after, strict=True) if a != b}
    assert moves == {(stayed, OTHER)}


async def test_explanations_show_the_alias_rule_and_its_target(stack, engine: ApiEngine) -> None:
    body = {"model": ASKED, "prompt": "a"}
    async with stack.http.post(f"{stack.admin}/explain", json=body) as reply:
        shown = await reply.json()
    named = {"asked": ASKED, "rule": "claude-*", "target": OTHER}
    assert shown["name"] == named
    headers = {"x-warmroute-explain": "1"}
    url, body = f"{stack.url}/v1/embeddings", {"model": ASKED, "input": "a"}
    async with stack.http.post(url, json=body, headers=headers) as reply:
        line = reply.headers["x-warmroute-explain"]
    assert json.loads(line[line.index("{") :])["name"] == named
    async with stack.http.get(f"{stack.admin}/explain?last=1") as reply:
        assert (await reply.json())["decisions"][0]["name"] == named


async def test_the_access_log_and_metrics_show_the_alias_target(stack, engine, config) -> None:
    labels = f'model="{OTHER}",result="ok",revision="any",rule="claude-*"'
    counted = f"warmroute_name_requests_total{{{labels}}}"
    before = await series(stack, counted)
    for model in (ASKED, MODEL):
        body = {"model": model, "input": "a", "session_id": "last"}
        await raw(stack, "/v1/embeddings", json.dumps(body).encode())

    async def counts() -> bool:  # counted once the request has ended, after its answer
        return await series(stack, counted) == before + 1

    await until(counts, "the count")
    assert await series(stack, counted.replace("claude-*", "chat").replace(OTHER, MODEL)) >= 0

    async def written() -> bool:
        return f'"asked":"{ASKED}"' in (config.parent / "access").read_text("utf-8")

    await until(written, "the log")
    lines = (config.parent / "access").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines if '"asked"' in line]
    assert {"asked": ASKED, "rule": "claude-*", "revision": None, "model": OTHER}.items() <= next(
        row for row in rows if row["asked"] == ASKED
    ).items()
    assert all("rule" not in json.loads(line) for line in lines if '"asked"' not in line)


async def series(stack: Stack, name: str) -> float:
    async with stack.http.get(f"{stack.admin}/metrics") as reply:
        found = [line for line in (await reply.text()).splitlines() if line.startswith(name)]
    return float(found[0].rpartition(" ")[2]) if found else 0.0
