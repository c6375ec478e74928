"""Tests of bodies of other APIs: the parts that routing uses, and the refusal of
everything else.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.body.paths import KSERVE_GRPC, OTHER, PATHS
from router.body.scan import SHAPES, ScanLimits, Scanned
from router.engines.table import ADAPTERS
from router.http.errors import ClientError
from tests.router.property_support import patient

LIMITS = ScanLimits()
TEXT_PART = {"type": "input_text", "text": "hello"}
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}


def read(path: str, fields: Any) -> Scanned:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return SHAPES[PATHS[path].reads](body, LIMITS)


def test_a_responses_request_is_read_as_the_chat_that_engines_make_of_it() -> None:
    scanned = read(
        "/v1/responses",
        {
            "model": "m",
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": [TEXT_PART]}, {"type": "reasoning", "id": "r"}],
            "stream": True,
            "max_output_tokens": 9,
            "prompt_cache_key": "ann",
            "tools": [{"type": "function", **TOOL}],
        },
    )
    assert (scanned.model, scanned.stream, scanned.session) == ("m", True, None)
    assert scanned.agent_fields == {"prompt_cache_key": "ann"}
    assert scanned.max_output_tokens == 9
    assert scanned.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "tool", "content": [{"type": "item", "item": {"type": "reasoning", "id": "r"}}]},
    )
    assert scanned.options.tools == [{"type": "function", "function": TOOL}]


@pytest.mark.parametrize(
    ("reasoning", "effort"), [({"effort": "low"}, "low"), ({}, None), (None, None), ("x", None)]
)
def test_a_responses_request_has_its_reasoning_effort_read(
    reasoning: Any, effort: str | None
) -> None:
    scanned = read("/v1/responses", {"input": "hi", "reasoning": reasoning})
    assert scanned.options.reasoning_effort == effort


def test_a_responses_request_with_a_text_is_one_user_message() -> None:
    assert read("/v1/responses", {"input": "hi"}).messages == ({"role": "user", "content": "hi"},)


def test_a_messages_request_is_read_with_its_system_prompt_and_tools() -> None:
    tool = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
    scanned = read(
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "metadata": {"user_id": "ann"},
            "tools": [tool],
        },
    )
    assert scanned.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    )
    assert scanned.agent_fields == {"metadata": b'{"user_id": "ann"}'}
    assert scanned.max_output_tokens == 5
    assert scanned.options.tools == [{"type": "function", "function": TOOL}]


def test_billing_headers_are_not_part_of_the_prompt() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.170.89b; cc_entrypoint=cli; cch=%s;"
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    scans = [
        read("/v1/messages", asked | {"system": [{"type": "text", "text": text} for text in texts]})
        for texts in ((line % "ebd54", "Be brief."), (line % "a34ed", "Be brief."), ("Be brief.",))
    ]
    assert scans[0].messages == scans[1].messages == scans[2].messages
    assert scans[0].messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3]))],
)
def test_embeddings_requests_take_texts_and_token_ids(given: Any, prompts: tuple[Any, ...]) -> None:
    found = read("/v1/embeddings", {"input": given}).prompts
    assert [p if isinstance(p, str) else p.tolist() for p in found] == list(prompts)


def test_embeddings_inputs_that_are_not_text_are_read_as_raw_json() -> None:
    scanned = read("/v1/embeddings", {"input": [{"image": "data:"}]})
    assert scanned.by_text
    assert scanned.prompts == ('[{"image": "data:"}]',)


def test_both_texts_of_a_scoring_pair_are_in_the_prompt() -> None:
    for fields in ({"query": "q", "documents": ["d1", "d2"]}, {"text_1": "q", "text_2": "d1"}):
        scanned = read("/v1/score", fields)
        assert scanned.by_text
        (prompt,) = scanned.prompts
        assert isinstance(prompt, str)
        assert "d1" in prompt


def test_sglangs_generate_request_is_read() -> None:
    params = {"max_new_tokens": 7}
    scanned = read("/generate", {"input_ids": [[1, 2], [3]], "sampling_params": params})
    assert [np.asarray(p).tolist() for p in scanned.prompts] == [[1, 2], [3]]
    assert scanned.max_output_tokens == 7
    one, other = (read("/generate", {"text": "t", "lora_path": name}) for name in ("a", "b"))
    assert one.prompts == ("t",)
    assert one.cache_salt != other.cache_salt
    assert read("/generate", {"text": "t", "extra_key": "k"}).cache_salt == "k"


def test_a_generate_request_with_token_ids_is_read() -> None:
    scanned = read(
        "/inference/v1/generate", {"token_ids": [4, 5], "sampling_params": {"max_tokens": 3}}
    )
    assert np.asarray(scanned.prompts[0]).tolist() == [4, 5]
    assert scanned.max_output_tokens == 3


def test_a_request_that_computes_nothing_has_no_prompt() -> None:
    body = {"model": "m", "prompt": "long " * 1000, "session_id": "ann"}
    assert read("/tokenize", body) == Scanned(model="m")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"model": "m"}, "input"),
        ("/v1/responses", {"input": 3}, "input"),
        ("/v1/messages", {"messages": []}, "messages"),
        ("/v1/messages", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/v1/embeddings", {"model": "m"}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [1, -5]}, "input"),
        ("/v1/rerank", {"model": "m"}, None),
        ("/generate", {}, "text"),
        ("/generate", {"input_ids": ["a", 3]}, "input_ids"),
        ("/inference/v1/generate", {"token_ids": None}, "token_ids"),
        ("/tokenize", b"{", None),
        ("/tokenize", {"model": "x" * 2000}, "model"),
    ],
)
def test_an_unreadable_body_is_refused_with_the_parameter(path: str, body: Any, param: Any) -> None:
    with pytest.raises(ClientError) as caught:
        read(path, body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_bodies_forwarded_unread_are_never_refused() -> None:
    for body in (b"", b"\xff", b"[", b'{"model":3}', b'{"model":"%s"}' % (b"x" * 2000)):
        assert SHAPES[OTHER.reads](body, LIMITS) == Scanned()
    assert SHAPES[OTHER.reads](b'{"model":"m"}', LIMITS).model == "m"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(
    (
        *("model", "input", "messages", "system", "instructions", "tools", "text", "input_ids"),
        *("sampling_params", "lora_path", "query", "documents", "token_ids", "metadata"),
        "stream",
    )
)


@patient
@given(st.sampled_from(sorted(PATHS)), st.dictionaries(NAMES, VALUES))
def test_any_body_is_read_or_refused_with_a_client_error(path: str, fields: dict[str, Any]) -> None:
    if PATHS[path].reads == "openai":
        return
    try:
        scanned = read(path, fields)
    except ClientError:  # and nothing else
        return
    assert bool(scanned.prompts or scanned.messages) == PATHS[path].computes


def test_each_engine_kind_lists_the_paths_it_lacks() -> None:
    assert "/generate" in ADAPTERS["vllm"].lacks
    assert "/generate" not in ADAPTERS["sglang"].lacks
    assert {"/tokenize", "/detokenize"}.isdisjoint(ADAPTERS["warmroute"].lacks)
    # Nobody knows what it is: it is asked; but not by gRPC, of which no address is known.
    assert ADAPTERS["openai"].lacks == KSERVE_GRPC.keys()
    assert not {p.path for p in PATHS.values() if p.needs is None} & ADAPTERS["trtllm"].lacks


def test_cache_marks_are_not_part_of_a_message() -> None:
    """Cache marks do not count as part of a message: a client moves them to the last message, so
    they would change earlier messages from turn to turn.
    """
    mark = {"cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT_PART | mark]}
    for parts in ([TEXT_PART, TEXT_PART | mark], [TEXT_PART | mark], [result | mark]):
        plain = json.loads(
            json.dumps(parts).replace(json.dumps(mark)[1:-1], "").replace(", }", "}")
        )
        bodies = ({"messages": [{"role": "user", "content": one}]} for one in (parts, plain))
        marked, unmarked = (read("/v1/messages", body).messages for body in bodies)
        assert marked == unmarked
        assert "cache_control" not in repr(marked)
