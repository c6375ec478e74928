"""Triton's HTTP beside OpenAI's: `generate`, `generate_stream`, KServe v2 `infer`, and readiness.

After triton-inference-server/server (`docs/protocol`, extensions generate and binary data).
`infer` gives one answer; what streams is `generate_stream`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from engine.server import bodies, tensors
from engine.server.answers import Answer, Choice
from engine.server.bodies import CompletionBody
from engine.server.errors import ApiError
from engine.server.insight import json_response
from engine.server.openai import WORKER, admit, begin, check_model, stream, tokens_of
from engine.server.retained import from_tensors
from engine.server.runners import Logprobs
from engine.server.streams import StreamAnswer
from engine.server.triton_model import INPUTS, OUTPUTS, VERSION, config, described, fields_of
from engine.server.worker import Tokens, Worker

_LENGTH_HEADER = "Inference-Header-Content-Length"
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def routes() -> list[web.RouteDef]:
    """Triton's paths; a model's may name its version."""
    found = [
        web.get("/v2", server),
        web.get("/v2/health/live", live),
        web.get("/v2/health/ready", ready),
        web.post("/v2/repository/index", index),
    ]
    for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [
            web.get(base, metadata),
            web.get(f"{base}/ready", ready),
            web.get(f"{base}/config", show_config),
            web.post(f"{base}/infer", infer),
            web.post(f"{base}/generate", generate),
            web.post(f"{base}/generate_stream", generate_stream),
        ]
    return found


class TritonStream(StreamAnswer):
    """A stream of `text_output`s. Lifetime: HTTP request."""

    def on_token(
        self,
        choice: Choice,
        token: int,
        text: str,
        finished: str | None,
        logprobs: Logprobs | None,
    ) -> None:
        said = _head(self.model) | {"text_output": text}
        self._write(b"data: %b\n\n" % msgspec.json.encode(said))
        self._count(finished)

    def error_event(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode({"error": error.message})


async def server(http: web.Request) -> web.Response:
    """GET /v2."""
    extensions = ["generate", "binary_tensor_data", "model_configuration", "model_repository"]
    return json_response({"name": "warmroute", "version": VERSION, "extensions": extensions})


async def live(http: web.Request) -> web.Response:
    """GET /v2/health/live: the process answers."""
    return web.Response()


async def ready(http: web.Request) -> web.Response:
    """GET /v2/health/ready, and the model's: 200 while requests are taken."""
    worker = http.app[WORKER]
    if "model" in http.match_info:
        _named(http)
    return web.Response(status=503 if worker.draining else 200)


async def index(http: web.Request) -> web.Response:
    """POST /v2/repository/index: the one model."""
    worker = http.app[WORKER]
    row = {"name": worker.model, "version": VERSION, "reason": ""}
    return json_response([row | {"state": "UNAVAILABLE" if worker.draining else "READY"}])


async def metadata(http: web.Request) -> web.Response:
    """GET /v2/models/{m}."""
    return json_response(described(_named(http)))


async def show_config(http: web.Request) -> web.Response:
    """GET /v2/models/{m}/config."""
    return json_response(config(_named(http)))


async def generate(http: web.Request) -> web.StreamResponse:
    """POST /v2/models/{m}/generate: flat JSON in, one object out."""
    told, body, prompt = await _generation(http)
    worker = admit(http, body)
    answer = begin(http, worker, Answer, "completion", body, [prompt])
    try:
        await answer.done
    finally:
        worker.abandon(answer)
    known = {"id": told["id"]} if isinstance(told.get("id"), str) else {}
    text = answer.text(answer.choices[0])
    return json_response(known | _head(worker.model) | {"text_output": text})


async def generate_stream(http: web.Request) -> web.StreamResponse:
    """POST /v2/models/{m}/generate_stream: an event a token, no [DONE] at the end."""
    _, body, prompt = await _generation(http)
    worker = admit(http, body)
    answer = begin(http, worker, TritonStream, "completion", body, [prompt])
    return await stream(http, worker, answer, include_usage=False)


async def infer(http: web.Request) -> web.Response:
    """POST /v2/models/{m}/infer: tensors in, tensors out."""
    worker = _named(http)
    told, inputs = tensors.read(await http.read(), http.headers.get(_LENGTH_HEADER))
    known = [name for name, _ in OUTPUTS]
    wanted = known if told.outputs is None else [one.name for one in told.outputs]
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
    said = choice.request.output
    values: tuple[list[Any], ...] = ([answer.text(choice)], said, [len(said)])
    made = {
        name: (datatype, value)
        for (name, datatype), value in zip(OUTPUTS, values, strict=True)
        if name in wanted
    }
    everything = told.parameters.get("binary_data_output") is True
    binary = frozenset(
        one.name
        for one in (told.outputs or [tensors.Wanted(name) for name in known])
        if one.parameters.get("binary_data", everything) is True
    )
    head = ({"id": told.id} if told.id else {}) | _head(worker.model)
    data, length = tensors.written(head, made, binary)
    if length is None:
        return web.Response(body=data, content_type="application/json")
    headers = {_LENGTH_HEADER: str(length), "Content-Type": "application/octet-stream"}
    return web.Response(body=data, headers=headers)


async def _generation(http: web.Request) -> tuple[dict[str, Any], CompletionBody, Tokens]:
    """A `generate` request: what it says, that as a completion's body, and its prompt."""
    worker = _named(http)
    told = bodies.decode(await http.read(), _OBJECT)
    if not isinstance(told.get("text_input"), str):
        raise ApiError(400, "text_input must be a string", "text_input")
    more = told.get("parameters") or {}
    if not isinstance(more, dict):
        raise ApiError(400, "parameters must be an object", "parameters")
    told = {**more, **told}  # clients put inputs there, too
    if told.get("bad_words"):
        raise ApiError(400, "bad_words are not served", "bad_words")
    known = dict(INPUTS)
    fields = {
        known[name].field: value
        for name, value in told.items()
        if name in known and name != "input_ids" and value is not None
    }
    body, prompt = await _body(worker, fields)
    return told, body, prompt


async def _body(worker: Worker, fields: dict[str, Any]) -> tuple[CompletionBody, Tokens]:
    try:
        data = msgspec.json.encode(from_tensors(fields))
    except UnicodeEncodeError as error:
        raise ApiError(400, "a text is not valid Unicode", "text_input") from error
    body = bodies.decode(data, bodies.COMPLETION)
    (prompt,) = bodies.prompts_of(body.prompt)
    return body, await tokens_of(worker, prompt, body.add_special_tokens)


def _named(http: web.Request) -> Worker:
    """The worker, if the path names its model and version."""
    worker = http.app[WORKER]
    check_model(worker, http.match_info["model"])
    version = http.match_info.get("version", VERSION)
    if version != VERSION:
        raise ApiError(404, f"the model has version {VERSION} only", "version")
    return worker


def _head(model: str) -> dict[str, Any]:
    return {"model_name": model, "model_version": VERSION}
