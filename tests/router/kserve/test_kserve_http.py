"""Tests of KServe v2 bodies over HTTP, valid and mutated, and of how the router interprets Triton's
own refusals.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.body.scan import ScanLimits, Scanned
from router.engines.triton import is_triton_queue_full
from router.engines.triton_inputs import MAX_INPUTS, Roles
from router.http.errors import ClientError
from router.kserve.http import (
    LENGTH_HEADER,
    generate_content,
    infer_content,
    is_kserve,
    target_of,
    tritons_error,
)
from router.kserve.port import merged
from tests.effort import QUICK, examples

ROLES = Roles(text="text_input", ids="input_ids", max_tokens="max_tokens", stream="stream", why="T")
INFER, STREAM = "/v2/models/m/infer", "/v2/models/m/versions/3/generate_stream"


def body_of(*, binary: bool) -> tuple[bytes, str | None]:
    """Return an `infer` body with a text and an output limit, and the value of the header that says
    where tensors begin (None for JSON).
    """
    text, most = b"\x05\0\0\0hello", np.array([7], "<i4").tobytes()
    inputs: list[dict[str, Any]] = [
        {"name": "image", "datatype": "FP32", "shape": [1]},
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1]},
    ]
    if not binary:
        for one, data in zip(inputs, ([0.5], [["hello"]], [[7]]), strict=True):
            one["data"] = data
        return json.dumps({"inputs": inputs}).encode(), None
    tensors = (b"\0\0\0\0", text, most)
    for one, raw in zip(inputs, tensors, strict=True):
        one["parameters"] = {"binary_data_size": len(raw)}
    head = json.dumps({"inputs": inputs, "parameters": {"sequence_id": 3}}).encode()
    return head + b"".join(tensors), str(len(head))


def read(path: str, body: bytes, **headers: str) -> Scanned:
    """Return what the router reads from a request's path, body and headers."""
    target = target_of(path, lambda model: ROLES)
    assert target is not None
    return target.scanner(headers.get)(body, ScanLimits())


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("coding", ["", "identity", "gzip", "deflate"])
def test_json_and_binary_tensors_are_read(binary: bool, coding: str) -> None:
    body, length = body_of(binary=binary)
    headers = {"content-encoding": coding} | ({LENGTH_HEADER: length} if length else {})
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}.get(coding, bytes)(body)
    found = read(INFER, packed, **headers)
    assert (found.model, found.prompts, found.max_output_tokens) == ("m", ("hello",), 7)
    assert (found.stream, found.routed_by) == (False, "T")
    assert (found.sequence is not None) == binary


def test_the_fields_of_generate_are_read() -> None:
    body = {"text_input": ["a", "b"], "max_tokens": 5, "parameters": {"x": 1}, "other": [[{}]]}
    found = read(STREAM, json.dumps(body).encode())
    assert (found.prompts, found.max_output_tokens, found.stream) == (("a", "b"), 5, True)
    assert found.cache_salt == "version=3"
    ids = read(STREAM, b'{"input_ids":[[1,2],[3,4]]}')
    assert [one.tolist() for one in ids.prompts if not isinstance(one, str)] == [[1, 2], [3, 4]]


def test_a_raw_body_is_read_as_one_tensor() -> None:
    assert infer_content(b"hello", "0", ROLES).texts == ("hello",)


@pytest.mark.parametrize("of", ["inputs", "outputs"])
def test_shared_memory_is_refused(of: str) -> None:
    one = {"name": "a", "parameters": {"shared_memory_region": "r"}}
    with pytest.raises(ClientError, match="shared memory is of one host"):
        infer_content(json.dumps({of: [one]}).encode(), None, ROLES)


def test_an_unreadable_body_is_passed_to_the_worker() -> None:
    many = {"inputs": [{"name": "text_input"}] * (MAX_INPUTS + 1)}
    body, _ = body_of(binary=True)
    for data, length, why in (
        (b"{", None, "request body"),
        (b"", None, "request body"),
        (b"[" * 100_000, None, "request body"),
        (body, "99999", "must be a length"),
        (body, "-1", "must be a length"),
        (body[:-14], str(body.index(b"\0\0\0\0\x05")), "bytes are left"),
        (json.dumps(many).encode(), None, "over"),
    ):
        found = infer_content(data, length, ROLES)
        assert not found.texts
        assert why in found.unread[0]
    odd = read(INFER, body, **{"content-encoding": "br"})
    assert "compressed" in odd.routed_by
    assert "compressed" in read(INFER, b"no gzip", **{"content-encoding": "gzip"}).routed_by


def test_mutated_bodies_are_read_or_passed_on_without_an_exception() -> None:
    """Mutated messages break nothing: for changed, cut, doubled and moved bytes, the reader returns
    a request or raises a client's error.
    """
    draw = random.Random(20)
    sound = [(INFER, *body_of(binary=binary)) for binary in (True, False)]
    text = {"text_input": "hello", "max_tokens": 5, "input_ids": [[1, 2]], "parameters": {}}
    sound.append((STREAM, json.dumps(text).encode(), None))
    read_well = 0
    rounds = 2_000 if QUICK else examples(100_000)
    for _ in range(rounds):
        path, body, length = draw.choice(sound)
        mutated = _mutated(draw, body)
        if length is not None and draw.random() < 0.2:
            length = str(draw.choice([0, 1, len(mutated), 10**9, draw.randrange(400)]))
        headers = {} if length is None else {LENGTH_HEADER: length}
        if draw.random() < 0.1:
            headers["content-encoding"] = draw.choice(["gzip", "deflate", "br"])
        try:
            found = read(path, mutated, **headers)
        except ClientError:  # it speaks of shared memory, or is too large
            continue
        assert found.model == "m"
        assert all(len(one) for one in found.prompts)
        read_well += bool(found.prompts)
    assert read_well * 100 > rounds


def _mutated(draw: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(draw.randint(1, 4)):
        at, many = draw.randrange(len(data) + 1), draw.randint(1, 8)
        match draw.randrange(4):
            case 0:
                data[at : at + many] = draw.randbytes(many)
            case 1:
                del data[at : at + many]
            case 2:
                data[at:at] = data[at : at + many]
            case _:
                data[at:at] = draw.choice([b'"', b"[", b"{", b"1e999", b"\0", b"-1", b"null"])
    return bytes(data)


@given(st.binary() | st.text().map(lambda text: json.dumps({"text_input": text}).encode()))
def test_any_bytes_are_read_or_passed_on_without_an_exception(data: bytes) -> None:
    generate_content(data, ROLES)
    infer_content(data, None, ROLES)


def test_only_kserve_infer_and_generate_paths_have_a_target() -> None:
    target = target_of("/v2/models/a%2Fb/versions/2/infer")
    assert target is not None
    assert (target.model, target.version) == ("a/b", "2")
    versions = [
        f"/v2/models/m/versions/{version}/infer" for version in ("x", "", "-1", "1.5", "1 ")
    ]
    for path in (
        *versions,
        "/v2/models/m",
        "/v2/models//infer",
        "/v2/models/m/ready",
        "/v2/rerank",
    ):
        assert target_of(path) is None
    assert is_kserve("/v2/models/m")
    assert not is_kserve("/v2/rerank")


@pytest.mark.parametrize(
    ("status", "error", "busy"),
    [
        (503, "Exceeds maximum queue size", True),
        (503, "Request timeout expired", True),
        (400, "Request timeout expired", True),
        (400, "[request id: 7] Request timeout expired", True),
        (400, "[request id: <id_unknown>] expected number of inputs between 1 and 3", False),
        (500, "Exceeds maximum queue size", False),
    ],
)
def test_tritons_error_for_a_full_queue_is_recognized(status: int, error: str, busy: bool) -> None:
    assert is_triton_queue_full(status, json.dumps({"error": error}).encode()) == busy
    assert not is_triton_queue_full(status, b"Request timeout expired")


def test_the_routers_errors_get_tritons_form() -> None:
    ours = b'{"error":{"message":"no","type":"x","param":null,"code":"model_not_found"}}'
    assert tritons_error(ours, None) == b'{"error":"no"}'
    assert b"unknown model: 'm' is not found" in tritons_error(ours, "m")
    assert tritons_error(b'{"error":"theirs"}', "m") == b'{"error":"theirs"}'


def test_statistics_are_summed_by_model_and_batch_size() -> None:
    def statistics_of(model: str, count: int, last: int, *sizes: int) -> dict[str, Any]:
        batches = [{"batch_size": b, "compute_infer": {"count": count, "ns": b}} for b in sizes]
        row = {"name": model, "version": "1", "last_inference": last, "inference_count": count}
        return row | {"inference_stats": {"success": {"count": count}}, "batch_stats": batches}

    found = merged(
        [
            [statistics_of("a", 2, 9, 1, 4)],
            [statistics_of("a", 3, 7, 4, 8), statistics_of("b", 1, 1)],
            [3],
        ]
    )
    a, b = found
    assert (a["inference_count"], a["last_inference"], b["inference_count"]) == (5, 9, 1)
    assert a["inference_stats"]["success"]["count"] == 5
    counts = [(one["batch_size"], one["compute_infer"]["count"]) for one in a["batch_stats"]]
    assert counts == [(1, 2), (4, 5), (8, 3)]


@pytest.mark.parametrize(
    ("code", "words", "busy"),
    [
        ("hold_queue_full", "Exceeds maximum queue size: why", True),
        ("router_full", "Exceeds maximum queue size: why", True),
        ("hold_timeout", "Request timeout expired: why", True),
        ("no_worker_available", "why", False),
    ],
)
def test_overload_errors_begin_like_tritons(code: str, words: str, busy: bool) -> None:
    body = tritons_error(json.dumps({"error": {"message": "why", "code": code}}).encode(), INFER)
    assert json.loads(body) == {"error": words}
    assert is_triton_queue_full(503, body) == busy


def test_priority_and_timeout_are_read_in_both_forms() -> None:
    parameters = {"priority": 1, "timeout": 250_000}
    for path, fields in ((INFER, {"inputs": []}), (STREAM, {"text_input": "a"})):
        found = read(path, json.dumps({**fields, "parameters": parameters}).encode())
        assert (found.priority, found.hold_s) == (-1, 0.25)
