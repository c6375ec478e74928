"""Reads KServe v2 messages of gRPC for routing, and converts other gRPC calls into the same calls
over HTTP.

The messages follow triton-inference-server/common, `protobuf/grpc_service.proto`, and grpc/grpc,
`doc/health-checking.md`. The module needs the extra `grpc`, so only code that serves or calls gRPC
imports it. Messages of inference go to the worker unchanged, and the worker decides about what the
router cannot read. Protobuf can build 40 bytes of one received byte, so only a limited part of a
long message is parsed, and the bytes of tensors are never copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError

from engine.wire.tensors import MAX_RANK, Buffer, Tensor
from router.body.paths import KSERVE_GRPC, OwnAnswers, Path
from router.body.protobuf import message_classes
from router.body.scan import LONG_BYTES, ScanLimits, Scanned, Sequenced
from router.engines.triton_inputs import MAX_INPUTS, Roles, RolesOf, usual_roles
from router.http.errors import ClientError, WorkerError
from router.http.reply import Usage
from router.kserve.content import (
    MAX_KEY_CHARS,
    MAX_VALUES,
    SHARED_MEMORY,
    USAGE_OUTPUTS,
    Content,
    KserveTarget,
    content_of,
    sequence_in,
    usage_of,
)
from router.kserve.http import NO_SUCH_MEMORY, last_event, unknown_model

SERVICE = "inference.GRPCInferenceService"
MAX_FIELDS = 4_096  # of a long message, at its top
MAX_READ_BYTES = 4 << 20  # of a message beside its raw tensors that are read
MAX_VERSION_CHARS = 64
MAX_REASON_CHARS = 4_096  # of an error text that is passed on

# A message's fields, numbered from 1 in this order; `map X`: by text.
_TABLE: Mapping[str, str] = MappingProxyType(
    {
        "ServerLiveResponse": "bool live",
        "ServerReadyResponse": "bool ready",
        "ServerMetadataResponse": "string name, string version, repeated string extensions",
        "ModelReadyRequest": "string name, string version",
        "ModelReadyResponse": "bool ready",
        "ModelMetadataRequest": "string name, string version",
        "ModelMetadataResponse": "string name, repeated string versions, string platform, "
        "repeated .TensorMetadata inputs, repeated .TensorMetadata outputs",
        "ModelMetadataResponse.TensorMetadata": "string name, string datatype, "
        "repeated int64 shape",
        "ModelConfigRequest": "string name, string version",
        "InferParameter": "bool bool_param, int64 int64_param, string string_param, "
        "double double_param, uint64 uint64_param",
        "InferTensorContents": "repeated bool bool_contents, repeated int32 int_contents, "
        "repeated int64 int64_contents, repeated uint32 uint_contents, "
        "repeated uint64 uint64_contents, repeated float fp32_contents, "
        "repeated double fp64_contents, repeated bytes bytes_contents",
        "ModelInferRequest": "string model_name, string model_version, string id, "
        "map InferParameter parameters, repeated .InferInputTensor inputs, "
        "repeated .InferRequestedOutputTensor outputs, repeated bytes raw_input_contents",
        "ModelInferRequest.InferInputTensor": "string name, string datatype, "
        "repeated int64 shape, map InferParameter parameters, InferTensorContents contents",
        "ModelInferRequest.InferRequestedOutputTensor": "string name, "
        "map InferParameter parameters",
        "ModelInferResponse": "string model_name, string model_version, string id, "
        "map InferParameter parameters, repeated .InferOutputTensor outputs, "
        "repeated bytes raw_output_contents",
        "ModelInferResponse.InferOutputTensor": "string name, string datatype, "
        "repeated int64 shape, map InferParameter parameters, InferTensorContents contents",
        "ModelStreamInferResponse": "string error_message, ModelInferResponse infer_response",
        "ModelStatisticsRequest": "string name, string version",
        "StatisticDuration": "uint64 count, uint64 ns",
        "InferStatistics": "StatisticDuration success, StatisticDuration fail, "
        "StatisticDuration queue, StatisticDuration compute_input, "
        "StatisticDuration compute_infer, StatisticDuration compute_output, "
        "StatisticDuration cache_hit, StatisticDuration cache_miss",
        "InferResponseStatistics": "StatisticDuration compute_infer, "
        "StatisticDuration compute_output, StatisticDuration success, StatisticDuration fail, "
        "StatisticDuration empty_response, StatisticDuration cancel",
        "InferBatchStatistics": "uint64 batch_size, StatisticDuration compute_input, "
        "StatisticDuration compute_infer, StatisticDuration compute_output",
        "MemoryUsage": "string type, int64 id, uint64 byte_size",
        "ModelStatistics": "string name, string version, uint64 last_inference, "
        "uint64 inference_count, uint64 execution_count, InferStatistics inference_stats, "
        "repeated InferBatchStatistics batch_stats, repeated MemoryUsage memory_usage, "
        "map InferResponseStatistics response_stats",
        "ModelStatisticsResponse": "repeated ModelStatistics model_stats",
        "RepositoryIndexRequest": "string repository_name, bool ready",
        "RepositoryIndexResponse": "repeated .ModelIndex models",
        "RepositoryIndexResponse.ModelIndex": "string name, string version, string state, "
        "string reason",
    }
)
_ONE_OF: Mapping[str, str] = MappingProxyType({"InferParameter": "parameter_choice"})
_CLASSES = message_classes("inference", _TABLE, _ONE_OF)
_Request, _Response = _CLASSES["ModelInferRequest"], _CLASSES["ModelStreamInferResponse"]
_Whole = _CLASSES["ModelInferResponse"]

# gRPC's codes are in grpc/grpc, `doc/statuscodes.md`.
_OF_CLIENTS = {401: 16, 403: 7, 404: 5, 405: 12, 408: 4, 413: 8, 421: 7, 429: 8, 431: 8, 499: 1}
# HTTP status -> gRPC code, for each status that an answer can have.
STATUS_OF: Mapping[int, int] = MappingProxyType(
    dict.fromkeys(range(200, 300), 0)
    | dict.fromkeys(range(400, 500), 3)
    | dict.fromkeys(range(500, 600), 13)
    | _OF_CLIENTS
    | {501: 12, 502: 14, 503: 14, 504: 4, 529: 14}  # 502: clients try again
)
# By gRPC's code: what Triton answers over HTTP with the same error. But for UNKNOWN (2), with which
# connections break, too: it is 500 and tried elsewhere; and DEADLINE_EXCEEDED (4): the deadline is
# the client's own, while 504 would be its worker's fault.
_HTTP_OF = (200, 499, 500, 400, 408, 404, 400, 403, 429, 400, 409, 400, 501, 500, 503, 500, 401)


def http_status(code: int) -> int:
    """Return the HTTP status for the gRPC code of a worker's answer."""
    return _HTTP_OF[code] if 0 <= code < len(_HTTP_OF) else 500


# Inference.

# Tags: number << 3 | wire type 2.
_INPUTS, _OUTPUTS, _RAW = 42, 50, 58
_CONTENTS: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "bool_contents",
        **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
        "INT64": "int64_contents",
        **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
        "UINT64": "uint64_contents",
        "BYTES": "bytes_contents",
    }
)


class _BrokenError(ValueError):
    """Raised for bytes that are not the expected protobuf message; the text has the reason."""


@dataclass(frozen=True, slots=True)
class GrpcTarget(KserveTarget):
    """The model that a gRPC inference request names. Lifetime: request."""

    id: str = ""
    sequence: Sequenced | None = None

    def scanner(
        self, header: Callable[[str], str | None], apart: str | None = None
    ) -> Callable[[bytes, ScanLimits], Scanned]:
        """Return a function that reads the message of this gRPC request.

        header: not used; other protocols need it.
        apart: the name of a model that shares a server with another model, but not its cache.
        """
        roles = self.roles(self.model)

        def read(message: bytes, limits: ScanLimits) -> Scanned:
            return self.scanned(infer_content(message, roles), limits, apart)

        return read


def target_of(message: bytes, streamed: bool = False, roles: RolesOf = usual_roles) -> GrpcTarget:
    """Return the model that a serialized ModelInferRequest names. `streamed` True means that it
    arrived by ModelStreamInfer. Raises ClientError.
    """
    try:
        head, _ = _cut(message, frozenset({_INPUTS, _OUTPUTS, _RAW}))
        request = _parsed(_Request, head)
    except _BrokenError as error:
        raise _no_request(error) from error
    _check_length("model_name", request.model_name, MAX_KEY_CHARS)
    _check_length("model_version", request.model_version, MAX_VERSION_CHARS)
    _check_length("id", request.id, MAX_KEY_CHARS)
    if not request.model_name:
        raise ClientError(404, unknown_model(""), "model_name", "model_not_found")
    return GrpcTarget(
        request.model_name,
        request.model_version or None,
        _STREAM if streamed else _UNARY,
        roles,
        request.id,
        sequence_in(_values(request.parameters)),
    )


def _no_request(error: _BrokenError) -> ClientError:
    return ClientError(400, f"the message is no ModelInferRequest: {error}", code="invalid_message")


def _check_length(name: str, value: str, most: int) -> None:
    if len(value) > most:
        why = f"`{name}` has more than {most} characters"
        raise ClientError(400, why, name, "string_too_long")


def infer_content(message: bytes, roles: Roles) -> Content:
    """Return what matters for routing in a ModelInferRequest. Raises ClientError for tensors in
    shared memory and for invalid messages.

    No worker could read an invalid message either, and on a stream some workers would not even
    answer it.
    """
    try:
        head, cut = _cut(message, frozenset({_RAW}))
        if len(head) > MAX_READ_BYTES:
            if SHARED_MEMORY.encode() in head:
                raise ClientError(400, NO_SUCH_MEMORY, code="shared_memory")
            why = f"over {MAX_READ_BYTES} bytes beside raw tensors"
            return Content(unread=(why,))
        request = _parsed(_Request, head)
    except _BrokenError as error:
        raise _no_request(error) from error
    if any(SHARED_MEMORY in one.parameters for one in (*request.inputs, *request.outputs)):
        raise ClientError(400, NO_SUCH_MEMORY, code="shared_memory")
    unread: list[str] = []
    raw: Sequence[Buffer] = cut or request.raw_input_contents
    inputs = _inputs(request.inputs, raw, roles, unread)
    content = content_of(roles, inputs, _values(request.parameters))
    return replace(content, unread=(*unread, *content.unread)) if unread else content


def _inputs(
    given: Sequence[Any], raw: Sequence[Buffer], roles: Roles, unread: list[str]
) -> dict[str, Tensor]:
    """Return the request's tensors that matter for routing."""
    if len(given) > MAX_INPUTS:
        unread.append(f"over {MAX_INPUTS} inputs")
        return {}
    if raw and len(raw) != len(given):
        unread.append(f"{len(raw)} raw contents for {len(given)} inputs")
        return {}
    found = {}
    for at, one in enumerate(given):
        if one.name not in roles.inputs or len(one.shape) > MAX_RANK:
            continue
        values: list[Any] | None = None
        if not raw:
            contents = _CONTENTS.get(one.datatype)
            values = list(getattr(one.contents, contents)[:MAX_VALUES]) if contents else []
        found[one.name] = Tensor(one.datatype, tuple(one.shape), raw[at] if raw else None, values)
    return found


def _values(parameters: Any) -> dict[str, Any]:
    """Return the values in a map of InferParameters, by name."""
    chosen = {name: (one, one.WhichOneof("parameter_choice")) for name, one in parameters.items()}
    return {name: getattr(one, kind) for name, (one, kind) in chosen.items() if kind}


def _parsed(kind: Any, message: bytes) -> Any:
    """Parse `message` as this kind of protobuf message. Raises _BrokenError."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise _BrokenError(str(error)[:200]) from error


def _cut(message: bytes, tags: frozenset[int]) -> tuple[bytes, list[memoryview]]:
    """Return a long message without the fields of these tags, and the contents of its raw tensors.

    A short message is returned whole, with no tensors. Raises _BrokenError.
    """
    if len(message) < LONG_BYTES:
        return message, []
    kept, raw, view, since = [], [], memoryview(message), 0
    for count, (tag, begin, value, end) in enumerate(_fields(view), 1):
        if count > MAX_FIELDS:
            raise _BrokenError(f"it has over {MAX_FIELDS} fields")
        if tag in tags:
            kept.append(view[since:begin])
            since = end
        if tag == _RAW:
            raw.append(view[value:end])
    kept.append(view[since:])
    return b"".join(kept), raw


_FIXED: Mapping[int, int] = MappingProxyType({1: 8, 5: 4})  # wire type -> bytes


def _fields(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield each field of a protobuf message as its tag and the positions of its start, value and
    end. Raises _BrokenError.
    """
    at = 0
    while at < len(view):
        begin = at
        tag, at = _varint(view, at)
        wire = tag & 7
        value = at
        if wire == 2:
            size, value = _varint(view, at)
            at = value + size
        elif wire == 0:
            _, at = _varint(view, at)
        elif wire in _FIXED:
            at += _FIXED[wire]
        else:
            raise _BrokenError(f"a field of wire type {wire} at byte {begin}")
        if at > len(view):
            raise _BrokenError(f"the field at byte {begin} is longer than the message")
        yield tag, begin, value, at


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at the position `at`, and the position after it."""
    number = 0
    for shift, byte in enumerate(view[at : at + 10]):
        number |= (byte & 127) << (7 * shift)
        if byte < 128:
            return number, at + shift + 1
    raise _BrokenError(f"no number at byte {at}")


# Answers of a stream.


def stream_error(message: str, id: str = "") -> bytes:
    """Return a message of a gRPC stream that has the error of the request `id`."""
    answer = _Response(error_message=_sound(message))
    if id:
        answer.infer_response.id = _sound(id)
    serialized: bytes = answer.SerializeToString()
    return serialized


def _sound(text: str) -> str:
    """Return the text without halves of surrogate pairs, which cannot be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def stream_failure(message: bytes) -> str:
    """Return the error text in a message of a stream; "" if it has none. Raises WorkerError for an
    invalid message.
    """
    failure: str = _answer(message).error_message
    return failure


def has_outputs(message: bytes) -> bool:
    """Return whether an answer has any tensors. Raises WorkerError for an invalid message."""
    answer = _answer(message).infer_response
    return bool(answer.outputs or answer.raw_output_contents)


def _answer(message: bytes) -> Any:
    try:
        return _parsed(_Response, message)
    except _BrokenError as error:
        why = f"it answered what is no ModelStreamInferResponse: {error}"
        raise WorkerError("garbage", why) from error


def answer_usage(
    message: bytes, streamed: bool, events: int, block_size: int | None
) -> Usage | None:
    """Return the token counts in an answer's last message, by the same rules as
    `http.answer_usage`.
    """
    if b"num_" not in message and b"kv_cache_" not in message:
        return None
    try:
        told = _answer(message).infer_response if streamed else _parsed(_Whole, message)
    except (_BrokenError, WorkerError):
        return None
    raw = told.raw_output_contents
    if len(raw) != len(told.outputs):  # tensors are always bytes there
        return None
    outputs = {
        one.name: Tensor(one.datatype, tuple(one.shape), data)
        for one, data in zip(told.outputs, raw, strict=True)
        if one.name in USAGE_OUTPUTS
    }
    usage = usage_of(outputs, block_size)
    if usage is not None and streamed:
        usage.completion_tokens = max(usage.completion_tokens or 0, events)
    return usage


def _path(rpc: str) -> Path:
    path = KSERVE_GRPC[f"/{SERVICE}/{rpc}"]

    def usage(kept: bytes, events: int, block_size: int | None) -> Usage | None:
        return answer_usage(kept, path.streams, events, block_size)

    return replace(path, answers=OwnAnswers(usage, last_event))


_UNARY, _STREAM = _path("ModelInfer"), _path("ModelStreamInfer")

# The other calls, as they are asked for over HTTP.

How = Literal["inference", "asked", "passed_on"]
_OF_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "ModelReady": "/ready",
        "ModelMetadata": "",
        "ModelStatistics": "/stats",
        "ModelConfig": "/config",
    }
)
# Calls whose messages have no further fields: any server answers them, or they are refused.
_FIXED_PATHS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ServerLive": ("GET", "/v2/health/live"),
        "ServerReady": ("GET", "/v2/health/ready"),
        "ServerMetadata": ("GET", "/v2"),
        "RepositoryModelLoad": ("POST", "/v2/repository/models/load"),
        "RepositoryModelUnload": ("POST", "/v2/repository/models/unload"),
        "TraceSetting": ("POST", "/v2/trace/setting"),
        "LogSettings": ("POST", "/v2/logging"),
        **{
            f"{kind}SharedMemory{verb}": (method, f"/v2/{kind.lower()}sharedmemory/{verb.lower()}")
            for kind in ("System", "Cuda")
            for verb, method in (("Status", "GET"), ("Register", "POST"), ("Unregister", "POST"))
        },
    }
)
# The service's calls of one request and one answer. A config's answer has too many messages to be
# made here: its worker's is passed on.
RPCS: Mapping[str, How] = MappingProxyType(
    {
        "ModelInfer": "inference",
        **dict.fromkeys((*_FIXED_PATHS, *_OF_MODEL, "RepositoryIndex"), "asked"),
        "ModelConfig": "passed_on",
    }
)
_ALL = "/v2/models/stats"
_READY: Mapping[str, str] = MappingProxyType(
    {"ServerLive": "live", "ServerReady": "ready", "ModelReady": "ready"}
)


def model_of(rpc: str, message: bytes) -> tuple[str, str | None]:
    """Return the name and the version (or None) of the model that a gRPC call names. Raises
    ClientError.
    """
    request = _parsed_request(rpc, message)
    _check_length("name", request.name, MAX_KEY_CHARS)
    version: str = request.version
    if version and not (version.isascii() and version.isdigit() and len(version) <= 20):
        why = f"failed to get model version from specified version string '{version[:64]}'"
        why += " (details: stol), version should be an integral value > 0"  # to the letter
        raise ClientError(400, why, "version")
    return request.name, version or None


def _parsed_request(rpc: str, message: bytes) -> Any:
    try:
        return _parsed(_CLASSES[f"{rpc}Request"], message)
    except _BrokenError as error:
        raise ClientError(400, f"the message is no {rpc}Request: {error}") from error


def http_request_of(rpc: str, message: bytes) -> tuple[str, str, bytes]:
    """Return the method, decoded path and body of the HTTP request that is equivalent to a gRPC
    call. Raises ClientError.
    """
    if rpc in _FIXED_PATHS:
        return *_FIXED_PATHS[rpc], b""
    if rpc == "RepositoryIndex":
        request = _parsed_request(rpc, message)
        if request.repository_name:  # as Triton says; 405 becomes UNIMPLEMENTED
            raise ClientError(405, "'repository_name' specification is not supported")
        return "POST", "/v2/repository/index", b'{"ready":true}' if request.ready else b"{}"
    name, version = model_of(rpc, message)
    if not name and rpc == "ModelStatistics":
        return "GET", _ALL, b""
    if not name and rpc != "ModelReady":  # which has no errors: it is not ready
        raise ClientError(404, unknown_model(""), "name", "model_not_found")
    name, of = name.replace("/", "%2F"), f"/versions/{version}" if version else ""
    return "GET", f"/v2/models/{name}{of}{_OF_MODEL[rpc]}", b""


def grpc_answer(rpc: str, status: int, body: bytes) -> bytes:
    """Convert a worker's HTTP answer into the answer of the gRPC call named `rpc`.

    Raises ClientError or WorkerError if the call failed. For a call that asks whether a model or
    server is ready, "not ready" is a normal answer.
    """
    if rpc in _READY and status not in (401, 403, 429):
        ready = _CLASSES[f"{rpc}Response"](**{_READY[rpc]: status == 200})
        serialized: bytes = ready.SerializeToString()
        return serialized
    if status != 200:  # always so of calls whose answers are not in the table
        reason = _reason(status, body)
        if 400 <= status < 500:
            raise ClientError(status, reason)
        raise WorkerError("status_5xx", reason)
    answer, listed = _CLASSES[f"{rpc}Response"], rpc == "RepositoryIndex"
    try:
        told: Any = msgspec.json.decode(body, type=list[Any] if listed else dict[str, Any])
        fields = {"models": told} if listed else told
        serialized = ParseDict(fields, answer(), ignore_unknown_fields=True).SerializeToString()
    except _BAD as error:
        why = f"it answered what is no {rpc}Response: {str(error)[:200]}"
        raise WorkerError("garbage", why) from error
    return serialized


_BAD = (
    *(msgspec.DecodeError, UnicodeError, RecursionError, ParseError),
    *(ValueError, TypeError, AttributeError),  # of what has another type than it should
)


def _reason(status: int, body: bytes) -> str:
    """Return the error text in the body of an answer, in Triton's form or the router's own."""
    try:
        error = msgspec.json.decode(body)["error"]
        error = error["message"] if isinstance(error, dict) else error
    except (msgspec.DecodeError, UnicodeError, RecursionError, KeyError, TypeError):
        error = None
    return error[:MAX_REASON_CHARS] if isinstance(error, str) else f"status {status}"
