"""Tests of token ids that replace the text of a request's body: nothing else in the body
changes.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.body.scan import Tokens
from router.request.token_ids import with_token_ids
from tests.router.property_support import patient

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, dtype=np.int32)


@pytest.mark.parametrize(
    ("body", "prompts", "sent"),
    [
        (b'{"prompt": "a b" , "n":1}', [ids(1, 2)], b'{"prompt": [1,2] , "n":1}'),
        (b'{"n":1,"prompt":["a"]}', [ids(1, 2)], b'{"n":1,"prompt":[[1,2]]}'),
        (b'{"prompt":["a", "b"]}', [ids(1), ids(2, 3)], b'{"prompt":[[1],[2,3]]}'),
        (b'{"prompt":"x","prompt":"y"}', [ids(9)], b'{"prompt":"x","prompt":[9]}'),
        (b'{"x":{"prompt":"y"},"prompt":"y"}', [ids(9)], b'{"x":{"prompt":"y"},"prompt":[9]}'),
        (b'{"prom\\u0070t":"y"}', [ids(9)], b'{"prom\\u0070t":[9]}'),
        (b'{"prompt":"x"}', [], b'{"prompt":"x"}'),
    ],
)
@pytest.mark.parametrize("kind", ["warmroute", "vllm", "sglang", "trtllm"])
def test_only_the_prompt_is_replaced(
    kind: str, body: bytes, prompts: list[Tokens], sent: bytes
) -> None:
    assert with_token_ids(body, COMPLETIONS, kind, prompts) == sent


def test_workers_that_accept_no_token_ids_get_the_text() -> None:
    body = b'{"prompt":"x"}'
    for kind in ("openai", "triton"):
        assert with_token_ids(body, COMPLETIONS, kind, [ids(1)]) is body
    chat = b'{"messages":[{"role":"user","content":"prompt"}]}'
    for kind in ("warmroute", "vllm", "sglang", "openai", "triton"):
        assert with_token_ids(chat, CHAT, kind, [ids(1)]) is chat


def test_tensorrt_llm_gets_token_ids_in_addition_to_the_messages() -> None:
    body = b' { "messages": [] }'
    assert with_token_ids(body, CHAT, "trtllm", [ids(1, 2)]) == (
        b' {"prompt_token_ids":[1,2], "messages": [] }'
    )
    own = b'{"messages":[],"prompt_token_ids":[5]}'
    assert with_token_ids(own, CHAT, "trtllm", [ids(1, 2)]) is own


fields = st.dictionaries(st.text("pab", max_size=3), st.text() | st.integers(), max_size=4)


@patient
@given(fields, st.text(min_size=1), fields, st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_the_changed_body_parses_to_the_same_fields_and_the_token_ids(
    before: dict[str, Any], prompt: str, after: dict[str, Any], tokens: list[int]
) -> None:
    after = {key: value for key, value in after.items() if key not in before}
    body = json.dumps(before | {"prompt": prompt} | after).encode()
    sent = with_token_ids(body, COMPLETIONS, "vllm", [ids(*tokens)])
    assert json.loads(sent) == before | {"prompt": tokens} | after
    text = json.dumps(prompt).encode()
    at = body.index(b'"prompt": ' + text) + len(b'"prompt": ')
    assert sent[:at] == body[:at]
    assert sent.endswith(body[at + len(text) :])
