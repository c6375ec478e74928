"""Handles KServe v2 over HTTP: recognizes the paths of inference, and reads their bodies for
routing.

The behaviour follows triton-inference-server/server, `docs/protocol` (extensions binary data,
generate, sequence). A body goes to the worker unchanged, and the worker decides about what the
router cannot read.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec

from engine.wire.events import WireError
from engine.wire.tensors import (
    LENGTH_HEADER,
    MAX_RANK,
    TEXT,
    Buffer,
    Described,
    InferRequest,
    InferResponse,
    Tensor,
    infer_request,
    json_bytes,
    listed,
)
from router.body.paths import KSERVE, OwnAnswers, Path
from router.body.scan import ScanLimits, Scanned
from router.engines.triton_inputs import MAX_INPUTS, Roles, RolesOf, usual_roles
from router.http.errors import ClientError
from router.http.reply import Usage
from router.kserve.content import (
    MAX_TEXT_BYTES,
    SHARED_MEMORY,
    USAGE_OUTPUTS,
    Content,
    KserveTarget,
    content_of,
    triton_message,
    usage_of,
)

PREFIX = "/v2"
MAX_UNPACKED_BYTES = 64 << 20  # of a compressed body that are read
# The message for the client of a broken stream.
BROKEN = "the worker failed in the middle of its answer"
LATE = "the request's deadline passed in the middle of its answer"
_PATH = re.compile(
    r"/v2/models/(?P<model>[^/]{1,1024})(?:/versions/(?P<version>[0-9]{1,64}))?/(?P<verb>[a-z_]+)"
)
_PREFIXES = (
    *("/v2/models", "/v2/health", "/v2/repository", "/v2/trace/", "/v2/logging"),
    *("/v2/systemsharedmemory", "/v2/cudasharedmemory"),
)
_NONE: Mapping[str, Any] = MappingProxyType({})


class HttpTarget(KserveTarget):
    """The model and the kind of inference call that an HTTP path names. Lifetime: request."""

    __slots__ = ()

    def scanner(
        self, header: Callable[[str], str | None], apart: str | None = None
    ) -> Callable[[bytes, ScanLimits], Scanned]:
        coding, length = header("content-encoding"), header(LENGTH_HEADER)
        roles = self.roles(self.model)

        def read(body: bytes, limits: ScanLimits) -> Scanned:
            plain = _unpacked(body, coding if self.path.reads == "infer" else None)
            if plain is None:
                why = "the body is compressed in a way that is not read here"
                content = Content(unread=(why,))
            elif self.path.reads == "infer":
                content = infer_content(plain, length, roles)
            else:
                content = generate_content(plain, roles)
            return self.scanned(content, limits, apart)

        return read


def target_of(path: str, roles: RolesOf = usual_roles) -> HttpTarget | None:
    """Return the model and call that a decoded path names; None if the path does not ask for
    inference.
    """
    found = _PATH.fullmatch(path) if path.startswith("/v2/models/") else None
    if found is None or found["verb"] not in _PATHS:
        return None
    model = found["model"].replace("%2F", "/")
    return HttpTarget(model, found["version"], _PATHS[found["verb"]], roles)


def is_kserve(path: str) -> bool:
    """Return whether errors on this path have Triton's form. Not every path below /v2 does, because
    other APIs have such paths, too.
    """
    return path == PREFIX or path.startswith(_PREFIXES)


class _OpenAi(msgspec.Struct):
    message: str
    code: str | int | None = None


class _OpenAiBody(msgspec.Struct):
    error: _OpenAi


def code_in(body: bytes) -> str | int | None:
    """Return the error code in the body of one of the router's own errors; None if it has none."""
    try:
        return msgspec.json.decode(body, type=_OpenAiBody).error.code
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def tritons_error(body: bytes, model: str | None) -> bytes:
    """Return the body of one of the router's own errors in the form that KServe's clients read.
    `model` is the requested model.
    """
    try:
        error = msgspec.json.decode(body, type=_OpenAiBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body
    message = triton_message(error.code, error.message)
    if error.code == "model_not_found" and model is not None:
        message = unknown_model(model)
    return msgspec.json.encode({"error": message})


def last_event(late: bool) -> bytes:
    """Return an error event in the form of a model's stream, and the end of the chunked body.
    `late` True means that the deadline passed; otherwise the worker failed.
    """
    words = b'data: {"error":"%b"}\n\n' % (LATE if late else BROKEN).encode()
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(words), words)


def unknown_model(name: str) -> str:
    """Return Triton's text for an unknown model; some clients look for exactly this text."""
    return f"Request for unknown model: '{name[:200]}' is not found"


_GENERATE = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BAD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
NO_SUCH_MEMORY = (
    "shared memory is of one host, and the request may go to a server on another one; send the "
    "tensors in the body"
)


def _unpacked(body: bytes, coding: str | None) -> bytes | None:
    """Return the decompressed body; None if it cannot be decompressed. Raises ClientError if the
    result is too large.

    Triton accepts a single coding, gzip or deflate, and only for `infer`.
    """
    coding = (coding or "").strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in ("gzip", "deflate"):
        return None
    inflating = zlib.decompressobj(31 if coding == "gzip" else 15)
    try:
        plain = inflating.decompress(body, MAX_UNPACKED_BYTES)
    except zlib.error:
        return None
    if inflating.unconsumed_tail:
        why = f"the body has more than {MAX_UNPACKED_BYTES} bytes when it is unpacked"
        raise ClientError(413, why, "content-encoding", "body_too_large")
    return plain


def infer_content(body: bytes, length: str | None, roles: Roles) -> Content:
    """Return what matters for routing in the body of an `infer` request. Raises ClientError for
    tensors in shared memory.
    """
    try:
        end = json_bytes(length, len(body))
        if end == 0 and length is not None:
            return _raw(body, roles)
        request = infer_request(memoryview(body)[:end])
    except WireError as error:
        return Content(unread=(str(error),))
    given = [one.parameters for one in request.inputs]
    given += [one.parameters for one in request.outputs]
    if any(SHARED_MEMORY in one for one in given):
        raise ClientError(400, NO_SUCH_MEMORY, code="shared_memory")
    unread: list[str] = []
    inputs = _inputs(request, memoryview(body)[end:], roles, unread)
    content = content_of(roles, inputs, request.parameters)
    return replace(content, unread=(*unread, *content.unread)) if unread else content


def _inputs(
    request: InferRequest, rest: memoryview, roles: Roles, unread: list[str]
) -> dict[str, Tensor]:
    """Return the request's tensors that matter for routing."""
    if len(request.inputs) > MAX_INPUTS:
        unread.append(f"over {MAX_INPUTS} inputs")
        return {}
    return _tensors(request.inputs, rest, roles.inputs, unread)


def _tensors(
    described: list[Described], rest: memoryview, names: frozenset[str], unread: list[str]
) -> dict[str, Tensor]:
    """Return the tensors with these names; the data of some tensors is in `rest`, the bytes after
    the JSON.
    """
    found = {}
    for one in described:
        try:
            raw = one.raw(rest)
        except WireError as error:
            unread.append(f"{one.name[:64]}: {error}")
            break
        if raw is not None:
            rest = rest[len(raw) :]
        shape = tuple(one.shape or ())
        if one.name in names and len(shape) <= MAX_RANK:
            values = _listed(one.data) if raw is None else None
            found[one.name] = Tensor(one.datatype, shape, raw, values)
    return found


def _listed(data: msgspec.Raw) -> list[Any]:
    try:
        return listed(data)
    except WireError:
        return []


def _raw(body: bytes, roles: Roles) -> Content:
    """Return the content of a body that is a single raw input without JSON."""
    if roles.text is None:
        return Content()
    text: Buffer = memoryview(body)[:MAX_TEXT_BYTES]
    return content_of(roles, {roles.text: Tensor(TEXT, (1,), None, [bytes(text)])}, _NONE)


def generate_content(body: bytes, roles: Roles) -> Content:
    """Return what matters for routing in a `generate` request, whose inputs are the fields of a
    JSON object.
    """
    try:
        fields = _GENERATE.decode(body)
    except _BAD as error:
        return Content(unread=(f"request body: {error}",))
    parameters = _parameters(fields.get("parameters"))
    inputs = {}
    for name in roles.inputs:
        if (data := fields.get(name)) is not None:
            inputs[name] = _typed(_listed(data))
    return content_of(roles, inputs, parameters)


def _parameters(data: msgspec.Raw | None) -> Mapping[str, Any]:
    try:
        return _NONE if data is None else msgspec.json.decode(data, type=dict[str, Any])
    except _BAD:
        return _NONE


def _typed(values: list[Any]) -> Tensor:
    """Return the values of a JSON field as the tensor that Triton makes of them."""
    first: Any = values
    while isinstance(first, list) and first:
        first = first[0]
    kinds = {str: TEXT, bool: "BOOL"}
    width = len(values[0]) if values and isinstance(values[0], list) else len(values)
    return Tensor(kinds.get(type(first), "INT64"), (max(width, 1),), None, values)


_NAMES = b"|".join(name.encode() for name in sorted(USAGE_OUTPUTS))
# Quotes inside JSON strings are escaped, so these can only be a key, and the name of an output.
_FIELD = re.compile(rb'"(%b)"[ \t\r\n]*:[ \t\r\n]*' % _NAMES)
_OUTPUT = re.compile(rb'\{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*"(?:%b)"' % _NAMES)
_JSON = json.JSONDecoder()


def answer_usage(kept: bytes, events: int, block_size: int | None) -> Usage | None:
    """Return the token counts in the `kept` part of an answer's body; None if there are none. It
    never raises.

    In a stream of `events` events, the last event that has counts decides. Each event counts as at
    least one token, because some models report only the tokens of the event itself.
    """
    if kept[:1] in (b"\x1f", b"\x78"):  # compressed, and whole, or it cannot be read
        kept = _inflated(kept)
    if b'"num_' not in kept and b'"kv_cache_' not in kept:
        return None
    try:
        usage = usage_of(_token_counts(kept), block_size)
    except (ValueError, TypeError, LookupError):
        return None  # the counts are the worker's courtesy
    if usage is not None and events:
        usage.completion_tokens = max(usage.completion_tokens or 0, events)
    return usage


def _inflated(body: bytes) -> bytes:
    try:
        return zlib.decompressobj(47).decompress(body, MAX_TEXT_BYTES)  # gzip's or zlib's, it sees
    except zlib.error:
        return b""


def _token_counts(kept: bytes) -> dict[str, Tensor]:
    """Return the outputs with token counts by name; of a name that occurs twice, the
    later value.
    """
    text = kept.decode("latin-1")  # a byte is a character; the searched words are ASCII
    first, stop = _decoded(text, 0)
    if isinstance(first, dict) and text[stop:].strip():
        return _in_bytes(kept, stop)
    told: dict[str, Any] = {}
    places = {key[1].decode(): key.end() for key in _FIELD.finditer(kept)}
    for name, at in places.items():
        value, end = _decoded(text, at)
        if text[end : end + 9].lstrip()[:1] in (",", "}"):  # else it may be cut
            told[name] = value if isinstance(value, list) else [value]
    for place in _OUTPUT.finditer(kept):
        one, _ = _decoded(text, place.start())
        if isinstance(one, dict) and isinstance(one.get("data"), list):
            told[one["name"]] = one["data"]
    return {name: _typed(values) for name, values in told.items()}


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at the position `at`, and its end; the value is None if it
    cannot be read.
    """
    try:
        return _JSON.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _in_bytes(body: bytes, end: int) -> dict[str, Tensor]:
    """Return the outputs whose data follows the JSON, which ends at the position `end`."""
    view = memoryview(body)
    told = msgspec.json.decode(view[:end], type=InferResponse)
    return _tensors(told.outputs, view[end:], USAGE_OUTPUTS, [])


ANSWERS = OwnAnswers(answer_usage, last_event)
_PATHS: Mapping[str, Path] = MappingProxyType(
    {verb: replace(path, answers=ANSWERS) for verb, path in KSERVE.items()}
)
