"""The adapter of Triton with any backend, reached at Triton's own port (KServe v2) or at its OpenAI
frontend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from engine.wire.events import WireError
from engine.wire.metrics import samples
from router.body.paths import GRPC_PATHS, OPTIONAL_PATHS
from router.engines.adapter import (
    Adapter,
    HealthCheck,
    Interview,
    LoadReader,
    Profile,
    RankLoad,
    UnrecognizedError,
    decoded,
    share,
    total,
)
from router.engines.triton_inputs import ModelConfig, Roles, config_of, roles_of

_CONFIGS = 128  # models whose configurations are read
_NAMED, _SAID_CHARACTERS = 8, 200  # models, and of a server's own words, in an error
_REQUESTS, _BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
_TYPES = {_REQUESTS: "request_type", _BLOCKS: "kv_cache_block_type"}  # label that says what
_READY = ("/v2/health/ready", "/health/ready")  # Triton's own port, its OpenAI frontend
_ABSENT = (404, 405, 501)
_BLOCK_SIZE = 32  # tokens, its default

Figures = dict[tuple[str, str], float]  # (series, type) -> value


def loads_in(text: str) -> Mapping[int, RankLoad]:
    """Return the load in the gauges whose names begin with `nv_trt_llm_`, summed over the server's
    models. Raises WireError if there is none.
    """
    return {0: total([_load_of(figures) for figures in figures_in(text)])}


def figures_in(text: str) -> list[Figures]:
    """Return the gauges of each model that has a batch. Raises WireError if there is no
    such model.
    """
    models: dict[tuple[str | None, str | None], Figures] = {}
    for sample in samples(text, _TYPES):
        model = sample.labels.get("model"), sample.labels.get("version")
        kind = sample.labels.get(_TYPES[sample.name], "")
        models.setdefault(model, {})[sample.name, kind] = sample.value
    found = [figures for figures in models.values() if (_REQUESTS, "scheduled") in figures]
    if not found:
        raise WireError(f"metrics without {_REQUESTS}")
    return found


def _load_of(figures: Figures) -> RankLoad:
    running = figures[_REQUESTS, "scheduled"]
    active = figures.get((_REQUESTS, "active"), running)
    used = figures.get((_BLOCKS, "used"), math.nan)
    return RankLoad(
        running=int(running),
        waiting=int(figures.get((_REQUESTS, "waiting"), max(active - running, 0.0))),
        kv_used_tokens=used * figures.get((_BLOCKS, "tokens_per"), math.nan),
        kv_usage=share(figures.get((_BLOCKS, "fraction")), "the KV cache's fraction"),
        block_size=int(figures.get((_BLOCKS, "tokens_per"), 0)),
    )


async def _recognize(talk: Interview, named: bool) -> Profile | None:
    own = await _own(talk)
    url = talk.metrics_url if talk.spec.metrics or not own else _beside(talk.spec.url)
    text = await _metrics(talk, url)
    if not (named or own) and "\nnv_inference_" not in text and "\nnv_trt_llm_" not in f"\n{text}":
        return None
    try:
        told = figures_in(text)
    except WireError:
        told = []
    sizes = [int(figures.get((_BLOCKS, "tokens_per"), 0)) for figures in told]
    blocks = [int(figures.get((_BLOCKS, "max"), 0)) for figures in told]
    capacity = sum(map(int.__mul__, sizes, blocks))
    grpc, advice = await _grpc(talk) if own else (None, "")
    if not told and not (own and text):
        where = f" at {url}" if url in talk.silent else ""
        figures = f"no load figures{where}: give metrics=http://HOST:8002/metrics"
        advice = "; ".join(filter(None, (advice, figures)))
    return Profile(
        block_size=next(filter(None, sizes), None),
        usual_block_size=_BLOCK_SIZE,
        kv_tokens={0: capacity} if capacity else {},
        loads=LoadReader(url, loads_in) if told else None,
        health=await _health(talk, own),
        advice=advice,
        roles=await roles(talk, own),
        lacks=(OPTIONAL_PATHS if own else frozenset()) | (frozenset() if grpc else GRPC_PATHS),
        grpc=grpc,
    )


async def _grpc(talk: Interview) -> tuple[str | None, str]:
    """Return the address of the gRPC port, and a note for the operator. The address is the one that
    the operator set. If there is none, it is the port after the server's own, if gRPC answers
    there. For https URLs the operator has to set the address.
    """
    given, parts = talk.spec.grpc, urlsplit(talk.spec.url)
    if given == "none" or (given is None and parts.scheme == "https"):
        return None, ""
    host, port = parts.hostname or "", (parts.port or 80) + 1
    if given is not None:
        named = urlsplit(f"//{given}")
        host, port = named.hostname or "", named.port or port
    address = given or (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    if parts.scheme == "https" or await talk.speaks_http2(host, port):
        return address, ""
    talk.silent.add(address)
    if given is None:
        return None, ""
    return None, f"no gRPC server answers at {given}: check grpc={given}; it gets no gRPC requests"


class _Entry(msgspec.Struct):
    name: str
    state: str = ""


async def _own(talk: Interview) -> list[str]:
    """Return the models at Triton's own port. Return none if the URL is that of Triton's OpenAI
    frontend, which lists its models in another way.
    """
    return [] if (await talk.get("/v1/models")).status == 200 else await models(talk)


async def models(talk: Interview) -> list[str]:
    """Return the ready models if the URL is that of Triton's own port. Return none if it is another
    port, or if no model is ready.
    """
    if "extensions" not in await talk.keys("/v2"):
        return []
    status, body = await talk.post("/v2/repository/index")
    if status != 200:
        return [talk.spec.model] if talk.spec.model else []
    entries = decoded(body, list[_Entry], "POST /v2/repository/index")
    return list(dict.fromkeys(one.name for one in entries if one.state in ("READY", "")))


async def _metrics(talk: Interview, url: str) -> str:
    try:
        status, body = await talk.get_url(url)
    except WireError:
        return ""
    except (aiohttp.ClientError, TimeoutError):
        if url == talk.metrics_url:
            raise
        talk.silent.add(url)  # it may have no metrics, or at a port that nobody told
        return ""
    return body.decode("utf-8", "replace") if status == 200 else ""


def _beside(url: str) -> str:
    """Return the usual URL of the metrics, which have the second port after the server's own: port
    8002 for a server at port 8000.
    """
    parts = urlsplit(url)
    port = (parts.port or (443 if parts.scheme == "https" else 80)) + 2
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"http://{host}:{port}/metrics"


async def _configs(talk: Interview, names: Iterable[str]) -> dict[str, ModelConfig]:
    """Return the configurations that can be read of the models at Triton's own port."""
    found: dict[str, ModelConfig] = {}
    for name in islice(names, _CONFIGS):
        status, body = await talk.get(f"/v2/models/{quote(name, safe='')}/config")
        if status == 200:
            with suppress(WireError):
                found[name] = config_of(body)
    return found


async def roles(talk: Interview, names: list[str]) -> dict[str, Roles]:
    """Return the roles of the inputs of these models, as far as the models' configurations can be
    read.
    """
    configs = await _configs(talk, names)
    return {name: roles_of(config, configs) for name, config in configs.items()}


async def _entry(talk: Interview, names: list[str]) -> str | None:
    """Return the model that all requests are for, or None if requests can be for several models."""
    if talk.spec.model is not None or len(names) == 1:
        return talk.spec.model or names[0]
    configs = await _configs(talk, names)
    steps = {step.model_name for config in configs.values() for step in config.steps}
    tops = [name for name in names if name not in steps]
    return tops[0] if steps and len(tops) == 1 else None


async def _health(talk: Interview, names: list[str]) -> HealthCheck:
    """Return the request that checks whether the model, or all models, are ready. Raises
    UnrecognizedError if they are not.
    """
    entry = await _entry(talk, names) if names else None
    own = () if entry is None else (f"/v2/models/{quote(entry, safe='')}/ready",)
    for path in (*own, *_READY):
        status, body = await talk.get(path)
        if status not in _ABSENT:
            health = HealthCheck(path, below=300)  # it answers 400 while it is not ready
            if status >= health.below:
                why = f"GET {path} answered {status}" + _quoted(error_in(body))
                if entry is not None and entry not in names:
                    ready = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
                    raise UnrecognizedError(
                        f"it has no ready model {entry!r} (model=): {why}; ready: {ready}"
                    )
                raise UnrecognizedError(f"it is not ready: {why}")
            return health
    return HealthCheck()


def _quoted(said: str) -> str:
    return f" ({said[:_SAID_CHARACTERS]})" if said else ""


ADAPTER = Adapter(
    "triton",
    _recognize,
    lacks=OPTIONAL_PATHS - {"/v1/embeddings"},  # of its OpenAI frontend
    speaks_kserve=True,
    has_repository=True,
)


# Beginnings of the errors by which Triton refuses for load; 2.51 gives some of them with 400.
QUEUE_FULL, TIMED_OUT = "Exceeds maximum queue size", "Request timeout expired"


class _TritonError(msgspec.Struct):
    error: str


def error_in(body: bytes) -> str:
    """Return the text of one of Triton's errors; "" if the body cannot be read."""
    try:
        return msgspec.json.decode(body, type=_TritonError).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def is_triton_queue_full(status: int, body: bytes) -> bool:
    """Return True if Triton refused a request because its queue was full, or because the request
    waited too long in the queue. Another worker may then be quicker.
    """
    if status not in (400, 503) or len(body) > 4_096:
        return False
    error = error_in(body)
    return QUEUE_FULL in error or TIMED_OUT in error


# Beginnings of the errors of Triton's parser of requests' bodies; 2.51 gives them with 500.
_PARSER = (
    *("failed to parse the request JSON", "failed to get request params"),
    *("Unable to parse ", "attempt to access ", "attempt to get "),
)


def is_unreadable_request(kind: str | None, status: int, body: bytes) -> bool:
    """Return True if a worker could not read the body of a request, although the status of the
    worker's answer means an error of the worker.
    """
    return kind == ADAPTER.kind and status == 500 and error_in(body).startswith(_PARSER)
