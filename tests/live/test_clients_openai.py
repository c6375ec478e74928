"""Tests of OpenAI's own client, sync and async, in normal use through the router."""

from __future__ import annotations

import asyncio
import json

import pytest
import pytest_asyncio

from tests.live.api_engine import WORDS, api_engine
from tests.live.stack import MODEL, engine_arguments, running, until

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "sk-clients"
CHAT = [{"role": "user", "content": "Say good day."}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    keys = folder / "keys"
    # One key has a low limit, for the clients' behaviour on 429.
    keys.write_text(f"{KEY} ann\nsk-slow bob requests_per_s=1 requests_burst=1\n")
    headers = {"Authorization": f"Bearer {KEY}"}
    # Engines in this process do not answer while a client is imported, which takes seconds.
    flags = ["--api-keys-file", str(keys), "--timeouts-probe-s", "30"]
    async with running(folder, workers=2, router=flags, headers=headers) as stack:
        yield stack


@pytest.fixture
def base(stack) -> str:
    return f"{stack.url}/v1"


@pytest_asyncio.fixture(loop_scope="module")
async def client(base):
    async with openai.AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
        yield client


async def test_the_sync_client_chats_completes_streams_and_lists(base, stack) -> None:
    def work() -> None:
        with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            assert client.models.retrieve(MODEL).id == MODEL
            chat = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4)
            assert chat.choices[0].message.content
            assert chat.usage.completion_tokens == 4
            text = client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=3)
            assert text.usage.prompt_tokens == 3
            streamed = client.chat.completions.create(
                model=MODEL, messages=CHAT, max_tokens=4, stream=True
            )
            said = [chunk.choices[0].delta.content for chunk in streamed if chunk.choices]
            assert "".join(filter(None, said)) == chat.choices[0].message.content

    await asyncio.to_thread(work)
    await stack.assert_idle()


async def test_the_client_streams_with_usage_and_tools(client) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        tools=[TOOL],
        tool_choice="auto",
        response_format={"type": "json_object"},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-2].choices[0].finish_reason == "length"


async def test_an_unsupported_request_gets_the_workers_own_refusal(client, stack) -> None:
    """A request that a worker does not support gets the worker's own refusal: `echo` raises the
    error class of OpenAI's client.
    """
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=[5, 6], echo=True, max_tokens=2)
    assert "echo is not served" in caught.value.message
    assert caught.value.status_code == 400
    await stack.assert_idle()


async def test_choices_tool_calls_and_log_probabilities_pass_unchanged(client, stack) -> None:
    async with api_engine("other", "/v1/chat/completions") as engine:
        worker_id = await stack.add(engine.url)
        answer = await client.chat.completions.create(
            model="other", messages=CHAT, n=2, tools=[TOOL], logprobs=True, top_logprobs=1
        )
        assert len(answer.choices) == 2
        for choice in answer.choices:
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"what": "it"}
            assert choice.logprobs.content[0].logprob == -0.5
        sent = json.loads(engine.asked[0][1])
        assert (sent["n"], sent["tools"], sent["top_logprobs"]) == (2, [TOOL], 1)
        await stack.remove(worker_id)


async def test_several_prompts_are_one_request(client, stack) -> None:
    before = await stack.metric("warmroute_decisions_total")
    prompts = [[n, n + 1, n + 2] for n in range(5)]
    answer = await client.completions.create(model=MODEL, prompt=prompts, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(5))
    assert answer.usage.prompt_tokens == 15
    assert await stack.metric("warmroute_decisions_total") - before == 1


async def test_errors_become_the_openai_clients_exceptions(client, base) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="none", messages=CHAT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await create(model=MODEL, messages=[])
    assert wrong.value.param == "messages"
    with pytest.raises(openai.NotFoundError) as unserved:
        await client.responses.create(model=MODEL, input="hi")
    assert unserved.value.code == "path_not_served"
    async with openai.AsyncOpenAI(base_url=base, api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model=MODEL, messages=CHAT)


async def test_a_rate_limited_client_succeeds_after_retry_after(base) -> None:
    async with openai.AsyncOpenAI(base_url=base, api_key="sk-slow", max_retries=0) as hasty:
        ask = [hasty.completions.create(model=MODEL, prompt="a", max_tokens=1) for _ in range(3)]
        with pytest.raises(openai.RateLimitError) as caught:
            await asyncio.gather(*ask)
        assert float(caught.value.response.headers["retry-after-ms"]) <= 1_100
    async with openai.AsyncOpenAI(base_url=base, api_key="sk-slow", max_retries=3) as patient:
        answer = await patient.completions.create(model=MODEL, prompt="a", max_tokens=1)
        assert answer.choices


async def test_a_client_that_times_out_leaves_no_load(client, stack) -> None:
    many = {"model": MODEL, "prompt": "a" * 200, "max_tokens": 20_000}
    with pytest.raises(openai.APITimeoutError):
        await client.completions.create(**many, timeout=0.5)
    stream = await client.completions.create(**many, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await stack.assert_idle()


async def test_requests_of_the_client_succeed_after_a_worker_is_killed(client, stack) -> None:
    extra = await stack.programs.start("extra", "engine", engine_arguments())
    worker_id = await stack.add(extra.url)
    extra.process.kill()
    answers = await asyncio.gather(
        *(client.completions.create(model=MODEL, prompt=[n] * 40, max_tokens=2) for n in range(12))
    )
    assert all(answer.choices for answer in answers)
    await stack.remove(worker_id)


async def test_responses_and_embeddings_work_with_the_client(client, stack) -> None:
    async with api_engine("other", "/v1/responses", "/v1/embeddings") as engine:
        worker_id = await stack.add(engine.url)
        whole = await client.responses.create(model="other", input=CHAT, instructions="Be brief.")
        assert whole.output_text == "".join(WORDS)
        async with client.responses.stream(model="other", input="hi") as stream:
            said = [event.delta async for event in stream if event.type.endswith("text.delta")]
            final = await stream.get_final_response()
        assert said == list(WORDS)
        assert final.usage.output_tokens == len(WORDS)
        rows = await client.embeddings.create(
            model="other", input=["a", "b"], encoding_format="float"
        )
        assert [row.embedding for row in rows.data] == [[0.25, -0.5]] * 2
        sent = json.loads(engine.asked[0][1])
        assert sent["instructions"] == "Be brief."
        assert "Authorization" not in engine.asked[0][2]
        await stack.remove(worker_id)

    async def idle() -> bool:
        return not any(row.get("inflight_requests") for row in await stack.rows())

    await until(idle, "all to be over")
