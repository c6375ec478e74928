"""Tests of Triton with the TensorRT-LLM backend behind its OpenAI frontend."""

from __future__ import annotations

import math

import aiohttp
import pytest
from aiohttp import web

from engine.wire.events import WireError
from router.body.paths import GRPC_PATHS
from router.engines.adapter import LoadReader, UnrecognizedError
from router.engines.triton import is_unreadable_request, loads_in
from tests.router.engines.engine_pages import MODELS, Pages, engine, loads_of, recognized
from tests.router.triton_pages import BACKEND, CORE, FRESH_BACKEND, NEWER, TRITON


async def test_triton_is_recognized_by_its_metric_names() -> None:
    one = await recognized(TRITON)
    assert (one.kind, one.source, one.ranks) == ("triton", None, (0,))
    assert (one.facts.block_size, one.facts.kv_capacity_tokens) == (64, 64_000)
    assert (one.facts.has_events, one.advice) == (False, "")


async def test_without_backend_metrics_the_advice_is_to_set_metrics() -> None:
    one = await recognized({**TRITON, "/metrics": CORE})
    assert (one.kind, one.loads) == ("triton", None)
    assert math.isnan(one.facts.kv_capacity_tokens)
    assert "metrics=" in one.advice


async def test_metrics_may_be_at_another_port() -> None:
    async with engine({"/metrics": BACKEND}) as url:
        one = await recognized({"/v1/models": MODELS}, f",metrics={url}/metrics")
    assert (one.kind, one.loads) == ("triton", LoadReader(f"{url}/metrics", loads_in))
    assert one.facts.kv_capacity_tokens == 64_000


@pytest.mark.parametrize(
    ("pages", "path", "below"),
    [
        ({"/v2/health/ready": "", "/health/ready": ""}, "/v2/health/ready", 300),
        ({"/v2/health/ready": 404, "/health/ready": ""}, "/health/ready", 300),
        ({"/health/ready": 404}, "/health", 500),
    ],
)
async def test_readiness_is_probed_at_a_path_that_answers(
    pages: Pages, path: str, below: int
) -> None:
    one = await recognized({**TRITON, **pages})
    assert (one.health.path, one.health.below) == (path, below)


async def test_before_its_first_request_triton_reports_no_cache_sizes() -> None:
    one = await recognized({**TRITON, "/metrics": FRESH_BACKEND})
    assert (one.facts.block_size, one.sized) == (64, False)
    assert math.isnan(one.facts.kv_capacity_tokens)


@pytest.mark.parametrize(("text", "waiting"), [(BACKEND, 2), (NEWER, 4)], ids=["old", "new"])
async def test_load_is_read_from_old_and_new_metrics(text: str, waiting: int) -> None:
    (load,) = (await loads_of({**TRITON, "/metrics": text})).values()
    assert (load.running, load.waiting, load.kv_used_tokens) == (3, waiting, 6_400)


async def test_loads_of_several_models_of_a_server_are_summed() -> None:
    second = BACKEND.replace("tensorrt_llm", "second")
    pages = {**TRITON, "/metrics": BACKEND + second}
    (load,) = (await loads_of(pages)).values()
    assert (load.running, load.waiting, load.kv_used_tokens) == (6, 4, 12_800)
    assert (await recognized(pages)).facts.kv_capacity_tokens == 128_000


@pytest.mark.parametrize(
    ("old", "new"),
    [(" 3\n", " -3\n"), (" 3\n", " NaN\n"), (" 100\n", " inf\n"), (" 0.1\n", " 9\n"), (NEWER, "")],
    ids=["negative", "nan", "infinite", "share", "nothing"],
)
async def test_impossible_metric_values_are_refused(old: str, new: str) -> None:
    pages = {"/metrics": NEWER.replace(old, new)}
    async with engine(pages) as url, aiohttp.ClientSession() as http:
        reader = LoadReader(f"{url}/metrics", loads_in)
        with pytest.raises(WireError):
            await reader.read(http, aiohttp.ClientTimeout(total=5.0))


@pytest.mark.parametrize(
    "error",
    [
        "failed to parse the request JSON buffer: Missing a name for object member. at 1",
        "failed to get request params.: attempt to get members for non-object",
        "Unable to parse 'inputs': attempt to access JSON non-array as array",
        "attempt to get members for non-object",
    ],
)
def test_a_500_from_tritons_parser_is_an_error_of_the_request(error: str) -> None:
    body = b'{"error":"%b"}' % error.encode()
    assert is_unreadable_request("triton", 500, body)
    assert not is_unreadable_request("triton", 503, body)
    assert not is_unreadable_request("vllm", 500, body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":"Stub process \'tiny_0_0\' is not healthy."}',
        b'{"error":{"message":"Unable to parse it","type":"InternalServerError"}}',
        b'{"error":null}',
        b"Unable to parse 'inputs'",
        b"",
    ],
)
def test_any_other_500_is_an_error_of_triton(body: bytes) -> None:
    assert not is_unreadable_request("triton", 500, body)


ENSEMBLE = {
    "platform": "ensemble",
    "input": [{"name": "wish", "data_type": "TYPE_STRING"}],
    "ensemble_scheduling": {
        "step": [{"model_name": "llm", "input_map": {"text_input": "wish"}, "output_map": {}}]
    },
}
LLM = {"backend": "vllm", "input": [{"name": "text_input", "data_type": "TYPE_STRING"}]}
OWN: Pages = {
    "/v2": {"name": "triton", "extensions": ["statistics"]},
    "POST /v2/repository/index": [
        {"name": "bot", "version": "1", "state": "READY"},
        {"name": "llm", "version": "1", "state": "READY"},
        {"name": "old", "version": "1", "state": "UNAVAILABLE"},
    ],
    "/v2/models/bot/config": ENSEMBLE,
    "/v2/models/llm/config": LLM,
    "/v2/models/bot/ready": "",
    "/v2/health/ready": "",
}


async def test_models_and_their_inputs_are_read_from_tritons_own_port() -> None:
    async with engine({"/metrics": BACKEND}) as metrics:
        one = await recognized(OWN, f",metrics={metrics}/metrics")
    assert (one.kind, one.facts.models) == ("triton", ("bot", "llm"))
    assert (one.facts.block_size, one.facts.kv_capacity_tokens) == (64, 64_000)
    assert (one.health.path, one.health.below) == ("/v2/models/bot/ready", 300)
    assert one.roles["bot"].text == "wish"
    assert one.roles["llm"].text == "text_input"
    assert "/v1/embeddings" in one.facts.lacks
    assert not any(path.startswith("/v2/models") for path in one.facts.lacks)


async def test_one_of_its_models_may_be_configured() -> None:
    pages = {**OWN, "/v2/models/llm/ready": ""}
    one = await recognized(pages, ",model=llm")
    assert (one.facts.models, one.health.path) == (("llm",), "/v2/models/llm/ready")


NOBODY = "no gRPC server answers at 127.0.0.1:1: check grpc=127.0.0.1:1; it gets no gRPC requests"


@pytest.mark.parametrize(("given", "advice"), [("127.0.0.1:1", NOBODY), ("none", "")])
async def test_an_unusable_grpc_address_leads_to_advice(given: str, advice: str) -> None:
    async with engine({"/metrics": BACKEND}) as metrics:
        one = await recognized(OWN, f",metrics={metrics}/metrics,grpc={given}")
    assert (one.grpc, one.advice) == (None, advice)
    assert one.facts.lacks >= GRPC_PATHS


async def test_a_url_with_a_metrics_port_gets_its_own_error() -> None:
    for page in (b"", BACKEND):  # of Triton 2.51 and of Prometheus's own server
        with pytest.raises(UnrecognizedError, match=r"metrics alone; give the HTTP port"):
            await recognized({"/v1/models": page, "/metrics": BACKEND})
    with pytest.raises(UnrecognizedError, match="is not a list of models"):
        await recognized({"/v1/models": b""})


async def test_the_error_for_an_unreachable_metrics_url_has_its_key() -> None:
    with pytest.raises(UnrecognizedError, match=r"^metrics=http://127.0.0.1:1/m: .*cannot connect"):
        await recognized(OWN, ",metrics=http://127.0.0.1:1/m")


async def test_the_error_for_a_missing_model_lists_the_ready_models() -> None:
    refusal = web.Response(status=400, body=b'{"error":"Model version not ready"}')
    with pytest.raises(UnrecognizedError) as caught:
        await recognized({**OWN, "/v2/models/ecko/ready": refusal}, ",model=ecko")
    assert str(caught.value) == (
        "it has no ready model 'ecko' (model=): GET /v2/models/ecko/ready answered 400 "
        "(Model version not ready); ready: bot, llm"
    )


async def test_without_metrics_or_configs_triton_is_still_recognized() -> None:
    bare = {path: page for path, page in OWN.items() if "models" not in path}
    one = await recognized(bare)
    assert (one.kind, one.loads, one.roles) == ("triton", None, {})
    assert one.health.path == "/v2/health/ready"
    assert "metrics=" in one.advice


@pytest.mark.parametrize(
    "page", ["x", b"\xff", [{"name": 5}], {"name": "x"}, [{"state": "READY"}]], ids=str
)
async def test_an_invalid_repository_index_is_refused(page: object) -> None:
    with pytest.raises(WireError, match="repository/index"):
        await recognized({**OWN, "POST /v2/repository/index": page})


async def test_a_server_whose_model_is_not_ready_is_not_recognized() -> None:
    with pytest.raises(UnrecognizedError, match="not ready"):
        await recognized({**OWN, "/v2/models/bot/ready": 400})
