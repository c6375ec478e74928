"""Reads and writes the messages of Envoy's ext_proc v3 that an endpoint picker exchanges.

Fields and their numbers are those of envoyproxy/data-plane-api, `envoy/service/ext_proc/v3` and
`envoy/config/core/v3/base.proto`; fields that are not listed here are skipped. Names of headers and
metadata are those of the Gateway API Inference Extension (proposal 004, 1.6) and of llm-d.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

from google.protobuf.message import DecodeError

from router.body.protobuf import message_classes
from router.http.reply import Header

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
CHOSEN_SPACE, SUBSET_SPACE = "envoy.lb", "envoy.lb.subset_hint"  # of metadata
# Headers of the conformance tests: the endpoints to choose from, and the one that served.
TEST_CHOICE, TEST_SERVED = "test-epp-endpoint-selection", b"x-conformance-test-served-endpoint"
_FILTER = "envoy.filters.http.ext_proc"  # of attributes

_TABLE = {
    "Value": "int32 null_value=1, double number_value=2, string string_value=3, bool bool_value=4, "
    "Struct struct_value=5, ListValue list_value=6",
    "Struct": "map Value fields=1",
    "ListValue": "repeated Value values=1",
    "Metadata": "map Struct filter_metadata=1",
    "HeaderValue": "string key=1, string value=2, bytes raw_value=3",
    "HeaderMap": "repeated HeaderValue headers=1",
    "HttpHeaders": "HeaderMap headers=1, bool end_of_stream=3",
    "HttpBody": "bytes body=1, bool end_of_stream=2, bool end_of_stream_without_message=3",
    "HttpTrailers": "HeaderMap trailers=1",
    "ProtocolConfiguration": "int32 request_body_mode=1, int32 response_body_mode=2",
    "ProcessingRequest": "HttpHeaders request_headers=2, HttpHeaders response_headers=3, "
    "HttpBody request_body=4, HttpBody response_body=5, HttpTrailers request_trailers=6, "
    "HttpTrailers response_trailers=7, Metadata metadata_context=8, map Struct attributes=9, "
    "bool observability_mode=10, ProtocolConfiguration protocol_config=11",
    "HeaderValueOption": "HeaderValue header=1, int32 append_action=3",
    "HeaderMutation": "repeated HeaderValueOption set_headers=1, repeated string remove_headers=2",
    "StreamedBodyResponse": "bytes body=1, bool end_of_stream=2",
    "BodyMutation": "bytes body=1, bool clear_body=2, StreamedBodyResponse streamed_response=3",
    "CommonResponse": "int32 status=1, HeaderMutation header_mutation=2, "
    "BodyMutation body_mutation=3, HeaderMap trailers=4, bool clear_route_cache=5",
    "HeadersResponse": "CommonResponse response=1",
    "BodyResponse": "CommonResponse response=1",
    "TrailersResponse": "HeaderMutation header_mutation=1",
    "HttpStatus": "int32 code=1",
    "ImmediateResponse": "HttpStatus status=1, HeaderMutation headers=2, bytes body=3, "
    "string details=5",
    "ProcessingResponse": "HeadersResponse request_headers=1, HeadersResponse response_headers=2, "
    "BodyResponse request_body=3, BodyResponse response_body=4, "
    "TrailersResponse request_trailers=5, TrailersResponse response_trailers=6, "
    "ImmediateResponse immediate_response=7, Struct dynamic_metadata=8",
}
_CLASSES = message_classes(
    "warmroute.ext_proc",
    _TABLE,
    {
        "Value": "kind",
        "ProcessingRequest": "request request_headers response_headers request_body "
        "response_body request_trailers response_trailers",
        "BodyMutation": "mutation",
        "ProcessingResponse": "response request_headers response_headers request_body "
        "response_body request_trailers response_trailers immediate_response",
    },
)
Request, Answer = _CLASSES["ProcessingRequest"], _CLASSES["ProcessingResponse"]
_OVERWRITE = 2  # OVERWRITE_IF_EXISTS_OR_ADD
_SUBSET_MAX = 4_096  # endpoints of a hint; those beyond are left out


class Mode(IntEnum):
    """The ways in which the data plane sends the bodies of one direction
    (`ProcessingMode.BodySendMode`).
    """

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


def read(data: bytes) -> Any:
    """Return a parsed message of Envoy, or None if it is malformed."""
    try:
        return Request.FromString(data)
    except (DecodeError, RecursionError):
        return None


def arm_of(message: Any) -> str | None:
    """Return the name of the part of a request or answer that a message contains, or None if it is
    unknown.
    """
    arm: str | None = message.WhichOneof("request")
    return arm


def headers_of(headers: Any) -> list[Header]:
    """Return the headers of a HeaderMap, in their order."""
    return [(one.key.encode(), one.raw_value or one.value.encode()) for one in headers.headers]


def attributes_of(message: Any) -> dict[str, str]:
    """Return the attributes of a message as texts, by name; an attribute without a value is ""."""
    found = message.attributes
    if _FILTER not in found:
        return {}
    return {name: _text(value) for name, value in found[_FILTER].fields.items()}


def _text(value: Any) -> str:
    kind = value.WhichOneof("kind")
    return f"{getattr(value, kind)}" if kind in ("string_value", "number_value") else ""


def metadata(message: Any, space: str, key: str) -> list[str] | None:
    """Return the texts in a list that a message's metadata has under `space` and `key`, or None if
    there is no such list.
    """
    spaces = message.metadata_context.filter_metadata
    if space not in spaces or key not in (fields := spaces[space].fields):
        return None
    value = fields[key]
    values = value.list_value.values if value.HasField("list_value") else [value]
    return endpoints_of(one.string_value for one in values)


def endpoints_of(texts: Iterable[str]) -> list[str]:
    """Return the single endpoints in texts that each list endpoints separated by commas."""
    parts = (part for text in texts for part in text.split(","))
    return [text for part in parts if (text := part.strip())][:_SUBSET_MAX]


def mutation(sets: Iterable[Header], removes: Iterable[str] = ()) -> Any:
    """Return a change of headers: `sets` replaces headers of the same names, and the headers named
    in `removes` are removed.
    """
    made = _CLASSES["HeaderMutation"](remove_headers=removes)
    for name, value in sets:
        option = made.set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = name.decode("latin-1").lower(), value
    return made


def chosen(endpoints: str) -> Any:
    """Return metadata that names the chosen endpoints, the best first."""
    made = _CLASSES["Struct"]()
    made.fields[CHOSEN_SPACE].struct_value.fields[DESTINATION].string_value = endpoints
    return made


def immediate(
    status: int, headers: Iterable[Header], body: bytes, details: str, removes: Sequence[str] = ()
) -> bytes:
    """Return a message with an answer that the data plane sends in place of a worker's answer.
    `details` is for the data plane's log.
    """
    made = Answer()
    response = made.immediate_response
    response.status.code, response.body, response.details = status, body, details
    response.headers.CopyFrom(mutation(headers, removes))
    data: bytes = made.SerializeToString()
    return data


def _plain(arm: str) -> bytes:
    """Return the reply to a message that changes nothing."""
    made = Answer()
    getattr(made, arm).SetInParent()
    data: bytes = made.SerializeToString()
    return data


PLAIN = {
    arm: _plain(arm)
    for arm in (
        *("request_headers", "request_body", "request_trailers"),
        *("response_headers", "response_body", "response_trailers"),
    )
}


def headers_answer(arm: str, change: Any, routed: str = "") -> bytes:
    """Return the reply to headers, or to a whole body, that changes headers. `routed` names the
    chosen endpoints, or is "".
    """
    made = Answer()
    common = getattr(made, arm).response
    common.header_mutation.CopyFrom(change)
    if routed:
        common.clear_route_cache = True
        made.dynamic_metadata.CopyFrom(chosen(routed))
    data: bytes = made.SerializeToString()
    return data


def whole_body(change: Any, routed: str, body: bytes | None) -> bytes:
    """Return the reply to a whole request body. `body` replaces the body; None leaves it
    unchanged.
    """
    made = Answer()
    common = made.request_body.response
    common.header_mutation.CopyFrom(change)
    common.clear_route_cache = True
    if body is not None:
        common.body_mutation.body = body
    made.dynamic_metadata.CopyFrom(chosen(routed))
    data: bytes = made.SerializeToString()
    return data


def piece(arm: str, body: bytes, end: bool) -> bytes:
    """Return a message with one piece of a streamed body."""
    made = Answer()
    streamed = getattr(made, arm).response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = body, end
    data: bytes = made.SerializeToString()
    return data
