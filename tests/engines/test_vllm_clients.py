"""Tests that real clients get the same answers from real vLLM through the router and directly."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.environment import CLIENTS_LIST, Environment
from tests.engines.pool import Pool, routed, started
from tests.engines.traffic import SCHEMA, TOOL
from tests.engines.vllm_server import MODEL

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = [{"role": "user", "content": "What is the weather in Oslo?"}]
SETTLED: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
FORCED = {"type": "function", "function": {"name": "weather"}}


async def streamed(stream: Awaitable[Any]) -> dict[str, Any]:
    """Return a streamed answer with its pieces joined, because their number depends on the time."""
    events = [event.model_dump() async for event in await stream]
    chats = [choice for event in events for choice in event.get("choices") or ()]
    deltas = [choice["delta"] for choice in chats]
    calls = [call["function"] for delta in deltas for call in delta["tool_calls"] or ()]
    said = [event["delta"] for event in events if isinstance(event.get("delta"), str)]
    return {
        "kinds": sorted({event.get("type", event.get("object")) for event in events}),
        "content": "".join(delta["content"] or "" for delta in deltas) + "".join(said),
        "calls": "".join((call["name"] or "") + (call["arguments"] or "") for call in calls),
        "finished": [choice["finish_reason"] for choice in chats if choice["finish_reason"]],
        "response": events[-1].get("response"),
    }


CALLS: dict[str, Callable[[Any], Any]] = {
    "chat": lambda c: c.chat.completions.create(messages=CHAT, **SETTLED),
    "tools": lambda c: c.chat.completions.create(messages=CHAT, tools=[TOOL], **SETTLED),
    "schema": lambda c: c.chat.completions.create(
        messages=CHAT,
        response_format=FORMAT,
        **{**SETTLED, "max_tokens": 40},
    ),
    "logprobs": lambda c: c.chat.completions.create(
        messages=CHAT, logprobs=True, top_logprobs=3, **SETTLED
    ),
    "several": lambda c: c.completions.create(
        prompt="Say it twice: ", n=2, seed=1, **{**SETTLED, "temperature": 0.8}
    ),
    "batch": lambda c: c.completions.create(prompt=["One", "Two", "Three"], **SETTLED),
    "streamed tools": lambda c: streamed(
        c.chat.completions.create(messages=CHAT, tools=[TOOL], stream=True, **SETTLED)
    ),
    "forced tool": lambda c: c.chat.completions.create(
        messages=CHAT, tools=[TOOL], tool_choice=FORCED, **{**SETTLED, "max_tokens": 40}
    ),
    "schema, streamed": lambda c: streamed(
        c.chat.completions.create(
            messages=CHAT, response_format=FORMAT, stream=True, **{**SETTLED, "max_tokens": 40}
        )
    ),
    "several chats": lambda c: c.chat.completions.create(
        messages=CHAT, n=3, seed=1, **{**SETTLED, "temperature": 0.8}
    ),
    "text logprobs": lambda c: c.completions.create(prompt="One", logprobs=3, echo=True, **SETTLED),
    "responses, streamed": lambda c: streamed(
        c.responses.create(
            model=MODEL, input="Good day.", temperature=0, max_output_tokens=12, stream=True
        )
    ),
    "responses": lambda c: c.responses.create(
        model=MODEL, input="Good day.", temperature=0, max_output_tokens=12
    ),
}
# Fields that differ between any two answers.
MADE_UP = {"id", "created", "created_at", "completed_at", "prompt_tokens_details", "request_id"}
MADE_UP |= {"input_tokens_details", "system_fingerprint", "item_id", "response_id"}


def settled(value: Any) -> Any:
    """Return an answer without the fields that differ between two equal answers."""
    if isinstance(value, dict):
        return {key: settled(v) for key, v in value.items() if key not in MADE_UP}
    return [settled(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("call", sorted(CALLS))
async def test_openais_client_gets_the_servers_answer(vllm: Pool, call: str) -> None:
    answers = []
    for url in (vllm.router.url, vllm.servers[0].url):
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            answer = await CALLS[call](client)
            told = answer if isinstance(answer, dict) else answer.model_dump()
            answers.append(settled(told))
    assert answers[0] == answers[1]


async def test_openais_client_lists_the_servers_models(vllm: Pool) -> None:
    """OpenAI's client lists the server's models through the router, and also gets one model by its
    name, for which vLLM has no path.
    """
    listed = []
    for url in (vllm.router.url, vllm.servers[0].url):
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            models = [model.model_dump() async for model in client.models.list()]
            listed.append([(m["id"], m["parent"]) for m in models])
    assert listed[0] == listed[1]
    async with openai.AsyncOpenAI(base_url=f"{vllm.router.url}/v1", api_key="none") as client:
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_openais_client_gets_the_servers_stream(vllm: Pool) -> None:
    said = []
    for url in (vllm.router.url, vllm.servers[0].url):
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            chunks = await client.chat.completions.create(messages=CHAT, stream=True, **SETTLED)
            said.append("".join([c.choices[0].delta.content or "" async for c in chunks]))
    assert said[0] == said[1] != ""


@pytest.mark.full
async def test_openais_client_gets_the_servers_embeddings(vllm: Pool) -> None:
    """OpenAI's client gets the server's embeddings through the router; the server's model has its
    last hidden states as embeddings.
    """
    asks = [{"input": "Good day."}, {"input": ["One", "Two"], "encoding_format": "float"}]
    pooling = ["--runner", "pooling", "--convert", "embed"]
    async with (
        started(vllm, flags=pooling) as server,
        routed(vllm, servers=(server,)) as pool,
    ):
        await pool.router.until_state(0, "ready")
        said = []
        for url in (server.url, pool.router.url):
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0
            ) as client:
                answers = [await client.embeddings.create(model=MODEL, **ask) for ask in asks]
                said.append([[row.embedding for row in answer.data] for answer in answers])
        assert said[0] == said[1]
        assert [len(rows) for rows in said[0]] == [1, 2]
        assert len({tuple(rows[0]) for rows in said[0]}) == 2, "each text has its own"


async def test_anthropics_client_gets_the_servers_message(vllm: Pool) -> None:
    anthropic = pytest.importorskip("anthropic")
    answers = []
    for url in (vllm.router.url, vllm.servers[0].url):
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            message = await client.messages.create(
                model=MODEL, max_tokens=12, messages=CHAT, extra_body={"temperature": 0}
            )
            answers.append(settled(message.model_dump()))
    for answer in answers:  # the caches differ
        answer["usage"] = {"output_tokens": answer["usage"]["output_tokens"]}
    assert answers[0] == answers[1]


async def test_langchain_gets_the_servers_answer(vllm: Pool) -> None:
    langchain = pytest.importorskip("langchain_openai")
    answers = []
    for url in (vllm.router.url, vllm.servers[0].url):
        chat = langchain.ChatOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, model=MODEL,
            temperature=0, max_tokens=12,
        )  # fmt: skip
        answers.append((await chat.ainvoke("Good day.")).content)
    assert answers[0] == answers[1] != ""


@pytest.mark.full
async def test_litellm_and_llama_index_get_the_servers_answers(vllm: Pool) -> None:
    clients = Environment("clients", CLIENTS_LIST).or_skip()
    script = Path(__file__).with_name("client_calls.py")
    answers = []
    for url in (vllm.servers[0].url, vllm.router.url):
        said = await output_of(str(clients.python), str(script), url, MODEL)
        answers.append(settled(json.loads(said.splitlines()[-1])))
    assert len(answers[0]) == 8
    for call in answers[0]:
        assert answers[0][call] == answers[1][call], call
        assert answers[0][call], call


CURLS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "Good day."}),
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
    # Of one token, because the number of pieces of a longer answer depends on the time.
    "stream": ("/v1/chat/completions", {"messages": CHAT, "stream": True, "max_tokens": 1}),
    "long": ("/v1/completions", {"prompt": "Good day. " * 400}),  # `Expect: 100-continue`
    "tokens": ("/tokenize", {"prompt": "Good day."}),
    "refusal": ("/v1/completions", {"prompt": "x", "temperature": -1}),
}


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("ask", sorted(CURLS))
async def test_curl_gets_the_servers_bytes(vllm: Pool, ask: str) -> None:
    """Curl gets the server's bytes through the router except for ids, times and cached tokens,
    because the second request may find the first one's blocks.
    """
    path, body = CURLS[ask]
    data = json.dumps({**SETTLED, **body})
    options = ["--silent", "--no-buffer", "--write-out", " %{http_code} %{content_type}"]
    options += ["--header", "Content-Type: application/json", "--data", data]
    said = []
    for url in (vllm.servers[0].url, vllm.router.url):
        text = await output_of("curl", *options, f"{url}{path}")
        text = re.sub(r'"id":"[^"]*"', "", text)
        said.append(re.sub(r'"(created|cached_tokens)":\d+', "", text))
    assert said[0] == said[1]
    assert f" {400 if ask == 'refusal' else 200} " in said[1]


async def output_of(*command: str) -> str:
    """Run a program that must succeed and return its output; a failure shows its errors."""
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    said, complaint = await program.communicate()
    assert program.returncode == 0, complaint.decode()[-4000:]
    return said.decode()


async def test_requests_with_several_choices_do_not_mislead_the_index(vllm: Pool) -> None:
    """Requests with n > 1 do not mislead the index: vLLM reports the cached tokens of a later
    choice, which are not a hit that the router predicts.
    """
    body = {"model": MODEL, "prompt": "a b c d e f g h " * 30, "n": 4, "max_tokens": 2, "seed": 7}
    for _ in range(3):
        status, answer = await vllm.ask("/v1/completions", body | {"temperature": 1})
        assert status == 200, answer
    await vllm.until_true()
