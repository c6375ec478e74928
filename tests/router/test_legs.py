"""What the two workers of a split request are sent, and what of it a client may say itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.errors import ClientError
from router.request.legs import (
    PARAMS,
    TRANSFER_FIELDS,
    TRANSFERS,
    Try,
    check_no_override,
    check_no_transfer,
    splits,
)
from router.request.paths import PATHS
from tests.router.property_support import patient

NIXL = TRANSFERS["vllm"]
TRY = Try(1, "/v1/completions", stream=False)
COMPLETIONS, CHAT = PATHS["/v1/completions"], PATHS["/v1/chat/completions"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = (
    *("prompt", "model", "max_tokens", "max_completion_tokens", "stream", "stream_options"),
    *("min_tokens", "temperature", "metadata"),
)
FIELDS = st.dictionaries(st.sampled_from(NAMES), JSON)


@patient
@given(fields=FIELDS, spaces=st.sampled_from([None, 2]))
def test_the_first_leg_asks_for_one_token_and_its_kv(fields: dict[str, Any], spaces: Any) -> None:
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
def test_the_second_leg_is_the_clients_body_and_the_parameters_as_they_came(
    fields: dict[str, Any], params: dict[str, Any]
) -> None:
    told = json.dumps(params, indent=1).encode()
    answer = b'{"choices":[{"text":" a"}],"kv_transfer_params":%b,"usage":{}}' % told
    assert NIXL.read(answer, TRY).told == told
    body = json.dumps(fields).encode()
    sent = NIXL.decode(body, told, TRY).body
    assert told in sent
    assert json.loads(sent) == fields | {PARAMS: params}
    assert sent.endswith(body[1:])


@pytest.mark.parametrize(
    "answer",
    [b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":[1]}', b"no JSON", b""],
)
def test_an_answer_without_parameters_leaves_the_second_leg_as_it_is(answer: bytes) -> None:
    assert NIXL.read(answer, TRY).told is None
    assert NIXL.decode(b'{"prompt":"a"}', None, TRY).body == b'{"prompt":"a"}'


@pytest.mark.parametrize("name", TRANSFER_FIELDS)
def test_a_client_names_no_kv(name: str) -> None:
    check_no_transfer(json.dumps({"prompt": f'"{name}": 1', "user": {name: 1}}).encode())
    with pytest.raises(ClientError, match=name) as refused:
        check_no_transfer(json.dumps({"model": "m", name: None}).encode())
    assert (refused.value.status, refused.value.code) == (400, "transfer_field")


@pytest.mark.parametrize("name", [b"X-Override-Bootstrap-Room", b"x-prefiller-host-port"])
def test_nor_does_it_by_a_header(name: bytes) -> None:
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
def test_what_engines_do_not_split_goes_to_one_worker(field: str) -> None:
    assert not splits(b'{"model":"m",%b}' % field.encode(), CHAT, None)


def test_what_is_one_token_long_is_all_prefill() -> None:
    body = b'{"model":"m","prompt":"a","n":1, "best_of" : 1}'
    assert splits(body, COMPLETIONS, None)
    assert splits(body, COMPLETIONS, 2)
    assert not splits(body, COMPLETIONS, 1)
    assert not splits(body, PATHS["/v1/embeddings"], None)
