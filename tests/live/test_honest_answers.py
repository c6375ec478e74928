"""Tests with whole programs: a short answer counts as an answer, and an empty one as a failure of
its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.effort import QUICK
from tests.live.stack import MODEL, Stack, running, until
from tests.live.told_engine import ANSWER_HEADER, EVENTS, JSON, PAGE, NamedAnswerEngine
from tests.router.http.answer_bodies import (
    BAD_STREAMS,
    BAD_WHOLE,
    GOOD_STREAMS,
    GOOD_WHOLE,
    OTHER_FORMS,
    events,
    text,
)

EACH = 5 if QUICK else 1_000
CLIENTS = 8
PATHS_OF = {
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "generate": "/generate",
    "other": "/v1/embeddings",
}
OTHER_PATHS = ("/v1/embeddings", "/v1/score", "/rerank", "/classify", "/pooling", "/tokenize")
BODY = {
    "model": MODEL,
    "prompt": "hello",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 16,
}
EMBEDDED = b'{"object":"list","data":[{"index":0,"embedding":[0.0]}]}'


def cases() -> dict[str, tuple[str, bytes]]:
    """Return all answers by name, each with its content type and body."""
    found = {f"s-{name}": (EVENTS, body) for name, body in (*GOOD_STREAMS, *BAD_STREAMS)}
    found |= {f"w-{name}": (JSON, body) for name, body in (*GOOD_WHOLE, *BAD_WHOLE)}
    for number, (form, body, _) in enumerate(OTHER_FORMS):
        stream = body.startswith((b"data", b"event"))
        found[f"{form}-{number}"] = (EVENTS if stream else JSON, body)
    return found | {
        "plain": (JSON, EMBEDDED),
        "page": (PAGE, b"<html>It works!</html>"),
        "good": (JSON, b'{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}'),
        "good_stream": (EVENTS, events(text("x", "stop"))),
    }


@asynccontextmanager
async def answering_stack(tmp_path: Path, always: list[str], *router: str) -> AsyncIterator[Stack]:
    """Yield a router with engines that give the answer that a request's header names, or always the
    given answer.
    """
    engines = [NamedAnswerEngine(cases(), each) for each in always]
    async with running(tmp_path, workers=0, router=router) as stack:
        try:
            for engine in engines:
                await engine.start()
                await stack.add(engine.url)
            yield stack
        finally:
            for engine in engines:
                await engine.stop()


async def ask(stack: Stack, path: str, name: str, **fields: Any) -> tuple[int, bytes]:
    body = BODY | {"stream": name.startswith("s-")} | fields
    url = f"{stack.url}{path}"
    async with stack.http.post(url, json=body, headers={ANSWER_HEADER: name}) as reply:
        return reply.status, await reply.read()


def log(stack: Stack) -> str:
    """Return the text of the router's log."""
    return stack.router.log.read_text()


def honest() -> list[tuple[str, str, bytes, dict[str, Any]]]:
    """Return (path, answer's name, body, further request fields) of all good answers."""
    found: list[tuple[str, str, bytes, dict[str, Any]]] = []
    for path in ("/v1/chat/completions", "/v1/completions"):
        found += [(path, f"s-{name}", body, {}) for name, body in GOOD_STREAMS]
        found += [(path, f"w-{name}", body, {}) for name, body in GOOD_WHOLE]
    zero = dict(BAD_STREAMS)["zero_tokens_at_once"]
    found.append(("/v1/completions", "s-zero_tokens_at_once", zero, {"max_tokens": 0}))
    zero = dict(BAD_WHOLE)["zero_tokens"]
    found.append(("/v1/completions", "w-zero_tokens", zero, {"max_tokens": 0, "echo": True}))
    for number, (form, body, answers) in enumerate(OTHER_FORMS):
        if answers and form != "other":
            found.append((PATHS_OF[form], f"{form}-{number}", body, FIELDS[form]))
    found += [(path, "plain", EMBEDDED, FIELDS["other"]) for path in OTHER_PATHS]
    return found


FIELDS: dict[str, dict[str, Any]] = {
    "responses": {"input": "hello", "max_output_tokens": 16},
    "messages": {},
    "generate": {"text": "hello"},
    "other": {"input": "hello", "query": "a", "documents": ["b"], "text_1": "a", "text_2": "b"},
}


@pytest.mark.timeout(900)
async def test_short_answers_cause_no_retry_and_eject_no_worker(tmp_path: Path) -> None:
    async with answering_stack(tmp_path, ["", ""]) as stack:
        todo = [case for case in honest() for _ in range(EACH)]

        async def client() -> None:
            while todo:
                path, name, body, fields = todo.pop()
                status, got = await ask(stack, path, name, **fields)
                assert (status, got.strip()) == (200, body.strip()), (path, name)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        for name in ("ejections", "ejections_withheld", "retries", "worker_failures"):
            assert await stack.metric(f"warmroute_{name}_total") == 0, name
        assert {row["state"] for row in await stack.rows()} == {"ready"}


@pytest.mark.parametrize("kind", ["s", "w"])
async def test_a_worker_that_gives_empty_answers_is_ejected_again_after_each_retry(
    tmp_path: Path, kind: str
) -> None:
    """A worker that gives empty answers is ejected, and again if it gives an empty answer when it
    is tried later.
    """
    bad = "s-done_alone" if kind == "s" else "w-nothing"
    good = "s-one_token" if kind == "s" else "good"
    args = ("--policy", "round_robin", "--ejection-recover-s", "0.1")
    async with answering_stack(tmp_path, ["", "", bad], *args) as stack:
        body = cases()[good][1]

        async def put_aside_again() -> bool:
            for _ in range(10):
                status, got = await ask(stack, "/v1/completions", good)
                assert (status, got.strip()) == (200, body.strip())
            (row,) = [row for row in await stack.rows() if row["state"] == "ejected"] or [{}]
            return log(stack).count("keeps failing (no_answer)") >= 3 and bool(row)

        await until(put_aside_again, "it to fail its trials")
        assert "answers again" not in log(stack)
        assert await stack.metric("warmroute_retries_total") >= 5


@pytest.mark.parametrize("name", ["s-error_first", "w-page", "w-nothing"])
async def test_the_client_gets_the_empty_answer_of_the_only_worker(
    tmp_path: Path, name: str
) -> None:
    async with answering_stack(tmp_path, [""]) as stack:
        status, got = await ask(stack, "/v1/completions", name)
        assert (status, got.strip()) == (200, cases()[name][1].strip())
        assert await stack.metric("warmroute_worker_failures_total") >= 1
