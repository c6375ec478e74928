"""Tests of the probe that asks real workers for their ids of fixed prompts: workers that agree,
differ or do not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from engine.wire.hf import HfTokenizer
from engine.wire.memo import MemoEncoder, PieceMemo
from engine.wire.tokens import Chat
from router.settings.schema import Config
from router.settings.terms import tokenizer_terms
from router.tokens.check import TokenCheck
from router.tokens.encoders import Encoders, encoders_of
from router.tokens.probe import CHATS, ProbeTerms, TokenProbe
from tests.engine.harness import running
from tests.engine.model_dirs import write_model
from tests.served_app import served_app

MODEL = "warmroute-timed"
RECHECK_S = 300.0


@dataclass
class Fleet:
    """The workers as the fleet manager has them, and a clock."""

    members: dict[int, Any] = field(default_factory=dict)
    now_s: float = 0.0

    def join(self, worker_id: int, url: str, *models: str, kind: str = "vllm") -> Any:
        facts = SimpleNamespace(models=models or (MODEL,))
        recognized = SimpleNamespace(facts=facts, kind=kind)
        spec = SimpleNamespace(url=url)
        member = SimpleNamespace(worker_id=worker_id, spec=spec, ready=True, recognized=recognized)
        self.members[worker_id] = member
        return member


@contextlib.asynccontextmanager
async def probing(
    tokenizer: HfTokenizer, timeout_s: float = 5.0, encoders: Encoders | None = None
) -> AsyncIterator[tuple[Fleet, TokenCheck, TokenProbe]]:
    fleet, encoder = Fleet(), MemoEncoder(tokenizer, tokenizer, 1 << 20)
    check = TokenCheck(lambda: fleet.now_s, lambda: RECHECK_S)
    async with aiohttp.ClientSession() as http:
        yield (
            fleet,
            check,
            TokenProbe(
                http,
                fleet,  # type: ignore[arg-type]
                encoders or Encoders(encoder, {}, encoder.memo),
                check,
                lambda: fleet.now_s,
                lambda: 1_700_000_000.0,
                lambda: ProbeTerms(0.01, timeout_s, RECHECK_S),
            ),
        )


@contextlib.asynccontextmanager
async def answering(handler: Any, render: Any = None) -> AsyncIterator[str]:
    """Yield the URL of a server whose /tokenize is `handler` and whose renderer is `render`."""
    app = web.Application()
    app.add_routes([web.post("/tokenize", handler)])
    if render is not None:
        app.add_routes([web.post("/v1/chat/completions/render", render)])
    async with served_app(app, shutdown_timeout=0.01) as url:
        yield url


@pytest.mark.parametrize("kind", ["bytes", "metaspace-first", "unigram"])
@pytest.mark.parametrize("template", ["chatml", "headers", "inst", "turns", "parts"])
async def test_a_worker_with_the_same_tokenizer_agrees(
    kind: str, template: str, tmp_path: Path
) -> None:
    tokenizer = HfTokenizer(write_model(tmp_path, kind, template))
    async with running(tokenizer) as worker, probing(tokenizer) as (fleet, check, probe):
        fleet.join(0, worker.url)
        await probe.look()
    assert dict(check.exact()) == {MODEL: True}


async def test_differing_workers_suspend_the_model_and_are_probed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = HfTokenizer(write_model(tmp_path / "ours"))
    others = [
        HfTokenizer(write_model(tmp_path / "a", "unigram")),
        HfTokenizer(write_model(tmp_path / "b", "bytes", "turns")),
    ]
    for other in others:
        async with running(other) as worker, probing(ours) as (fleet, check, probe):
            fleet.join(0, worker.url)
            with caplog.at_level(logging.WARNING):
                await probe.look()
            assert not check.trusts(MODEL)
            text = caplog.records[-1].getMessage()
            assert "tokens by our count" in text
            assert "東京" not in text
            worker.worker.tokenizer = ours  # the operator has corrected it
            await probe.look()
            assert not check.trusts(MODEL)  # not asked so soon
            fleet.now_s += RECHECK_S
            await probe.look()
            assert check.trusts(MODEL)


async def test_a_worker_that_renders_tools_differently_is_trusted_for_other_chats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = HfTokenizer(write_model(tmp_path))
    mended = False

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            chat = Chat(messages=body["messages"], tools=body.get("tools"))
            ids = list(ours.encode_chat(chat, 1_700_000_000.0))
        else:
            ids = list(ours.encode(body["prompt"], body["add_special_tokens"]))
        if "tools" in body and not mended:
            ids.append(ids[-1])  # SGLang 0.5.23 adds a field to each tool
        return web.json_response({"tokens": list(map(int, ids))})

    async with answering(handler) as url, probing(ours) as (fleet, check, probe):
        fleet.join(0, url)
        with caplog.at_level(logging.WARNING):
            await probe.look()
        assert check.trusts(MODEL)
        assert not check.trusts(MODEL, tools=True)
        assert "its chats with tools are placed by text" in caplog.text
        mended = True
        fleet.now_s += RECHECK_S
        await probe.look()
        assert check.trusts(MODEL, tools=True)


@pytest.mark.parametrize("rendering", ["as ours", "otherwise", "not"])
async def test_a_worker_that_renders_with_harmony_is_not_probed_by_template(
    tmp_path: Path, rendering: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    ours = HfTokenizer(write_model(tmp_path))
    found = encoders_of(tokenizer_terms(Config(tokenizer=str(tmp_path))))
    assert found is not None
    harmony = found.of("vllm")
    assert harmony is not None

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        assert "prompt" in body, "a chat"
        ids = ours.encode(body["prompt"], body["add_special_tokens"])
        return web.json_response({"tokens": list(ids)})

    async def render(request: web.Request) -> web.Response:
        if rendering == "not":
            return web.json_response({"error": "--enable-scale-out"}, status=403)
        body = await request.json()
        chat = Chat(messages=body["messages"], tools=body.get("tools"))
        ids = harmony.encode_chat(chat, 1_700_000_000.0).tolist()
        return web.json_response({"token_ids": ids if rendering == "as ours" else ids[1:]})

    async with answering(tokenize, render) as url, probing(ours, encoders=found) as all_three:
        fleet, check, probe = all_three
        fleet.join(0, url)
        await probe.look()
        assert dict(check.exact()) == {MODEL: rendering != "otherwise"}


async def test_a_worker_of_a_kind_without_an_encoder_is_not_probed(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        raise AssertionError("asked")

    encoders = Encoders(None, {}, PieceMemo(0))
    tokenizer = HfTokenizer(write_model(tmp_path))
    async with answering(handler) as url, probing(tokenizer, encoders=encoders) as all_three:
        fleet, check, probe = all_three
        fleet.join(0, url)
        await probe.look()
        assert not dict(check.exact())


async def test_each_worker_is_probed_once_until_it_is_recognized_again(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(write_model(tmp_path))
    asked: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"tokens": [1], "count": 1})

    async with answering(handler) as url, probing(tokenizer) as (fleet, check, probe):
        member = fleet.join(0, url, "m", "n")
        member.ready = False
        await probe.look()
        assert asked == []
        member.ready = True
        await probe.look()
        assert [body["model"] for body in asked] == ["m", "n"]  # one difference each is enough
        assert set(asked[0]) == {"model", "prompt", "add_special_tokens"}
        await probe.look()
        assert len(asked) == 2
        fleet.join(0, url, "m")
        await probe.look()
        assert len(asked) == 3
        assert not check.trusts("m")
        fleet.members.clear()
        await probe.look()
        assert check.trusts("m")


@pytest.mark.parametrize(
    "answer",
    [
        web.json_response({"detail": "Not Found"}, status=404),
        web.json_response({"error": "no"}, status=400),
        web.Response(text="tokens"),
        web.json_response({"tokens": "many"}),
        web.json_response({"tokens": []}),  # llama.cpp, which calls a text `content`
        web.json_response({"tokens": [1] * 2_000_000}),
        web.json_response([]),
    ],
)
async def test_workers_that_return_no_token_ids_are_not_judged(answer: Any, tmp_path: Path) -> None:
    tokenizer = HfTokenizer(write_model(tmp_path))

    async def handler(request: web.Request) -> web.Response:
        return web.Response(
            body=answer.body, status=answer.status, content_type=answer.content_type
        )

    async with answering(handler) as url, probing(tokenizer) as (fleet, check, probe):
        fleet.join(0, url)
        await probe.look()
        assert dict(check.exact()) == {}


async def test_a_hanging_or_missing_worker_does_not_stop_the_probe(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(write_model(tmp_path))

    async def handler(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with answering(handler) as url, probing(tokenizer, 0.5) as (fleet, check, probe):
        fleet.join(0, url)
        fleet.join(1, "http://127.0.0.1:9")
        fleet.join(2, "no url at all")
        task = asyncio.create_task(probe.run())
        async with running(tokenizer) as worker:
            fleet.join(3, worker.url)
            while not dict(check.exact()):  # noqa: ASYNC110 - it comes by itself
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert dict(check.exact()) == {MODEL: True}


async def test_chats_refused_by_the_routers_template_are_not_probed(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}x"
    tokenizer = HfTokenizer(write_model(tmp_path, chat_template=template))
    asked: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        if "prompt" in body:
            ids = tokenizer.encode(body["prompt"], body["add_special_tokens"])
            return web.json_response({"tokens": ids})
        return web.json_response({"tokens": tokenizer.encode("x", False)})

    async with answering(handler) as url, probing(tokenizer) as (fleet, check, probe):
        fleet.join(0, url)
        await probe.look()
    assert check.trusts(MODEL)
    assert len(asked) == 2 + len(CHATS) - 1
