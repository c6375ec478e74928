"""Tests of other clients in normal use through the router: curl, LangChain, Anthropic's client, a
strict reader of event streams, Triton's client.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any

import pytest
import pytest_asyncio

from tests.live.api_engine import WORDS, api_engine
from tests.live.stack import MODEL, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "sk-clients"
CHAT = [{"role": "user", "content": "Say good day."}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    (folder / "keys").write_text(f"{KEY} ann\n")
    flags = ["--api-keys-file", str(folder / "keys"), "--unknown-paths", "forward"]
    headers = {"Authorization": f"Bearer {KEY}"}
    async with running(folder, workers=2, router=flags, headers=headers) as stack:
        yield stack


async def curl(stack, *arguments: str, path: str = "/v1/completions", data: Any = None) -> str:
    """Run curl for a request and return its output; curl must exit with 0."""
    program = shutil.which("curl")
    if program is None:
        pytest.skip("there is no curl")
    known = ["-sS", "--max-time", "20", "-H", f"Authorization: Bearer {KEY}"]
    if data is not None:
        known += ["-H", "Content-Type: application/json", "--data-binary", "@-"]
    process = await asyncio.create_subprocess_exec(
        program,
        *known,
        *arguments,
        f"{stack.url}{path}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    sent = None if data is None else json.dumps(data).encode()
    out, err = await process.communicate(sent)
    assert process.returncode == 0, err.decode()
    return out.decode()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 3} | fields


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
async def test_curl_works_with_http_1_0_and_1_1(stack, version) -> None:
    answer = json.loads(await curl(stack, version, data=body()))
    assert answer["usage"]["completion_tokens"] == 3
    streamed = await curl(stack, version, "-N", data=body(stream=True))
    assert streamed.endswith("data: [DONE]\n\n")
    assert streamed.count("data: ") >= 3


async def test_curl_gets_100_continue_before_a_large_body(stack) -> None:
    much = body(prompt=list(range(200_000)), max_tokens=1)
    shown = await curl(stack, "-i", "-H", "Expect: 100-continue", data=much)
    assert shown.startswith("HTTP/1.1 100")
    assert "context_length_exceeded" in shown


async def test_curl_with_accept_encoding_gets_a_readable_answer(stack) -> None:
    answer = await curl(stack, "--compressed", "-H", "Accept-Encoding: gzip, br", data=body())
    assert json.loads(answer)["choices"]


async def test_curl_sends_two_requests_on_one_connection(stack) -> None:
    url = f"{stack.url}/v1/models"
    shown = await curl(stack, "-v", url, path="/health")
    assert shown.count('"object":"list"') == 1


async def test_langchain_invokes_streams_and_batches(stack) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        model=MODEL, base_url=f"{stack.url}/v1", api_key=KEY, max_tokens=4, max_retries=0
    )
    answer = await model.ainvoke("Say good day.")
    assert answer.usage_metadata["output_tokens"] == 4
    said = [chunk.content async for chunk in model.astream("Say good day.")]
    assert "".join(said) == answer.content
    several = await model.abatch(["one", "two", "three"])
    assert all(one.content for one in several)
    assert (await asyncio.to_thread(model.invoke, "Say good day.")).content == answer.content
    await stack.assert_idle()


async def test_a_strict_sse_client_can_read_streams(stack) -> None:
    httpx, sse = pytest.importorskip("httpx"), pytest.importorskip("httpx_sse")
    url = f"{stack.url}/v1/completions"
    async with (
        httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as client,
        sse.aconnect_sse(client, "POST", url, json=body(stream=True)) as source,
    ):
        events = [event.data async for event in source.aiter_sse()]
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] for event in events[:-1])


async def test_anthropics_client_works(stack) -> None:
    anthropic = pytest.importorskip("anthropic")
    paths = ("/v1/messages", "/v1/messages/count_tokens")
    async with api_engine("other", *paths) as engine:
        worker_id = await stack.add(engine.url)
        ask = {"model": "other", "max_tokens": 9, "messages": CHAT, "system": "Be brief."}
        async with anthropic.AsyncAnthropic(
            base_url=stack.url, api_key=KEY, max_retries=0
        ) as client:
            whole = await client.messages.create(**ask)
            assert whole.content[0].text == "".join(WORDS)
            async with client.messages.stream(**ask) as stream:
                assert [text async for text in stream.text_stream] == list(WORDS)
                final = await stream.get_final_message()
            assert final.usage.output_tokens == len(WORDS)
            counted = await client.messages.count_tokens(model="other", messages=CHAT)
            assert counted.input_tokens > 0
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**ask, "model": "none"})
        for _, _, headers in engine.asked:
            assert KEY not in str(headers), "the router's key went on to a worker"
        async with anthropic.AsyncAnthropic(
            base_url=stack.url, api_key="sk-wrong", max_retries=0
        ) as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(**ask)
        await stack.remove(worker_id)
    await stack.assert_idle()


async def test_tritons_client_works_only_if_its_paths_are_forwarded(stack) -> None:
    """Triton's client works without KServe support if the operator lets the router pass `/v2` on;
    otherwise the router refuses its requests.
    """
    triton = pytest.importorskip("tritonclient.http")
    numpy = pytest.importorskip("numpy")
    path = "/v2/models/other/infer"
    async with api_engine("other", path) as engine:
        worker_id = await stack.add(engine.url)
        row = numpy.array([[1, 2, 3]], dtype=numpy.int32)
        one = triton.InferInput("input_ids", row.shape, "INT32")
        one.set_data_from_numpy(row, binary_data=True)

        def ask() -> None:
            client = triton.InferenceServerClient(stack.url.removeprefix("http://"))
            headers = {"Authorization": f"Bearer {KEY}"}
            query = {"model": "other"}
            assert client.is_server_live(headers=headers, query_params=query)
            answer = client.infer("other", [one], headers=headers, query_params=query)
            assert answer.as_numpy("output_ids").tolist() == [[4, 5, 6]]
            client.close()

        await asyncio.to_thread(ask)
        (call,) = engine.asked
        assert call[0] == path
        assert call[1].endswith(row.tobytes())
        sent = {name.lower(): value for name, value in call[2].items()}
        assert int(sent["inference-header-content-length"]) == len(call[1]) - row.nbytes
        await stack.remove(worker_id)
