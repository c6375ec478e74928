"""Triton's HTTP API, which workers serve besides OpenAI's: `generate`, `generate_stream`, KServe v2
`infer`, and readiness.

It follows triton-inference-server/server (`docs/protocol`, extension generate). Inputs have the
names of Triton's TensorRT-LLM backend (`text_input`, `input_ids`, `request_output_len`).
"""

from __future__ import annotations

from math import isfinite, prod
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from engine.scheduler.explain import reasons
from engine.server import bodies
from engine.server.admin import json_response
from engine.server.answers import Answer, Choice, StreamAnswer
from engine.server.bodies import TENSORS, CompletionBody, from_tensors
from engine.server.errors import ApiError
from engine.server.openai import MAX_ID_CHARS, WORKER, admit, begin, stream, tokens_of
from engine.server.settings import Logprobs
from engine.server.worker import Tokens, Worker
from engine.wire.events import WireError
from engine.wire.tensors import (
    LENGTH_HEADER,
    MAX_RANK,
    TEXT,
    Described,
    InferRequest,
    Tensor,
    Wanted,
    infer_answer,
    infer_request,
    json_bytes,
    listed,
    numbers,
    texts,
)

MAX_TENSORS = 64
Values = list[Any]


def read_tensors(
    body: bytes, header: str | None
) -> tuple[InferRequest, dict[str, tuple[str, Values]]]:
    """Return the request and its inputs by name, each with its datatype and a flat list of
    elements. `header` is the value of Inference-Header-Content-Length. Raises ApiError 400 with the
    name of the faulty input.
    """
    try:
        end = json_bytes(header, len(body))
        request = infer_request(memoryview(body)[:end])
    except WireError as error:
        raise ApiError(400, str(error)) from error
    if len(request.inputs) > MAX_TENSORS:
        raise ApiError(400, f"{len(request.inputs)} inputs; at most {MAX_TENSORS}", "inputs")
    found: dict[str, tuple[str, Values]] = {}
    rest = memoryview(body)[end:]
    for one in request.inputs:
        name = one.name[:128]
        try:
            if one.name in found:
                raise WireError("is given twice")
            raw = one.raw(rest)
            found[one.name] = one.datatype, _values(one, raw)
        except WireError as error:
            raise ApiError(400, f"input {name!r} {error}", name) from error
        if raw is not None:
            rest = rest[len(raw) :]
    if len(rest):
        raise ApiError(400, f"{len(rest)} bytes follow the last input", "inputs")
    return request, found


def _values(described: Described, raw: memoryview | None) -> Values:
    """Return the elements of a tensor after checking them. Raises WireError for elements that do
    not fit datatype or shape.
    """
    shape = described.shape
    if shape is None or len(shape) > MAX_RANK or any(size < 0 for size in shape):
        raise WireError(f"must have a shape of 0..{MAX_RANK} dimensions of 0 or more")
    elements = listed(described.data) if raw is None else None
    tensor = Tensor(described.datatype, tuple(shape), raw, elements)
    values = _texts(tensor) if tensor.datatype == TEXT else numbers(tensor).tolist()
    if any(isinstance(value, float) and not isfinite(value) for value in values):
        raise WireError("must be finite")
    if prod(shape) != len(values):
        raise WireError(f"has {len(values)} values for the shape {shape}")
    return values


def _texts(tensor: Tensor) -> Values:
    try:
        return [one if isinstance(one, str) else str(one, "utf-8") for one in texts(tensor)]
    except UnicodeDecodeError as error:
        raise WireError("has a text that is not UTF-8") from error


VERSION = "1"
PLATFORM = "warmroute"


class Input(NamedTuple):
    """An input of a Triton request: its datatype, the field of the completion body that it sets,
    and whether it has several values.
    """

    datatype: str
    field: str
    several: bool = False


INPUTS = (
    ("text_input", Input("BYTES", "prompt")),
    ("input_ids", Input("INT32", "prompt", several=True)),
    ("max_tokens", Input("INT32", "max_tokens")),
    ("request_output_len", Input("INT32", "max_tokens")),
    ("temperature", Input("FP32", "temperature")),
    ("top_k", Input("INT32", "top_k")),
    ("top_p", Input("FP32", "top_p")),
    ("min_p", Input("FP32", "min_p")),
    ("repetition_penalty", Input("FP32", "repetition_penalty")),
    ("presence_penalty", Input("FP32", "presence_penalty")),
    ("frequency_penalty", Input("FP32", "frequency_penalty")),
    ("random_seed", Input("UINT64", "seed")),
    ("min_tokens", Input("INT32", "min_tokens")),
    ("stop_words", Input("BYTES", "stop", several=True)),
    ("ignore_eos", Input("BOOL", "ignore_eos")),
    *((name, Input(datatype, name, several)) for name, datatype, _, several in TENSORS),
)
OUTPUTS = (("text_output", "BYTES"), ("output_ids", "INT32"), ("sequence_length", "INT32"))


def fields_of(tensors: dict[str, tuple[str, list[Any]]]) -> dict[str, Any]:
    """Return the fields of the completion body that the tensors of an `infer` set. Raises ApiError
    with the tensor's name.
    """
    known = dict(INPUTS)
    found: dict[str, Any] = {}
    for name, (datatype, values) in tensors.items():
        one = known.get(name)
        if one is None:
            raise ApiError(400, f"there is no input {name[:128]!r}; known are {', '.join(known)}")
        if datatype != one.datatype:
            raise ApiError(400, f"input {name!r} is {one.datatype}, got {datatype[:32]}", name)
        if not one.several and len(values) != 1:
            raise ApiError(400, f"input {name!r} has one value, got {len(values)}", name)
        if one.field in found:
            raise ApiError(400, f"input {name!r} says the same as one before it", name)
        found[one.field] = values if one.several else values[0]
    if "prompt" not in found:
        raise ApiError(400, "give the input text_input or input_ids", "text_input")
    return found


def describe(worker: Worker) -> dict[str, Any]:
    """Return the answer to GET /v2/models/{m}; -1 means any length."""
    inputs = [
        {"name": name, "datatype": one.datatype, "shape": [-1 if one.several else 1]}
        for name, one in INPUTS
    ]
    outputs = [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in OUTPUTS]
    known = {"name": worker.model, "versions": [VERSION], "platform": PLATFORM}
    return known | {"inputs": inputs, "outputs": outputs}


def config(worker: Worker) -> dict[str, Any]:
    """Return the answer to GET /v2/models/{m}/config, which has the fields of a config.pbtxt."""
    described = describe(worker)
    settings = worker.runner.scheduler.settings
    names = ("batch_scheduler_policy", "max_queue_delay_microseconds", "max_num_tokens")
    parameters = {
        name: {"string_value": str(getattr(settings, name))} for name in (*names, "max_batch_size")
    }
    return {
        "name": worker.model,
        "platform": "",
        "backend": PLATFORM,
        "max_batch_size": 0,
        # Either a text or ids: clients that fill in every required input send the text.
        "input": [
            _typed(one) | {"optional": one["name"] != "text_input"} for one in described["inputs"]
        ],
        "output": [_typed(one) for one in described["outputs"]],
        "model_transaction_policy": {"decoupled": True},
        "parameters": parameters,
    }


def _typed(tensor: dict[str, Any]) -> dict[str, Any]:
    name = "STRING" if tensor["datatype"] == "BYTES" else tensor["datatype"]
    return {"name": tensor["name"], "data_type": f"TYPE_{name}", "dims": tensor["shape"]}


def statistics(worker: Worker) -> dict[str, Any]:
    """Return the answer to GET /v2/models/{m}/stats, which also has a field that Triton does not:

    `scheduler`. Counts are as in Triton: `inference_stats` adds one for each request, `batch_stats`
    one for each execution. An execution is a step, and a request has many: `execution_count`
    exceeds `inference_count`, and `batch_stats` shows how well the engine batches. Refused requests
    are not counted.
    """
    counters, steps, scheduler = worker.counters, worker.steps, worker.runner.scheduler
    none = {"count": 0, "ns": 0}
    whole = {"success": counters.success, "fail": counters.fail, "queue": counters.queue}
    batches = [
        {
            "batch_size": size,
            "compute_input": one.compute_input.shown(),
            "compute_infer": one.compute_infer.shown(),
            "compute_output": one.compute_output.shown(),
        }
        for size, one in sorted(steps.batches.items())
    ]
    pool, used = scheduler.pool, scheduler.kv_used_blocks
    shown = {
        **steps.requests,
        "waiting": {key.value: count for key, count in reasons(scheduler).items()},
        "kv_blocks": {
            "max": pool.blocks, "used": used, "free": pool.blocks - used,
            "tokens_per": pool.block_size,
        },
        "iteration_counter": scheduler.steps_total,
    }  # fmt: skip
    model = {
        "name": worker.model,
        "version": VERSION,
        "last_inference": round(counters.last_inference_s * 1e3),
        "inference_count": counters.success.count,
        "execution_count": sum(one.compute_infer.count for one in steps.batches.values()),
        "inference_stats": {
            **{name: total.shown() for name, total in whole.items()},
            "compute_input": none,
            "compute_infer": counters.infer.shown(),
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": batches,
        "memory_usage": [],
        "response_stats": {},
        "scheduler": shown,
    }
    return {"model_stats": [model]}


_OBJECT = msgspec.json.Decoder(dict[str, Any])


def routes() -> list[web.RouteDef]:
    """Return Triton's routes; a model's path may name its version."""
    found = [
        web.get("/v2", server),
        web.get("/v2/health/live", live),
        web.get("/v2/health/ready", ready),
        web.post("/v2/repository/index", index),
        web.get("/v2/models/stats", show_all_statistics),
    ]
    for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [
            web.get(base, metadata),
            web.get(f"{base}/ready", ready),
            web.get(f"{base}/config", show_config),
            web.get(f"{base}/stats", show_statistics),
            web.post(f"{base}/infer", infer),
            web.post(f"{base}/generate", generate),
            web.post(f"{base}/generate_stream", generate_stream),
        ]
    return found


class TritonStream(StreamAnswer):
    """A stream whose events have the field `text_output`. Lifetime: HTTP request."""

    def on_token(
        self,
        choice: Choice,
        token: int,
        text: str,
        finished: str | None,
        logprobs: Logprobs | None,
    ) -> None:
        event = _head(self.model) | {"text_output": text}
        self._write(b"data: %b\n\n" % msgspec.json.encode(event))
        self._count(finished)

    def error_event(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode({"error": error.message})


async def server(http: web.Request) -> web.Response:
    """GET /v2: return the server's name, its version and the extensions that it has."""
    extensions = [
        *("generate", "binary_tensor_data", "model_configuration", "model_repository"),
        "statistics",
    ]
    return json_response({"name": "warmroute", "version": VERSION, "extensions": extensions})


async def live(http: web.Request) -> web.Response:
    """GET /v2/health/live: 200 while the process answers."""
    return web.Response()


async def ready(http: web.Request) -> web.Response:
    """GET /v2/health/ready, and the path of one model: answer 200 while the worker takes requests,
    else 400 as Triton does.
    """
    worker = http.app[WORKER]
    if "model" in http.match_info:
        _named(http)
        if worker.draining:
            raise ApiError(400, "Model version not ready")
    return web.Response(status=400 if worker.draining else 200)


class IndexBody(msgspec.Struct, frozen=True):
    """Body of the repository index; it may be missing. Lifetime: request."""

    ready: bool = False  # only models that are ready


_INDEX = msgspec.json.Decoder(IndexBody)


async def index(http: web.Request) -> web.Response:
    """POST /v2/repository/index: return the one model, and whether it is ready."""
    worker, data = http.app[WORKER], await http.read()
    body = bodies.decode(data, _INDEX) if data else IndexBody()
    if body.ready and worker.draining:
        return json_response([])
    row = {"name": worker.model, "version": VERSION, "reason": ""}
    state = {"state": "UNAVAILABLE", "reason": "unloading"} if worker.draining else {}
    return json_response([row | {"state": "READY"} | state])


async def metadata(http: web.Request) -> web.Response:
    """GET /v2/models/{m}: return the inputs and outputs of the model."""
    return json_response(describe(_named(http)))


async def show_config(http: web.Request) -> web.Response:
    """GET /v2/models/{m}/config: return the model's configuration, as a config.pbtxt has it."""
    return json_response(config(_named(http)))


async def show_statistics(http: web.Request) -> web.Response:
    """GET /v2/models/{m}/stats: return the model's statistics."""
    return json_response(statistics(_named(http)))


async def show_all_statistics(http: web.Request) -> web.Response:
    """GET /v2/models/stats: return the statistics of the one model."""
    return json_response(statistics(http.app[WORKER]))


async def generate(http: web.Request) -> web.StreamResponse:
    """POST /v2/models/{m}/generate: read a flat JSON object, and answer with one JSON object."""
    fields, body, prompt = await _generation(http)
    worker = admit(http, body)
    answer = begin(http, worker, Answer, "completion", body, [prompt])
    try:
        await answer.done
    finally:
        worker.abandon(answer)
    known = {"id": fields["id"]} if isinstance(fields.get("id"), str) else {}
    text = answer.text(answer.choices[0])
    return json_response(known | _head(worker.model) | {"text_output": text})


async def generate_stream(http: web.Request) -> web.StreamResponse:
    """POST /v2/models/{m}/generate_stream: send one event for each token, without [DONE] at the
    end.
    """
    _, body, prompt = await _generation(http)
    worker = admit(http, body)
    answer = begin(http, worker, TritonStream, "completion", body, [prompt])
    return await stream(http, worker, answer, include_usage=False)


async def infer(http: web.Request) -> web.Response:
    """POST /v2/models/{m}/infer: read input tensors, and answer with output tensors."""
    worker = _named(http)
    request, inputs = read_tensors(await http.read(), http.headers.get(LENGTH_HEADER))
    known = [name for name, _ in OUTPUTS]
    wanted = [one.name for one in request.outputs] or known
    for name in wanted:
        if name not in known:
            raise ApiError(400, f"there is no output {name[:128]!r}; known are {', '.join(known)}")
    body, prompt = await _body(worker, fields_of(inputs))
    answer = begin(http, admit(http, body), Answer, "completion", body, [prompt])
    try:
        await answer.done
    finally:
        worker.abandon(answer)
    choice = answer.choices[0]
    ids = choice.request.output
    values: tuple[list[Any], ...] = ([answer.text(choice)], ids, [len(ids)])
    made = {
        name: (datatype, value)
        for (name, datatype), value in zip(OUTPUTS, values, strict=True)
        if name in wanted
    }
    everything = request.parameters.get("binary_data_output") is True
    binary = frozenset(
        one.name
        for one in (request.outputs or [Wanted(name) for name in known])
        if one.parameters.get("binary_data", everything) is True
    )
    head = ({"id": request.id} if request.id else {}) | _head(worker.model)
    data, length = infer_answer(head, made, binary)
    if length is None:
        return web.Response(body=data, content_type="application/json")
    headers = {LENGTH_HEADER: str(length), "Content-Type": "application/octet-stream"}
    return web.Response(body=data, headers=headers)


async def _generation(http: web.Request) -> tuple[dict[str, Any], CompletionBody, Tokens]:
    """Return the fields of a `generate` request, the completion body that they make, and the
    prompt's token ids.
    """
    worker = _named(http)
    fields = bodies.decode(await http.read(), _OBJECT)
    if not isinstance(fields.get("text_input"), str):
        raise ApiError(400, "text_input must be a string", "text_input")
    more = fields.get("parameters") or {}
    if not isinstance(more, dict):
        raise ApiError(400, "parameters must be an object", "parameters")
    fields = {**more, **fields}  # clients put inputs there, too
    if fields.get("bad_words"):
        raise ApiError(400, "bad_words are not served", "bad_words")
    known = dict(INPUTS)
    mapped = {
        known[name].field: value
        for name, value in fields.items()
        if name in known and name != "input_ids" and value is not None
    }
    body, prompt = await _body(worker, mapped)
    return fields, body, prompt


async def _body(worker: Worker, fields: dict[str, Any]) -> tuple[CompletionBody, Tokens]:
    try:
        data = msgspec.json.encode(from_tensors(fields))
    except UnicodeEncodeError as error:
        raise ApiError(400, "a text is not valid Unicode", "text_input") from error
    body = bodies.decode(data, bodies.COMPLETION)
    (prompt,) = bodies.prompts_of(body.prompt)
    return body, await tokens_of(worker, prompt, body.add_special_tokens)


def _named(http: web.Request) -> Worker:
    """Return the worker if the request's path names its model and version. Raises
    ApiError if not.
    """
    worker = http.app[WORKER]
    if (name := http.match_info["model"]) != worker.model:
        raise ApiError(404, f"Request for unknown model: '{name[:MAX_ID_CHARS]}' is not found")
    version = http.match_info.get("version", VERSION)
    if version != VERSION:
        raise ApiError(404, f"the model has version {VERSION} only", "version")
    return worker


def _head(model: str) -> dict[str, Any]:
    return {"model_name": model, "model_version": VERSION}
