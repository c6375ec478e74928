"""Tests of the worker over real HTTP: answers, streams, usage, and every mistake of a client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.scheduler.types import SchedulerSettings
from engine.timed import continuation
from engine.wire.hf import HfTokenizer
from engine.wire.metrics import parse_load
from tests.engine.harness import VOCAB, eventually, running

PROMPT = list(range(100, 140))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def token_of(text: str) -> int:
    return int(text.strip().removeprefix("t"))


# --- answers -------------------------------------------------------------------------------


async def test_token_prompts_continue_by_the_token_function() -> None:
    async with running() as worker:
        status, answer = await worker.post(
            COMPLETIONS, {"prompt": PROMPT, "max_tokens": 6, "return_token_ids": True}
        )
        assert status == 200
        (choice,) = answer["choices"]
        said = continuation(PROMPT, 6, VOCAB)
        assert choice["token_ids"] == said
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["text"] == "".join(f" t{token}" for token in said)
        assert choice["finish_reason"] == "length"
        assert answer["object"] == "text_completion"
        assert answer["id"].startswith("cmpl-")
        # With part of the answer in the next prompt, the answer continues where it was.
        _, again = await worker.post(COMPLETIONS, {"prompt": PROMPT + said[:2], "max_tokens": 4})
        assert again["choices"][0]["text"] == "".join(f" t{token}" for token in said[2:])


async def test_text_and_chat_get_the_token_ids_of_tokenize() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Good day, t77!"}]}]
    async with running() as worker:
        _, text_ids = await worker.post("/tokenize", {"prompt": "Good day, t77!"})
        assert text_ids["count"] == len(text_ids["tokens"]) == 5
        assert text_ids["tokens"][3] == 77
        _, answer = await worker.post(
            COMPLETIONS, {"prompt": "Good day, t77!", "return_token_ids": True}
        )
        assert answer["choices"][0]["prompt_token_ids"] == text_ids["tokens"]
        assert answer["usage"]["completion_tokens"] == 16
        _, chat_ids = await worker.post("/tokenize", {"messages": messages})
        _, answer = await worker.post(
            CHAT, {"messages": messages, "max_completion_tokens": 3, "return_token_ids": True}
        )
        assert answer["prompt_token_ids"] == chat_ids["tokens"]
        assert answer["choices"][0]["message"]["role"] == "assistant"
        said = answer["choices"][0]["token_ids"]
        assert said == continuation(chat_ids["tokens"], 3, VOCAB)
        _, back = await worker.post("/detokenize", {"tokens": said})
        assert back["prompt"] == answer["choices"][0]["message"]["content"]


async def test_a_completion_stream_has_one_event_per_token_and_usage_on_request() -> None:
    async with running() as worker:
        body = {"prompt": PROMPT, "max_tokens": 4, "stream_options": {"include_usage": True}}
        *tokens, usage = await worker.events(COMPLETIONS, body)
        said = [token_of(event["choices"][0]["text"]) for event in tokens]
        assert said == continuation(PROMPT, 4, VOCAB)
        reasons = [event["choices"][0]["finish_reason"] for event in tokens]
        assert reasons == [None, None, None, "length"]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4
        assert len({event["id"] for event in tokens}) == 1
        without = await worker.events(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4})
        assert len(without) == 4


async def test_only_the_first_event_of_a_stream_has_the_prompts_token_ids() -> None:
    async with running() as worker:
        body = {"prompt": PROMPT, "max_tokens": 3, "return_token_ids": True}
        choices = [event["choices"][0] for event in await worker.events(COMPLETIONS, body)]
        assert choices[0]["prompt_token_ids"] == PROMPT
        assert not any("prompt_token_ids" in choice for choice in choices[1:])
        said = continuation(PROMPT, 3, VOCAB)
        assert [choice["token_ids"] for choice in choices] == [[token] for token in said]
        assert [choice["text"] for choice in choices] == [f" t{token}" for token in said]


async def test_the_first_event_of_a_chat_stream_has_the_role() -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 2,
        "return_token_ids": True,
    }
    async with running() as worker:
        opening, *tokens = await worker.events(CHAT, body)
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        said = [event["choices"][0]["token_ids"][0] for event in tokens]
        assert said == continuation(opening["prompt_token_ids"], 2, VOCAB)
        contents = [event["choices"][0]["delta"]["content"] for event in tokens]
        assert contents == [f" t{token}" for token in said]


async def test_chats_are_tokenized_by_a_configured_tokenizer(model: Path) -> None:
    tokenizer = HfTokenizer(model)
    body = {"messages": [{"role": "user", "content": "Grüße"}], "max_tokens": 40}
    async with running(tokenizer) as worker:
        _, ids = await worker.post("/tokenize", {"messages": body["messages"]})
        assert ids["tokens"] == tokenizer.encode("<s>DGrüße", add_special_tokens=False)
        said = continuation(ids["tokens"], 40, tokenizer.vocab)
        _, whole = await worker.post(CHAT, body)
        assert whole["choices"][0]["message"]["content"] == tokenizer.decode(said)
        _, *events = await worker.events(CHAT, body)
        assert len(events) == 40, "one event a token, even where it ends no character"
        status, answer = await worker.post(CHAT, {"messages": [{"role": "user", "content": 5}]})
        assert (status, answer["error"]["param"]) == (400, "messages[0].content")


async def test_several_prompts_get_one_choice_each() -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    async with running() as worker:
        _, answer = await worker.post(COMPLETIONS, {"prompt": prompts, "max_tokens": 3})
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            said = continuation(prompt, 3, VOCAB)
            assert choice["text"] == "".join(f" t{token}" for token in said)
        assert answer["usage"]["prompt_tokens"] == 7
        events = await worker.events(COMPLETIONS, {"prompt": ["a b", "c"], "max_tokens": 2})
        assert sorted(event["choices"][0]["index"] for event in events) == [0, 0, 1, 1]


async def test_cached_tokens_depend_on_the_salt_and_end_with_a_reset() -> None:
    async with running() as worker:

        async def cached(**fields: Any) -> int:
            _, answer = await worker.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1} | fields)
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert await cached() == 0
        assert await cached() == 32  # two blocks of 16 of the 40 tokens
        assert await cached(cache_salt="tenant-a") == 0
        assert await cached(cache_salt="tenant-a") == 32
        assert await cached(cache_salt="tenant-b") == 0
        async with worker.http.post(worker.url + "/reset_prefix_cache") as reply:
            assert reply.status == 200
        assert await cached() == 0


async def test_unknown_fields_are_ignored_and_the_request_id_is_kept() -> None:
    async with running() as worker:
        body = {"prompt": PROMPT, "max_tokens": 1, "ignore_eos": True, "priority": -3, "new": {}}
        async with worker.http.post(
            worker.url + COMPLETIONS, json=body, headers={"X-Request-Id": 'my"id'}
        ) as reply:
            assert reply.status == 200
            assert (await reply.json())["id"] == 'cmpl-my"id'


async def test_http_1_0_clients_get_a_stream_without_chunked_encoding() -> None:
    async with running() as worker:
        host, port = worker.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": PROMPT, "max_tokens": 2, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body)
        head, _, payload = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b"chunked" not in head
        assert payload.startswith(b"data: {")
        assert payload.endswith(b"data: [DONE]\n\n")


# --- what clients do wrong -----------------------------------------------------------------

LONG = list(range(3000))


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (COMPLETIONS, b"{", 400, "request body"),
        (COMPLETIONS, b"\xff\xfe", 400, "request body"),
        (COMPLETIONS, b"[]", 400, "request body"),
        (COMPLETIONS, b"[" * 100_000, 400, "request body"),
        (COMPLETIONS, {}, 400, "prompt"),
        (COMPLETIONS, {"prompt": 5}, 400, "string or an array"),
        (COMPLETIONS, {"prompt": None}, 400, "string or an array"),
        (COMPLETIONS, {"prompt": ""}, 400, "empty"),
        (COMPLETIONS, {"prompt": "  \n"}, 400, "no tokens"),
        (COMPLETIONS, {"prompt": []}, 400, "empty"),
        (COMPLETIONS, {"prompt": [[1], []]}, 400, "empty"),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [1, -1]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [1, 2.5]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [VOCAB]}, 400, "below 32000"),
        (COMPLETIONS, {"prompt": [[1]] * 65}, 400, "at most 64"),
        (COMPLETIONS, {"prompt": LONG}, 400, "3000 tokens"),
        (COMPLETIONS, {"prompt": LONG[:1990], "max_tokens": 20}, 400, "context"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "n": 65}, 400, "n must be an integer 1..64"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, 400, "cache_salt"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, 400, "stream: true"),
        (COMPLETIONS, {"prompt": "a", "model": "gpt-9"}, 404, "gpt-9"),
        (CHAT, {"prompt": "a"}, 400, "messages"),
        (CHAT, {"messages": []}, 400, "empty"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "content"),
        (CHAT, {"messages": "hello"}, 400, "messages"),
        ("/tokenize", {}, 400, "prompt or messages"),
        ("/detokenize", {"tokens": [VOCAB]}, 400, "below"),
        ("/v1/nothing", {}, 404, "/v1/nothing"),
        ("/health", {}, 405, "GET"),
    ],
)
async def test_bad_requests_get_an_error_that_names_the_problem(
    path: str, body: Any, status: int, says: str
) -> None:
    async with running(scheduler=SchedulerSettings(max_model_tokens=2000)) as worker:
        got, answer = await worker.post(path, body)
        assert got == status
        assert says in answer["error"]["message"]
        assert answer["error"]["code"] == status
        assert worker.worker.unfinished == 0


async def test_a_body_over_the_limit_gets_413() -> None:
    async with running(max_body_bytes=2048) as worker:
        status, answer = await worker.post(COMPLETIONS, {"prompt": "x" * 3000})
        assert (status, answer["error"]["code"]) == (413, 413)
        assert "2048 bytes" in answer["error"]["message"]


async def test_a_full_queue_gets_503_with_retry_after() -> None:
    limits = SchedulerSettings(max_batch_size=1, max_queue=1)
    async with running(scheduler=limits, speed=0.05) as worker:
        body = {"prompt": PROMPT, "max_tokens": 50, "stream": True}
        async with worker.http.post(worker.url + COMPLETIONS, json=body):
            await eventually(lambda: worker.worker.runner.scheduler.running == 1, "one runs")
            async with worker.http.post(worker.url + COMPLETIONS, json=body):
                async with worker.http.post(worker.url + COMPLETIONS, json=body) as refused:
                    assert refused.status == 503
                    assert refused.headers["Retry-After"] == "1"
                # Of several prompts either all are queued or none.
                assert worker.worker.unfinished == 2
        await eventually(lambda: worker.worker.unfinished == 0, "both clients left")


# --- what others ask -----------------------------------------------------------------------


async def test_models_health_and_version_describe_the_worker() -> None:
    async with running(model_name="m/x") as worker:
        (card,) = json.loads(await worker.get("/v1/models"))["data"]
        assert (card["id"], card["owned_by"]) == ("m/x", "warmroute")
        assert card["max_model_len"] == 16_384  # the KV cache is smaller than the model
        health = json.loads(await worker.get("/health"))
        assert health == {"status": "ok", "running": 0, "waiting": 0, "waiting_for": None}
        assert json.loads(await worker.get("/version"))["engine"] == "warmroute"


async def test_metrics_are_prometheus_text_and_add_up() -> None:
    async with running() as worker:
        for _ in range(2):
            await worker.events(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5})
        await worker.post(COMPLETIONS, {"prompt": list(range(20_000))})
        text = (await worker.get("/metrics")).decode()
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

        def value(name: str, **labels: str) -> float:
            labels |= {"model_name": "warmroute-timed", "engine": "0"}
            return samples[name, tuple(sorted(labels.items()))]

        assert value("vllm:prompt_tokens_total") == 80
        assert value("vllm:generation_tokens_total") == 10
        assert value("vllm:request_success_total", finished_reason="length") == 2
        assert value("vllm:time_to_first_token_seconds_count") == 2
        assert value("vllm:inter_token_latency_seconds_count") == 8
        assert value("vllm:e2e_request_latency_seconds_bucket", le="+Inf") == 2
        assert value("warmroute_engine_refused_total", reason="kv_capacity") == 1
        assert value("warmroute_engine_steps_total") == 10
        assert value("warmroute_engine_busy_seconds_total") > 0
        load = parse_load(text)
        assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)
        assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (80, 32)
        assert load.kv_capacity_tokens == 16_384
        assert load.model_name == "warmroute-timed"
