"""Tests of APIs other than completions and chats through the real router: requests pass byte for
byte, are counted, and go only to workers that have the API.
"""

from __future__ import annotations

import json

import pytest
import pytest_asyncio

from tests.live.api_engine import (
    CACHED_TOKENS,
    PROMPT_TOKENS,
    STREAMS,
    WORDS,
    api_engine,
    generated,
    message,
    response,
)
from tests.live.stack import MODEL, running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = "other"
CHAT = [{"role": "user", "content": "Say good day to two people. " * 20}]
BODIES = {
    "/v1/responses": {"input": CHAT, "instructions": "Be brief.", "max_output_tokens": 9},
    "/v1/messages": {"messages": CHAT, "system": "Be brief.", "max_tokens": 9},
    "/generate": {"text": CHAT[0]["content"], "sampling_params": {"max_new_tokens": 9}},
}
WHOLE = {
    "/v1/responses": response(MODEL, "completed"),
    "/v1/messages": message(MODEL),
    "/generate": generated(WORDS),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    async with running(logs, workers=1, router=["--unknown-paths", "forward"]) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def engine(stack):
    """Add a second worker of the same model with every API; it is removed after the test."""
    served = (*BODIES, "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank", "/opaque")
    async with api_engine(MODEL, *served) as engine:
        worker_id = await stack.add(engine.url)
        yield engine
        await stack.remove(worker_id)


def bytes_of(path: str, **more: object) -> bytes:
    # Spelled with blanks and escapes that no encoder would write again.
    body = {"model": MODEL, **BODIES[path], **more, "unknown": {"é": 1e2}}
    return json.dumps(body, indent=1).encode() + b"  "


@pytest.mark.parametrize("path", BODIES)
async def test_bodies_and_answers_pass_unchanged(stack, engine, path) -> None:
    reported = await stack.metric("warmroute_reported_prompt_tokens_total")
    hits = await stack.metric("warmroute_reported_hit_tokens_total")
    sent = bytes_of(path)
    assert await stack.post(sent, path) == (200, WHOLE[path])
    assert [(asked, body) for asked, body, _ in engine.asked] == [(path, sent)]
    await stack.assert_idle()
    assert await stack.metric("warmroute_reported_prompt_tokens_total") - reported == PROMPT_TOKENS
    assert await stack.metric("warmroute_reported_hit_tokens_total") - hits == CACHED_TOKENS


@pytest.mark.parametrize("path", BODIES)
async def test_streams_pass_unchanged_and_their_usage_is_counted(stack, engine, path) -> None:
    reported = await stack.metric("warmroute_reported_prompt_tokens_total")
    hits = await stack.metric("warmroute_reported_hit_tokens_total")
    url = f"{stack.url}{path}"
    async with stack.http.post(url, data=bytes_of(path, stream=True)) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert await reply.read() == b"".join(STREAMS[path](MODEL))
    await stack.assert_idle()
    assert await stack.metric("warmroute_reported_prompt_tokens_total") - reported == PROMPT_TOKENS
    assert await stack.metric("warmroute_reported_hit_tokens_total") - hits == CACHED_TOKENS


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_a_prompt_counts_as_waiting_until_its_first_token_not_its_first_event(
    stack, engine, path
) -> None:
    engine.computed.clear()
    url = f"{stack.url}{path}"
    async with stack.http.post(url, data=bytes_of(path, stream=True)) as reply:
        first = await reply.content.readany()
        assert first.startswith(b"event: ")
        (row,) = [row for row in await stack.rows() if row.get("inflight_requests")]
        assert row["waiting_requests"] == 1, (
            "an event that no token was computed for ended its prefill"
        )
        engine.computed.set()
        rest = await reply.read()
    assert first + rest == b"".join(STREAMS[path](MODEL))
    await stack.assert_idle()


async def test_chats_with_the_same_prefix_go_to_the_same_worker(stack, engine) -> None:
    async with api_engine(MODEL, "/v1/messages") as second:
        worker_id = await stack.add(second.url)
        for turn in range(6):
            said = [*CHAT, *({"role": "user", "content": f"and {n}"} for n in range(turn))]
            sent = bytes_of("/v1/messages", messages=said)
            assert await stack.post(sent, "/v1/messages") == (200, message(MODEL))
        assert sorted([len(engine.asked), len(second.asked)]) == [0, 6]
        await stack.remove(worker_id)


async def test_embeddings_rerank_and_count_tokens_are_served(stack, engine) -> None:
    data = json.dumps({"model": MODEL, "input": ["a", "b"]}).encode()
    status, answer = await stack.post(data, "/v1/embeddings")
    assert (status, len(answer["data"])) == (200, 2)
    data = json.dumps({"model": MODEL, "query": "q", "documents": ["a", "b", "c"]}).encode()
    status, answer = await stack.post(data, "/v1/rerank")
    assert (status, len(answer["results"])) == (200, 3)
    path = "/v1/messages/count_tokens"
    status, answer = await stack.post(bytes_of("/v1/messages"), path)
    assert (status, answer) == (200, {"input_tokens": PROMPT_TOKENS})
    await stack.assert_idle()


async def test_a_worker_without_the_path_is_tried_once_and_stays_healthy(stack) -> None:
    async with api_engine(MODEL) as bare, api_engine(MODEL, "/generate") as able:
        workers = [await stack.add(bare.url), await stack.add(able.url)]
        for n in range(12):
            body = {"model": MODEL, "text": f"{n}" * 200}
            status, answer = await stack.post(json.dumps(body).encode(), "/generate")
            assert (status, answer) == (200, generated(WORDS))
        assert len(bare.asked) <= 1
        assert len(able.asked) == 12
        assert (await stack.row(workers[0]))["state"] == "ready"
        for worker_id in workers:
            await stack.remove(worker_id)


async def test_a_path_that_no_worker_serves_is_an_error_of_the_router(stack) -> None:
    async with api_engine(MODEL) as bare:
        worker_id = await stack.add(bare.url)
        for _ in range(3):
            status, answer = await stack.post(bytes_of("/v1/messages"), "/v1/messages")
            assert (status, answer["error"]["code"]) == (404, "path_not_served")
            assert MODEL in answer["error"]["message"]
        assert bare.paths() == ["/v1/messages"]
        await stack.remove(worker_id)
    await stack.assert_idle()


async def test_the_client_gets_the_workers_own_404_about_a_model(stack) -> None:
    async with api_engine(MODEL, "/v1/embeddings") as engine:
        # It lists a model that its embeddings do not know, like an adapter in vLLM.
        worker_id = await stack.add(f"{engine.url},model={OTHER}")
        data = json.dumps({"model": OTHER, "input": "a"}).encode()
        for _ in range(2):
            status, answer = await stack.post(data, "/v1/embeddings")
            assert (status, answer["error"]["type"]) == (404, "NotFoundError")
        assert engine.paths() == ["/v1/embeddings"] * 2
        await stack.remove(worker_id)


async def test_tokenize_and_detokenize_requests_add_no_load_to_a_worker(stack) -> None:
    data = json.dumps({"model": MODEL, "prompt": "abc " * 400}).encode()
    status, answer = await stack.post(data, "/tokenize")
    assert (status, answer["count"]) == (200, len(answer["tokens"]))
    status, answer = await stack.post(
        json.dumps({"model": MODEL, "tokens": answer["tokens"]}).encode(), "/detokenize"
    )
    assert status == 200
    assert len(answer["prompt"].split()) == 400
    async with stack.http.get(f"{stack.admin}/explain?last=2") as reply:
        decisions = (await reply.json())["decisions"]
    assert [decision["prompt_tokens"] for decision in decisions] == [1, 1]


async def test_models_of_the_pool_are_listed_together_and_one_by_one(stack) -> None:
    async with api_engine("org/big-model", "/v1/embeddings") as engine:
        worker_id = await stack.add(engine.url)
        async with stack.http.get(f"{stack.url}/v1/models") as reply:
            listed = {card["id"]: card for card in (await reply.json())["data"]}
        assert set(listed) == {MODEL, "org/big-model"}
        for name, card in listed.items():
            async with stack.http.get(f"{stack.url}/v1/models/{name}") as reply:
                assert (reply.status, await reply.json()) == (200, card)
        async with stack.http.get(f"{stack.url}/v1/models/none") as reply:
            assert reply.status == 404
            assert (await reply.json())["error"]["code"] == "model_not_found"
        await stack.remove(worker_id)


async def test_unknown_paths_are_forwarded_unchanged_if_the_operator_allows_it(stack) -> None:
    async with api_engine(OTHER, "/opaque") as engine:
        worker_id = await stack.add(engine.url)
        sent = bytes(range(256)) * 100
        url = f"{stack.url}/opaque?model={OTHER}&x=%2F"
        async with stack.http.put(url, data=sent, headers={"X-Own": "1"}) as reply:
            assert (reply.status, reply.headers["x-seen"]) == (200, "/opaque")
            assert await reply.read() == sent[::-1]
        (call,) = engine.asked
        assert call[2]["X-Own"] == "1"
        async with stack.http.post(f"{stack.url}/none?model={OTHER}", data=b"") as reply:
            assert (reply.status, await reply.json()) == (404, {"detail": "Not Found"})
        async with stack.http.get(f"{stack.url}/v1/completions") as reply:
            assert (reply.status, reply.headers["Allow"]) == (405, "POST")
        await stack.remove(worker_id)
    await stack.assert_idle()


async def test_a_client_that_disconnects_in_mid_stream_leaves_no_request_in_flight(
    stack, engine
) -> None:
    engine.computed.clear()
    url = f"{stack.url}/v1/responses"
    async with stack.http.post(url, data=bytes_of("/v1/responses", stream=True)) as reply:
        await reply.content.readany()
        reply.close()

    async def idle() -> bool:
        return not any(row.get("inflight_requests") for row in await stack.rows())

    await until(idle, "the client's end to be noticed")
    engine.computed.set()
    await stack.assert_idle()
