"""Tests of KServe v2 messages over gRPC: read and written as by Triton's own client, and
mutated.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as oracle
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from router.body.scan import LONG_BYTES, ScanLimits
from router.engines.triton_inputs import MAX_INPUTS, Roles
from router.http.errors import ClientError, WorkerError
from router.http.reply import RETRYABLE_STATUSES, Usage
from router.kserve import messages
from router.kserve.content import MAX_KEY_CHARS, Content, Sequenced
from router.kserve.http import infer_content as http_content
from router.kserve.http import is_kserve
from router.kserve.messages import (
    MAX_READ_BYTES,
    RPCS,
    STATUS_OF,
    answer_usage,
    grpc_answer,
    has_outputs,
    http_request_of,
    http_status,
    infer_content,
    model_of,
    stream_error,
    stream_failure,
    target_of,
)
from tests.effort import QUICK

ROLES = Roles(
    text="text_input",
    ids="input_ids",
    lengths="input_lengths",
    max_tokens="max_tokens",
    stream="stream",
    session="session_id",
    images=("image",),
    why="T",
)
_FIELDS = ("name", "number", "type", "is_repeated")


def parts(field: FieldDescriptor) -> tuple[Any, ...]:
    """Return the attributes of a message field that decide how it is written."""
    kind = field.message_type.full_name if field.message_type else None
    choice = field.containing_oneof.name if field.containing_oneof else None
    return (*(getattr(field, name) for name in _FIELDS), kind, choice)


def test_each_message_has_the_same_fields_as_in_triton() -> None:
    for name, ours in messages._CLASSES.items():
        if name == "HealthCheckRequest":  # of another file, and its only field is the first
            continue
        theirs = oracle.DESCRIPTOR.pool.FindMessageTypeByName(f"inference.{name}")
        assert list(map(parts, ours.DESCRIPTOR.fields)) == list(map(parts, theirs.fields)), name
    service = oracle.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert service.full_name == messages.SERVICE
    assert {one.name for one in service.methods} == {*RPCS, "ModelStreamInfer"}


# A tensor: its name, its type, its rows.
Tensor = tuple[str, str, list[list[Any]]]
NUMPY = {"INT32": "<i4", "INT64": "<i8", "BOOL": "?"}
TYPED = {
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "BOOL": "bool_contents",
}


def rows(values: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[list[list[Any]]]:
    """Return a strategy for lists of one to `most` rows of the same width."""
    return st.integers(1, most).flatmap(
        lambda width: st.lists(st.lists(values, min_size=width, max_size=width), min_size=1)
    )


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """Draw the input tensors of a request, in any order."""
    number, kind = st.integers(-5, 2**31 - 1), st.sampled_from(["INT32", "INT64"])
    found: list[Tensor] = [
        ("text_input", "BYTES", draw(rows(st.text(max_size=9)))),
        ("input_ids", draw(kind), draw(rows(number, 5))),
        ("input_lengths", draw(kind), draw(rows(number, 1))),
        ("max_tokens", draw(kind), draw(rows(number, 1))),
        ("stream", "BOOL", draw(rows(st.booleans(), 1))),
        ("session_id", "BYTES", draw(rows(st.text(max_size=9), 1))),
        ("other", "INT64", draw(rows(number))),
    ]
    kept = draw(st.lists(st.sampled_from(found), unique_by=lambda one: one[0], min_size=1))
    return draw(st.permutations(kept))


PARAMETERS = st.dictionaries(
    st.sampled_from(["sequence_id", "sequence_start", "max_tokens", "session_id", "x"]),
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9) | st.floats(0, 9),
)


def raw_of(kind: str, values: list[list[Any]]) -> bytes:
    """Return the raw bytes of a tensor with these values."""
    if kind != "BYTES":
        return np.array(values, NUMPY[kind]).tobytes()
    texts = [text.encode() for row in values for text in row]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def over_http(given: list[Tensor], parameters: dict[str, Any], binary: bool) -> Content:
    """Return what the router's HTTP reader makes of the same request."""
    inputs: list[dict[str, Any]] = []
    tail = b""
    for name, kind, values in given:
        one = {"name": name, "datatype": kind, "shape": [len(values), len(values[0])]}
        raw = raw_of(kind, values)
        more = {"parameters": {"binary_data_size": len(raw)}} if binary else {"data": values}
        tail += raw if binary else b""
        inputs.append(one | more)
    head = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    return http_content(head + tail, str(len(head)) if binary else None, ROLES)


def request_of(given: list[Tensor], parameters: dict[str, Any], raw: bool) -> Any:
    """Return the same request as a gRPC message, with raw contents as Triton's client writes it
    (`raw`) or with typed contents as other clients do.
    """
    request = oracle.ModelInferRequest(model_name="m", model_version="3", id="7")
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in parameters.items():
        setattr(request.parameters[name], kinds[type(value)], value)
    for name, kind, values in given:
        one = request.inputs.add(name=name, datatype=kind, shape=[len(values), len(values[0])])
        if raw:
            request.raw_input_contents.append(raw_of(kind, values))
            continue
        flat = [value for row in values for value in row]
        texts = [text.encode() for text in flat] if kind == "BYTES" else flat
        getattr(one.contents, TYPED[kind]).extend(texts)
    return request


def plain(content: Content) -> Content:
    """Return the content with token ids as lists, so that it can be compared."""
    ids: Any = tuple(map(np.ndarray.tolist, content.ids))
    return replace(content, ids=ids)


@given(tensors(), PARAMETERS, st.booleans())
def test_a_request_reads_the_same_in_its_four_forms(given, parameters, long: bool) -> None:
    """A request is read alike in each of its four forms: JSON and bytes over HTTP, and typed and
    raw contents over gRPC.
    """
    found = [over_http(given, parameters, binary) for binary in (False, True)]
    for raw in (False, True):
        request = request_of(given, parameters, raw)
        if long:  # then it is not built whole
            request.inputs.add(name="pixels", datatype="UINT8", shape=[1, LONG_BYTES])
            data = bytes(LONG_BYTES)
            if raw:
                request.raw_input_contents.append(data)
            else:
                request.inputs[-1].contents.bytes_contents.append(data)
        found.append(infer_content(request.SerializeToString(), ROLES))
    assert [plain(one) for one in found] == [plain(found[0])] * 4


def test_different_images_give_different_media_keys() -> None:
    def read(data: bytes, raw: bool) -> str | None:
        request = oracle.ModelInferRequest(model_name="m")
        one = request.inputs.add(name="image", datatype="BYTES", shape=[1])
        (request.raw_input_contents if raw else one.contents.bytes_contents).append(data)
        return infer_content(request.SerializeToString(), ROLES).media

    for raw in (True, False):
        for size in (9, LONG_BYTES):
            a, b = b"\x01" * size, b"\x02" * size
            assert read(a, raw) == read(a, raw) != read(b, raw)


@given(st.permutations(range(4)), st.booleans())
def test_fields_may_come_in_any_order(order: list[int], long: bool) -> None:
    """Fields of a message may come in any order, since libraries of other languages may write them
    so.
    """
    texts = [("text_input", "BYTES", [["a"]]), ("max_tokens", "INT32", [[5]])]
    request = request_of(texts, {"sequence_id": 3}, True)
    if long:
        request.inputs.add(name="other", datatype="UINT8", shape=[LONG_BYTES])
        request.raw_input_contents.append(bytes(LONG_BYTES))
    fields = request.ListFields()
    pieces = []
    for names in (["model_name", "id"], ["parameters"], ["inputs"], ["raw_input_contents"]):
        part = oracle.ModelInferRequest()
        part.CopyFrom(request)
        for field, _ in fields:
            if field.name not in names:
                part.ClearField(field.name)
        pieces.append(part.SerializeToString())
    message = b"".join(pieces[at] for at in order)
    content, target = infer_content(message, ROLES), target_of(message)
    assert (content.texts, content.max_output_tokens) == (("a",), 5)
    assert (target.model, target.id, content.sequence) == ("m", "7", Sequenced("3"))
    assert target.sequence == content.sequence


@pytest.mark.parametrize("size", [1, LONG_BYTES])
def test_the_target_and_the_routing_fields_are_read_from_a_message(size: int) -> None:
    request = request_of([("text_input", "BYTES", [["a" * size]])], {}, True)
    message = request.SerializeToString()
    target = target_of(message, roles=lambda model: ROLES)
    assert (target.model, target.version, target.id) == ("m", "3", "7")
    scanned = target.scanner({}.get, "m")(message, ScanLimits())
    assert (scanned.model, scanned.stream, scanned.prompts) == ("m", False, ("a" * size,))
    assert (scanned.cache_salt, scanned.routed_by) == ("model=m version=3", "T")
    streamed = target_of(message, True, lambda model: ROLES)
    assert streamed.scanner({}.get)(message, ScanLimits()).stream


@pytest.mark.parametrize("field", ["model_name", "model_version", "id"])
def test_the_lengths_of_names_are_bounded(field: str) -> None:
    most = 64 if field == "model_version" else MAX_KEY_CHARS
    request = oracle.ModelInferRequest(model_name="m")
    setattr(request, field, "x" * most)
    target_of(request.SerializeToString())
    setattr(request, field, "x" * (most + 1))
    with pytest.raises(ClientError, match=f"`{field}` has more than {most}"):
        target_of(request.SerializeToString())


def test_a_request_without_a_model_name_gets_404() -> None:
    with pytest.raises(ClientError, match="unknown model: '' is not found") as caught:
        target_of(b"")
    assert caught.value.status == 404


@pytest.mark.parametrize("size", [1, LONG_BYTES, MAX_READ_BYTES])
@pytest.mark.parametrize("of", ["inputs", "outputs"])
def test_shared_memory_is_refused(of: str, size: int) -> None:
    request = oracle.ModelInferRequest(model_name="m")
    one = getattr(request, of).add(name="a")
    one.parameters["shared_memory_region"].string_param = "r"
    request.inputs.add(name="text_input").contents.bytes_contents.append(b"x" * size)
    with pytest.raises(ClientError, match="shared memory is of one host"):
        infer_content(request.SerializeToString(), ROLES)


def test_unreadable_contents_are_passed_to_the_worker() -> None:
    def message_with(change: Any) -> bytes:
        request = request_of([("text_input", "BYTES", [["a"]])], {}, True)
        change(request)
        serialized: bytes = request.SerializeToString()
        return serialized

    large = b"x" * (MAX_READ_BYTES + 1)
    for message, why in (
        (
            message_with(lambda one: one.raw_input_contents.append(b"")),
            "2 raw contents for 1 inputs",
        ),
        (
            message_with(lambda one: [one.inputs.add() for _ in range(MAX_INPUTS)]),
            "over 256 inputs",
        ),
        (
            message_with(lambda one: one.inputs[0].contents.bytes_contents.append(large)),
            "over 4194304",
        ),
        (
            message_with(lambda one: setattr(one.inputs[0], "datatype", "INT32")),
            "text_input: is INT32",
        ),
    ):
        found = infer_content(message, ROLES)
        assert not found.texts
        assert why in found.unread[0]


def test_malformed_messages_are_refused() -> None:
    torn = request_of([("text_input", "BYTES", [["a"]])], {}, True).SerializeToString()
    for message, why in (
        (b"\x0a\x05m", "no ModelInferRequest: "),
        (b"\x0a\x01m" + b"\x22\0" * LONG_BYTES, "over 4096 fields"),
        (b"\x0a\x01m\x0b" + bytes(LONG_BYTES), "wire type 3"),
        (b"\x0a\x01m" + b"\xff" * LONG_BYTES, "no number"),
        (b"\x0a\x01m\x3a\xff\xff\xff\x0f" + bytes(LONG_BYTES), "longer than the message"),
        (torn + b"\x2a\x03\xff\xff\xff", "no ModelInferRequest: "),
        (torn + b"\x2a\x03\xff\xff\xff\x3a\x80\x80\x02" + bytes(LONG_BYTES), "Request: "),
    ):
        with pytest.raises(ClientError, match=why) as refused:
            infer_content(message, ROLES)
        assert refused.value.status == 400


def test_http_statuses_map_to_grpc_codes() -> None:
    """HTTP statuses map to gRPC's codes, whose expected numbers come from the grpc
    package itself.
    """
    grpc = pytest.importorskip("grpc")
    codes = {code.value[0]: code.name for code in grpc.StatusCode}
    for status, name in (
        (200, "OK"),
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (404, "NOT_FOUND"),
        (408, "DEADLINE_EXCEEDED"),
        (413, "RESOURCE_EXHAUSTED"),
        (415, "INVALID_ARGUMENT"),
        (429, "RESOURCE_EXHAUSTED"),
        (499, "CANCELLED"),
        (500, "INTERNAL"),
        (501, "UNIMPLEMENTED"),
        (502, "UNAVAILABLE"),
        (503, "UNAVAILABLE"),
        (504, "DEADLINE_EXCEEDED"),
        (529, "UNAVAILABLE"),
    ):
        assert codes[STATUS_OF[status]] == name
    assert set(STATUS_OF) >= {*range(400, 600), 200}
    again = {codes[code] for code in codes if http_status(code) in RETRYABLE_STATUSES}
    assert again == {"UNKNOWN", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "RESOURCE_EXHAUSTED"}
    assert http_status(12) == 501
    assert [http_status(code) for code in (-1, 17, 10**9)] == [500] * 3
    for status in (400, 401, 403, 404, 408, 429, 499, 500, 501, 503):
        assert http_status(STATUS_OF[status]) == status


@pytest.mark.parametrize("streamed", [False, True])
def test_token_counts_are_read_from_an_answer(streamed: bool) -> None:
    answer = oracle.ModelStreamInferResponse()
    told = answer.infer_response
    for name, kind, value in (
        ("num_input_tokens", "INT32", 100),
        ("kv_cache_reused_blocks", "INT64", 3),
    ):
        told.outputs.add(name=name, datatype=kind, shape=[1])
        told.raw_output_contents.append(value.to_bytes(4 if kind == "INT32" else 8, "little"))
    message = answer.SerializeToString() if streamed else told.SerializeToString()
    usage = answer_usage(message, streamed, 7, 16)
    assert usage == Usage(100, 7 if streamed else None, 48)
    assert answer_usage(message[:-1], streamed, 7, 16) is None
    told.outputs.add(name="text", datatype="BYTES", shape=[1])  # one more than contents
    message = answer.SerializeToString() if streamed else told.SerializeToString()
    assert answer_usage(message, streamed, 7, 16) is None
    assert answer_usage(b"", streamed, 7, 16) is None


def test_outputs_and_failures_of_stream_answers_are_recognized() -> None:
    answer = oracle.ModelStreamInferResponse()
    answer.infer_response.id = "é"
    data = answer.SerializeToString
    assert (stream_failure(data()), has_outputs(data())) == ("", False)
    answer.infer_response.outputs.add(name="o")
    assert has_outputs(data())
    for id in ("7", ""):
        failed = oracle.ModelStreamInferResponse.FromString(stream_error("no\ud800", id))
        assert (failed.error_message, failed.infer_response.id) == ("no?", id)
        assert failed.HasField("infer_response") == bool(id)
        assert stream_failure(stream_error("no", id)) == "no"
    for read in (stream_failure, has_outputs):
        with pytest.raises(WorkerError, match="no ModelStreamInferResponse"):
            read(b"\xff")


COUNTS = st.integers(0, 2**64 - 1)


@st.composite
def statistics(draw: st.DrawFn) -> Any:
    """Draw statistics that a server may report of its models."""
    found = oracle.ModelStatisticsResponse()
    for name in draw(st.lists(st.text(max_size=3), max_size=3)):
        row = found.model_stats.add(name=name, version="1", inference_count=draw(COUNTS))
        for kind in ("success", "fail", "queue", "compute_infer", "cache_hit"):
            duration = getattr(row.inference_stats, kind)
            duration.count, duration.ns = draw(COUNTS), draw(COUNTS)
        for size in draw(st.lists(COUNTS, max_size=2)):
            row.batch_stats.add(batch_size=size).compute_infer.ns = draw(COUNTS)
        row.memory_usage.add(type="GPU", id=-1, byte_size=draw(COUNTS))
        row.response_stats["0"].empty_response.count = draw(COUNTS)
    return found


def numbers(value: Any) -> Any:
    """Return the JSON value with 64-bit numbers as numbers, as Triton writes them; protobuf's JSON
    writes them as strings.
    """
    if isinstance(value, dict):
        return {name: numbers(one) if name not in TEXTS else one for name, one in value.items()}
    if isinstance(value, list):
        return [numbers(one) for one in value]
    return int(value) if isinstance(value, str) else value


TEXTS = ("name", "version", "type")


@given(statistics())
def test_statistics_survive_the_conversion_through_json(sent: Any) -> None:
    told = numbers(MessageToDict(sent, preserving_proto_field_name=True))
    body = json.dumps(told | {"model_stats": told.get("model_stats", []), "more": 1}).encode()
    assert (
        oracle.ModelStatisticsResponse.FromString(grpc_answer("ModelStatistics", 200, body)) == sent
    )


TENSOR = {"name": "t", "datatype": "INT32", "shape": [-1, 2]}


@pytest.mark.parametrize(
    ("rpc", "told", "wanted"),
    [
        (
            "ServerMetadata",
            {"name": "warmroute", "version": "2", "extensions": ["a", "b"]},
            oracle.ServerMetadataResponse(name="warmroute", version="2", extensions=["a", "b"]),
        ),
        (
            "ModelMetadata",
            {"name": "m", "versions": ["1"], "platform": "p", "inputs": [TENSOR], "outputs": []},
            oracle.ModelMetadataResponse(
                name="m",
                versions=["1"],
                platform="p",
                inputs=[oracle.ModelMetadataResponse.TensorMetadata(**TENSOR)],
            ),
        ),
        (
            "RepositoryIndex",
            [{"name": "m", "version": "1", "state": "READY"}, {"name": "n", "reason": "r"}],
            oracle.RepositoryIndexResponse(
                models=[
                    oracle.RepositoryIndexResponse.ModelIndex(name="m", version="1", state="READY"),
                    oracle.RepositoryIndexResponse.ModelIndex(name="n", reason="r"),
                ]
            ),
        ),
    ],
)
def test_http_answers_become_grpc_messages(rpc: str, told: Any, wanted: Any) -> None:
    assert type(wanted).FromString(grpc_answer(rpc, 200, json.dumps(told).encode())) == wanted


@pytest.mark.parametrize(
    ("rpc", "status", "ready"),
    [
        ("ServerLive", 200, True),
        ("ServerReady", 400, False),
        ("ModelReady", 200, True),
        ("ModelReady", 404, False),
        ("ModelReady", 503, False),
    ],
)
def test_a_not_ready_model_is_an_answer_and_not_an_error(
    rpc: str, status: int, ready: bool
) -> None:
    kind = getattr(oracle, f"{rpc}Response")
    found = kind.FromString(grpc_answer(rpc, status, b""))
    assert [value for _, value in found.ListFields()] == [True] * ready
    with pytest.raises(ClientError, match="who are you"):
        grpc_answer(rpc, 401, b'{"error":{"message":"who are you"}}')


def test_http_refusals_and_failures_become_errors() -> None:
    for status, body, why in (
        (404, b'{"error":"no such model"}', "no such model"),
        (400, b'{"error":{"message":"not here"}}', "not here"),
        (400, b"\xff", "status 400"),
        (400, b'{"error":[]}', "status 400"),
    ):
        with pytest.raises(ClientError, match=why) as refused:
            grpc_answer("ModelMetadata", status, body)
        assert refused.value.status == status
    for rpc in RPCS:  # of those that are always refused, too
        if rpc not in ("ModelInfer", "ModelConfig", "ServerLive", "ServerReady", "ModelReady"):
            with pytest.raises(ClientError, match="not here"):
                grpc_answer(rpc, 400, b'{"error":"not here"}')
    with pytest.raises(WorkerError, match="no server answered") as failed:
        grpc_answer("ModelMetadata", 503, b'{"error":"no server answered"}')
    assert failed.value.kind == "status_5xx"
    for body in (b"", b"7", b"[]", b'{"inputs":{"a":1}}', b'{"name":[]}', b'{"inputs":[7]}'):
        with pytest.raises(WorkerError, match="no ModelMetadataResponse"):
            grpc_answer("ModelMetadata", 200, body)


@pytest.mark.parametrize(
    ("rpc", "request_", "wanted"),
    [
        ("ServerLive", None, ("GET", "/v2/health/live", b"")),
        ("ServerReady", None, ("GET", "/v2/health/ready", b"")),
        ("ServerMetadata", None, ("GET", "/v2", b"")),
        ("ModelReady", ("a/b", "2"), ("GET", "/v2/models/a%2Fb/versions/2/ready", b"")),
        ("ModelMetadata", ("é m", ""), ("GET", "/v2/models/é m", b"")),
        ("ModelStatistics", ("m", ""), ("GET", "/v2/models/m/stats", b"")),
        ("ModelStatistics", ("", ""), ("GET", "/v2/models/stats", b"")),
        ("ModelConfig", ("m", "1"), ("GET", "/v2/models/m/versions/1/config", b"")),
    ],
)
def test_grpc_calls_become_http_requests(rpc: str, request_: Any, wanted: Any) -> None:
    kind = getattr(oracle, f"{rpc}Request")
    message = kind() if request_ is None else kind(name=request_[0], version=request_[1])
    assert http_request_of(rpc, message.SerializeToString()) == wanted
    if request_ is not None:
        named = (request_[0], request_[1] or None)
        assert model_of(rpc, message.SerializeToString()) == named


def test_the_repository_index_becomes_an_http_request() -> None:
    request = oracle.RepositoryIndexRequest(ready=True)
    path = "/v2/repository/index"
    assert http_request_of("RepositoryIndex", request.SerializeToString()) == (
        "POST",
        path,
        b'{"ready":true}',
    )
    assert http_request_of("RepositoryIndex", b"") == ("POST", path, b"{}")
    request = oracle.RepositoryIndexRequest(repository_name="r")
    with pytest.raises(ClientError, match="specification is not supported") as refused:
        http_request_of("RepositoryIndex", request.SerializeToString())
    assert STATUS_OF[refused.value.status] == STATUS_OF[501]


def test_each_call_maps_to_a_kserve_path() -> None:
    for rpc, how in RPCS.items():
        if how == "asked" and rpc != "ModelMetadata":
            assert is_kserve(http_request_of(rpc, b"")[1])
    assert [rpc for rpc, how in RPCS.items() if how == "passed_on"] == ["ModelConfig"]


def test_calls_with_invalid_names_or_versions_are_refused() -> None:
    for fields, why in (
        ({"name": "x" * 1_025}, "more than 1024"),
        (
            {"name": "m", "version": "x"},
            r"'x' \(details: stol\), version should be an integral value",
        ),
        ({"name": "m", "version": "١"}, "version should be an integral value"),
        ({}, "unknown model"),
    ):
        message = oracle.ModelMetadataRequest(**fields).SerializeToString()
        with pytest.raises(ClientError, match=why):
            http_request_of("ModelMetadata", message)
    with pytest.raises(ClientError, match="no ModelReadyRequest"):
        http_request_of("ModelReady", b"\x0a\x05m")
    assert http_request_of("ModelReady", b"") == ("GET", "/v2/models//ready", b"")


def sound_messages() -> list[bytes]:
    """Return valid messages of each form, short and long."""
    given = [("text_input", "BYTES", [["hello", "a"]]), ("input_ids", "INT64", [[1, 2], [3, 4]])]
    given.append(("max_tokens", "INT32", [[7]]))
    found = []
    for raw in (True, False):
        for size in (1, LONG_BYTES):
            request = request_of(given, {"sequence_id": "s", "sequence_end": True}, raw)
            other = request.inputs.add(name="image", datatype="BYTES", shape=[1])
            contents = request.raw_input_contents if raw else other.contents.bytes_contents
            contents.append(b"x" * size)
            request.outputs.add(name="text_output").parameters["classification"].int64_param = 2
            found.append(request.SerializeToString())
    return found


def mutated(draw: random.Random, message: bytes) -> bytes:
    """Return the message with bytes changed, cut, doubled or moved, mostly near its beginning,
    where the fields are.
    """
    data = bytearray(message)
    for _ in range(draw.randint(1, 4)):
        ends = (len(data), min(len(data), 300))
        at, many = draw.randrange(draw.choice(ends) + 1), draw.randint(1, 8)
        match draw.randrange(5):
            case 0:
                data[at : at + many] = draw.randbytes(many)
            case 1:
                del data[at : at + many]
            case 2:
                data[at:at] = data[at : at + many]
            case 3:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case _:
                data[at:at] = draw.choice([b"\xff" * 9, b"\x22\x00", b"\x2a\x00", b"\x0b", b"\x80"])
    return bytes(data)


def test_mutated_messages_are_read_or_refused() -> None:
    """Mutated messages break nothing: for any bytes the reader returns a request or raises an error
    that blames the client or the worker.
    """
    draw = random.Random(22)
    requests = sound_messages()
    answer = oracle.ModelStreamInferResponse()
    answer.infer_response.outputs.add(name="o").shape.append(1)
    answer.infer_response.parameters["triton_final_response"].bool_param = True
    told = json.dumps({"model_stats": [{"name": "m", "batch_stats": [{"batch_size": 1}]}]})
    rounds = 2_000 if QUICK else 100_000
    read_well = understood = 0
    for _ in range(rounds):
        message = mutated(draw, draw.choice(requests))
        content = outcome(infer_content, message, ROLES)
        if isinstance(content, Content):
            read_well += bool(content.texts or content.ids)
        else:
            assert content.code in ("shared_memory", "invalid_message")
        target = outcome(target_of, message, draw.random() < 0.5)
        if not isinstance(target, ClientError):
            assert 0 < len(target.model) <= MAX_KEY_CHARS
            understood += 1
        for rpc in ("ModelReady", "ModelStatistics", "RepositoryIndex"):
            call = outcome(http_request_of, rpc, message[:40])
            assert (
                call.status in (400, 404, 405)
                if isinstance(call, ClientError)
                else is_kserve(call[1])
            )
        torn, body = mutated(draw, answer.SerializeToString()), mutated(draw, told.encode())
        found = [outcome(read, torn) for read in (stream_failure, has_outputs)]
        for rpc in ("ModelStatistics", "RepositoryIndex", "ModelMetadata"):
            found.append(outcome(grpc_answer, rpc, 200, body))
        assert {one.kind for one in found if isinstance(one, WorkerError)} <= {"garbage"}
        assert not any(isinstance(one, ClientError) for one in found)
    assert read_well * 10 > rounds
    assert understood * 10 > rounds


def outcome(read: Callable[..., Any], *given: Any) -> Any:
    """Return the result of `read`, or the client's or worker's error that it raises."""
    try:
        return read(*given)
    except (ClientError, WorkerError) as error:
        return error


@given(st.binary())
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for message in (data, data + b"\x3a\x80\x80\x02" + bytes(LONG_BYTES)):
        outcome(infer_content, message, ROLES)
        outcome(target_of, message)


# Protobuf makes up to 40 bytes of one: each is read by a process of its own, which tells its peak.
HOSTILE = """
import resource, sys
from router.http.errors import ClientError
from router.engines.triton_inputs import Roles
from router.kserve.messages import infer_content, target_of

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def field(tag, data):
    size, head = len(data), bytes([tag])
    while size > 127:
        head, size = head + bytes([size & 127 | 128]), size >> 7
    return head + bytes([size]) + data

roles = Roles(text="text_input", ids="input_ids")
few, many = (4 << 20) - 64, 16 << 20
named = field(10, b"text_input") + field(18, b"BYTES")
ids = field(10, b"input_ids") + field(18, b"INT64")
entries = b"".join(field(34, field(10, b"%x" % n) + b"\\x12\\0") for n in range(few // 12))
before = peak()
for body in (
    b"\\x2a\\0" * (many // 2),
    b"\\x32\\0" * (many // 2),
    b"\\x3a\\0" * (many // 2),
    b"\\x22\\0" * (many // 2),
    b"\\x78\\1" * (many // 2),
    field(42, b"\\x22\\0" * (few // 2)),
    field(42, b"\\x22\\0" * (many // 2)),
    field(42, entries),
    field(50, entries.replace(b"\\x22", b"\\x12")),
    field(42, named + field(42, b"\\x42\\0" * (few // 2))),
    field(42, ids + field(42, field(26, b"\\1" * few))),
    field(42, named + field(26, b"\\1" * few)),
    field(42, named) + field(58, bytes(many)),
):
    try:
        target_of(b"\\x0a\\1m" + body)
        infer_content(b"\\x0a\\1m" + body, roles)
    except ClientError:
        pass
print(peak() - before)
"""


def test_reading_a_message_takes_little_more_memory_than_its_size() -> None:
    """Reading a message takes little more memory than the message: the program may take 256 MiB,
    and some messages of 4 and 16 MiB exist at once.
    """
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256
