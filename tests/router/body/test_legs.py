"""Tests of the bodies of a disaggregated request, and of the fields that clients must not set."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.body.legs import (
    PARAMS,
    TransferAttempt,
    Trtllm,
    check_no_override,
    check_no_transfer,
    splits,
)
from router.body.paths import PATHS
from router.engines.table import TRANSFER_FIELDS, TRANSFERS
from router.http.errors import ClientError, WorkerError
from tests.router.property_support import patient

NIXL = TRANSFERS["vllm"]
TRY = TransferAttempt(1, "/v1/completions", stream=False)
COMPLETIONS, CHAT = PATHS["/v1/completions"], PATHS["/v1/chat/completions"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
KV: dict[str, Any] = {
    "remote_engine_id": "e", "remote_block_ids": [[3, 1]], "remote_request_id": "r",
    "remote_host": "h", "remote_port": 1,
}  # fmt: skip
NAMES = (
    *("prompt", "model", "max_tokens", "max_completion_tokens", "stream", "stream_options"),
    *("min_tokens", "temperature", "metadata"),
)
FIELDS = st.dictionaries(st.sampled_from(NAMES), JSON)


@patient
@given(fields=FIELDS, spaces=st.sampled_from([None, 2]))
def test_the_prefill_leg_requests_one_token_and_its_kv(fields: dict[str, Any], spaces: Any) -> None:
    body = json.dumps(fields, indent=spaces).encode()
    sent = json.loads(NIXL.prefill(body, TRY).body)
    params = sent.pop(PARAMS)
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    changed = {"stream": False, "stream_options": None, "min_tokens": 0}
    changed |= {"max_tokens": 1, "max_completion_tokens": 1}
    expected = {name: changed.get(name, value) for name, value in fields.items()}
    if not fields.keys() & {"max_tokens", "max_completion_tokens"}:
        expected["max_tokens"] = 1
    assert sent == expected


@patient
@given(fields=FIELDS, params=st.dictionaries(st.text(max_size=6), JSON))
def test_the_decode_leg_is_the_clients_body_with_the_kv_parameters_unchanged(
    fields: dict[str, Any], params: dict[str, Any]
) -> None:
    params |= KV
    told = json.dumps(params, indent=1).encode()
    answer = b'{"choices":[{"text":" a"}],"kv_transfer_params":%b,"usage":{}}' % told
    assert NIXL.read(answer, TRY).decode_data == told
    body = json.dumps(fields).encode()
    sent = NIXL.decode(body, told, TRY).body
    assert told in sent
    assert json.loads(sent) == fields | {PARAMS: params}
    assert sent.endswith(body[1:])


@pytest.mark.parametrize(
    "answer",
    [b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":[1]}', b"no JSON", b""],
)
def test_without_kv_parameters_the_decode_leg_is_the_clients_body(answer: bytes) -> None:
    assert NIXL.read(answer, TRY).decode_data is None
    assert NIXL.decode(b'{"prompt":"a"}', None, TRY).body == b'{"prompt":"a"}'


@pytest.mark.parametrize("name", KV)
def test_kv_parameters_without_a_required_field_are_ignored(name: str) -> None:
    for lacking in (KV | {name: None}, {key: KV[key] for key in KV if key != name}):
        answer = json.dumps({PARAMS: lacking}).encode()
        assert NIXL.read(answer, TRY).decode_data is None


@pytest.mark.parametrize("name", TRANSFER_FIELDS)
def test_a_client_cannot_set_transfer_fields(name: str) -> None:
    check_no_transfer(
        json.dumps({"prompt": f'"{name}": 1', "user": {name: 1}}).encode(), TRANSFER_FIELDS
    )
    with pytest.raises(ClientError, match=name) as refused:
        check_no_transfer(json.dumps({"model": "m", name: None}).encode(), TRANSFER_FIELDS)
    assert (refused.value.status, refused.value.code) == (400, "transfer_field")


@pytest.mark.parametrize(
    "name", [b"X-Override-Bootstrap-Room", b"x-prefiller-host-port", b"X-TRTLLM-disagg-auth"]
)
def test_a_client_cannot_set_transfer_headers(name: bytes) -> None:
    with pytest.raises(ClientError) as refused:
        check_no_override(((b"host", b"h"), (name, b"1")))
    assert refused.value.code == "transfer_field"


@pytest.mark.parametrize(
    "field",
    [
        *('"n": 2', '"best_of":3', '"echo":true', '"prompt_logprobs":1', '"use_beam_search" :true'),
        '"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]',
    ],
)
def test_requests_that_engines_cannot_split_go_to_one_worker(field: str) -> None:
    assert not splits(b'{"model":"m",%b}' % field.encode(), CHAT)


def test_a_request_for_one_completion_is_split_on_generating_paths_only() -> None:
    body = b'{"model":"m","prompt":"a","n":1, "best_of" : 1}'
    assert splits(body, COMPLETIONS)
    assert not splits(body, PATHS["/v1/embeddings"])


TRT = Trtllm(node_id=7, auth_key="k" * 32)
CONTEXT = (
    b'{"choices":[{"index":0, "text":" a","finish_reason":%b,"disaggregated_params": %b}],'
    b'"prompt_token_ids": [1, 2,3],"usage":{"prompt_tokens":3, "completion_tokens":1}}'
)
STATE = (
    b'{"request_type":"context_only","first_gen_tokens":[264],"ctx_request_id":7, '
    b'"disagg_request_id":%d,"encoded_opaque_state":"AAEC","draft_tokens":null,"new":{"a": []}}'
)


@pytest.mark.parametrize(
    ("params", "signature"),
    [
        (
            {"ctx_info_endpoint": "tcp://10.0.0.1:5000", "encoded_opaque_state": "AAEC"},
            b"7bcdc5b6e444b4b97f8a21d132591998227503d6c04decbc9769a1b8e059e451",
        ),
        (
            {"encoded_opaque_state": "AAEC", "ctx_info_endpoint": None},
            b"b4bcff1ad7011d224076f26aa15a5d44ef86745378f8b7f570280a8bee0be14b",
        ),
        (  # as `/server_info` has it: the first one counts
            {"ctx_info_endpoint": ["tcp://10.0.0.1:5000", "b"], "encoded_opaque_state": "AAEC"},
            b"7bcdc5b6e444b4b97f8a21d132591998227503d6c04decbc9769a1b8e059e451",
        ),
        ({"ctx_info_endpoint": None, "encoded_opaque_state": None}, None),
        ({}, None),
    ],
)
def test_fields_that_name_kv_are_signed(params: dict[str, Any], signature: bytes | None) -> None:
    """The request fields that name KV are signed as in the protocol's reference implementation,
    `serve/disagg_auth.py`.
    """
    expected = None if signature is None else b"sha256=" + signature
    assert TRT.signature(json.dumps(params).encode()) == expected
    assert Trtllm().signature(json.dumps(params).encode()) is None


@given(number=st.integers(0, 2**52 - 1), node=st.integers(0, 255))
def test_disaggregated_request_ids_are_unique_and_fit_63_bits(number: int, node: int) -> None:
    """The ids of disaggregated requests are greater than those that servers give, fit into 63 bits,
    and differ for each try and node.
    """
    one = Trtllm(node).request_id(TransferAttempt(number, "", stream=False))
    assert 2**40 <= one < 2**63
    assert one >> 16 & 0xFF == node
    assert one != Trtllm(node).request_id(TransferAttempt(number ^ 1, "", stream=False))


@patient
@given(fields=FIELDS, spaces=st.sampled_from([None, 2]), chat=st.booleans())
def test_trtllm_context_and_generation_legs_have_the_expected_fields(
    fields: dict[str, Any], spaces: Any, chat: bool
) -> None:
    of = TransferAttempt(5, "/v1/chat/completions" if chat else "/v1/completions", stream=False)
    body = json.dumps(fields, indent=spaces).encode()
    number = TRT.request_id(of)
    ask = {"request_type": "context_only", "disagg_request_id": number, "schedule_style": 0}
    changed = {"stream": False, "stream_options": None, "disaggregated_params": ask}
    assert json.loads(TRT.prefill(body, of).body) == fields | changed
    told = TRT.read(CONTEXT % (b'"length"', STATE % number), of).decode_data
    leg = TRT.decode(body, told, of)
    sent = json.loads(leg.body)
    params = sent.pop("disaggregated_params")
    ids = {"prompt_token_ids" if chat else "prompt": [1, 2, 3]}
    assert sent == fields | ids
    usage = {"ctx_usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    assert params == json.loads(STATE % number) | usage | {"request_type": "generation_only"}
    assert b'"first_gen_tokens":[264],"ctx_request_id":7, ' in leg.body, "byte for byte"
    ((name, signature),) = leg.headers
    assert (name, signature[:14]) == (b"x-trtllm-disagg-auth", b"sha256=b4bcff1")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_with_its_first_token_goes_to_the_client(
    path: str, stream: bool
) -> None:
    of = TransferAttempt(5, path, stream)
    answer = CONTEXT % (b'"stop"', b"null")
    chat = "chat" in path
    if chat:
        answer = answer.replace(b'"text":" a"', b'"message":{"content":" a"}')
    reply = TRT.read(answer, of).reply
    assert reply is not None
    text = reply.body.decode()
    if stream:
        assert text.startswith("data: ")
        assert text.endswith("\n\ndata: [DONE]\n\n")
        assert dict(reply.head.headers)[b"Content-Type"] == b"text/event-stream"
        text = text.removeprefix("data: ").partition("\n\n")[0]
    said = json.loads(text)
    (choice,) = said["choices"]
    assert "disaggregated_params" not in choice
    assert choice["finish_reason"] == "stop"
    where = choice["delta" if stream else "message"]["content"] if chat else choice["text"]
    assert where == " a"
    assert "prompt_token_ids" not in said


NUMBER = TRT.request_id(TRY)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b'{"choices":[]}',
        b'{"choices":[{"finish_reason":"length"},{"finish_reason":"length"}]}',
        b'{"choices":[{"finish_reason":"length"}]}',
        b'{"choices":[3]}',
        CONTEXT % (b'"length"', b"null"),
        CONTEXT % (b'"length"', b"[1]"),
        CONTEXT % (b'"length"', STATE % (NUMBER + 1)),
        CONTEXT % (b'"length"', (STATE % NUMBER).replace(b'"ctx_request_id":7', b'"x":1')),
        CONTEXT % (b'"not_finished"', (STATE % NUMBER).replace(b'"request_type"', b'"type"')),
    ],
)
def test_an_invalid_answer_of_a_context_server_is_a_worker_error(answer: bytes) -> None:
    with pytest.raises(WorkerError):
        TRT.read(answer, TRY)
