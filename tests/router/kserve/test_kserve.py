"""Tests of how the router finds the routing fields of a KServe v2 request by the model's
configuration, whatever a client sends.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.events import WireError
from engine.wire.tensors import Tensor
from router.body.scan import Sequenced
from router.engines.triton_inputs import (
    BY_LOAD,
    ROLES,
    ModelConfig,
    Roles,
    config_of,
    overridden,
    roles_of,
)
from router.kserve.content import MAX_TEXT_BYTES, content_of


def model(backend: str, *inputs: str, **more: Any) -> ModelConfig:
    """Return a model's configuration with inputs given as `NAME:TYPE`."""
    pairs = (one.split(":") for one in inputs)
    tensors = [{"name": name, "data_type": f"TYPE_{kind}"} for name, kind in pairs]
    return config_of(msgspec.json.encode({"backend": backend, "input": tensors, **more}))


ENGINE = model(
    "tensorrtllm",
    *("input_ids:INT32", "input_lengths:INT32", "request_output_len:INT32", "streaming:BOOL"),
    *("lora_task_id:UINT64", "stop:BOOL"),
)
PREPROCESSING = model("python", "QUERY:STRING", "REQUEST_OUTPUT_LEN:INT32")
BEFORE = {
    "model_name": "preprocessing",
    "input_map": {"QUERY": "text_input", "REQUEST_OUTPUT_LEN": "max_tokens"},
    "output_map": {"INPUT_ID": "_IDS", "REQUEST_INPUT_LEN": "_LENGTH", "REQUEST_OUTPUT_LEN": "_M"},
}
STEP = {
    "model_name": "tensorrt_llm",
    "input_map": {
        "input_ids": "_IDS",
        "input_lengths": "_LENGTH",
        "request_output_len": "_M",
        "streaming": "stream",
        "lora_task_id": "lora",
    },
}
OTHERS = {"preprocessing": PREPROCESSING, "tensorrt_llm": ENGINE}


def ensemble(*inputs: str) -> ModelConfig:
    """Return the configuration of a TensorRT-LLM ensemble; its own inputs may have other names than
    NVIDIA's.
    """
    steps = {"step": [BEFORE, STEP]}
    return model("", *inputs, platform="ensemble", ensemble_scheduling=steps)


def test_an_ensembles_inputs_are_traced_to_its_engine_step() -> None:
    stock = ensemble("text_input:STRING", "max_tokens:INT32", "stream:BOOL", "lora:UINT64")
    roles = roles_of(stock, OTHERS)
    assert (roles.text, roles.ids, roles.max_tokens) == ("text_input", None, "max_tokens")
    assert (roles.stream, roles.adapter, roles.lengths) == ("stream", "lora", None)
    assert roles.why == "ensemble, as tensorrt_llm: text_input"
    own = roles_of(ensemble("max_tokens:INT32", "wish:STRING", "text_input:STRING"), OTHERS)
    assert own.text == "text_input"
    renamed = {**BEFORE, "input_map": {"QUERY": "wish", "REQUEST_OUTPUT_LEN": "many"}}
    other = model(
        "",
        *("note:STRING", "many:INT32", "wish:STRING"),
        platform="ensemble",
        ensemble_scheduling={"step": [renamed, STEP]},
    )
    assert roles_of(other, OTHERS).text == "wish"
    assert roles_of(other, OTHERS).max_tokens == "many"


def test_an_untraced_output_limit_is_not_used_as_a_prompt() -> None:
    told = {"INPUT_ID": "_IDS", "OUTPUT_LEN": "_M"}  # under a name that its step has no input of
    steps = {"step": [{**BEFORE, "output_map": told}, STEP]}
    inputs = "text_input:STRING", "max_tokens:INT32"
    found = roles_of(model("", *inputs, ensemble_scheduling=steps), OTHERS)
    assert (found.text, found.max_tokens) == ("text_input", "max_tokens")


def test_whether_a_cancelled_request_may_run_on_follows_from_the_config() -> None:
    """Whether a cancelled request may keep running follows from configurations, not from names: a
    cancel reaches neither the step of an ensemble nor the request that a Python model makes to an
    engine.
    """
    asks = model("python", "text_input:STRING", name="tensorrt_llm_bls")
    assert not roles_of(asks).runs_on, "it has nobody to ask"
    assert not roles_of(asks, {"tensorrt_llm_bls": asks, "preprocessing": PREPROCESSING}).runs_on
    assert roles_of(asks, OTHERS).runs_on
    assert roles_of(model("python", "T:STRING", name="front"), OTHERS).runs_on
    assert roles_of(ensemble("text_input:STRING"), OTHERS).runs_on
    assert roles_of(ensemble("text_input:STRING")).runs_on
    assert not roles_of(ENGINE, OTHERS).runs_on
    assert not roles_of(model("vllm", "text_input:STRING"), OTHERS).runs_on
    own = model("python", "input_ids:INT32", "request_output_len:INT32", name="tensorrt_llm")
    assert not roles_of(own, OTHERS).runs_on


def test_a_cycle_of_ensemble_steps_ends_the_search() -> None:
    ring = {**BEFORE, "input_map": {"QUERY": "_IDS"}}
    steps = {"step": [ring, STEP]}
    found = roles_of(model("", "text_input:STRING", ensemble_scheduling=steps), OTHERS)
    assert found.text == "text_input", "by its name, then"


@pytest.mark.parametrize(
    ("config", "text", "ids", "most", "why"),
    [
        (ENGINE, None, "input_ids", "request_output_len", "tensorrtllm: input_ids"),
        (
            model("python", "text_input:STRING", "sampling_param_max_tokens:INT32"),
            *("text_input", None, "sampling_param_max_tokens", "python: text_input"),
        ),
        (
            model("vllm", "image:STRING", "text_input:STRING", "sampling_parameters:STRING"),
            *("text_input", None, None, "vllm: text_input"),
        ),
        (model("python", "A:FP32", "B:STRING"), "B", None, None, "python: B, the first text"),
        (model("python", "A:FP32"), None, None, None, BY_LOAD.why),
    ],
)
def test_each_kind_of_model_has_its_field_names(
    config: ModelConfig, text: str | None, ids: str | None, most: str | None, why: str
) -> None:
    roles = roles_of(config)
    assert (roles.text, roles.ids, roles.max_tokens, roles.why) == (text, ids, most, why)


def test_configured_roles_override_found_ones() -> None:
    roles = overridden(roles_of(ENGINE), {"text": "words", "max_tokens": "", "session": "who"})
    assert (roles.text, roles.ids, roles.max_tokens, roles.session) == ("words", None, None, "who")
    assert roles.why == "configured: words"
    assert overridden(roles_of(ENGINE), {"ids": ""}).why == "configured: by load alone"


def packed(*texts: str | bytes) -> bytes:
    """Return texts in Triton's binary form, each after its length in 4 bytes."""
    data = [one.encode() if isinstance(one, str) else one for one in texts]
    return b"".join(len(one).to_bytes(4, "little") + one for one in data)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=8))
def test_binary_and_json_texts_read_the_same(texts: list[str]) -> None:
    roles, shape = Roles(text="T", why="T"), (len(texts), 1)
    binary = content_of(roles, {"T": Tensor("BYTES", shape, packed(*map(_sound, texts)))}, {})
    listed = content_of(roles, {"T": Tensor("BYTES", shape, None, [[t] for t in texts])}, {})
    assert binary.texts == listed.texts == tuple(map(_sound, texts))
    assert binary.why == "T"


def _sound(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@given(st.lists(st.lists(st.integers(0, 2**63 - 1), min_size=3, max_size=3), min_size=1))
def test_int64_token_ids_are_read_at_any_address(rows: list[list[int]]) -> None:
    data = np.array(rows, "<i8").tobytes()
    for one in (
        Tensor("INT64", (len(rows), 3), memoryview(b"odd" + data)[3:]),
        Tensor("INT64", (len(rows), 3), None, rows),
    ):
        found = content_of(Roles(ids="I"), {"I": one}, {}).ids
        assert [row.tolist() for row in found] == rows
        assert all(row.flags.aligned for row in found)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=3, max_size=3), min_size=1))
def test_binary_and_json_token_ids_read_the_same(rows: list[list[int]]) -> None:
    roles = Roles(ids="I", lengths="L")
    lengths = Tensor("INT32", (len(rows), 1), np.full(len(rows), 2, "<i4").tobytes())
    forms = [
        Tensor("INT32", (len(rows), 3), np.array(rows, "<i4").tobytes()),
        Tensor("INT64", (len(rows), 3), memoryview(np.array(rows, "<i8").tobytes())),
        Tensor("INT32", (len(rows), 3), None, rows),
        Tensor("INT32", (len(rows), 3), None, [one for row in rows for one in row]),
    ]
    for one in forms:
        found = content_of(roles, {"I": one, "L": lengths}, {})
        assert [row.tolist() for row in found.ids] == [row[:2] for row in rows]
        whole = content_of(roles, {"I": one}, {})
        assert [row.tolist() for row in whole.ids] == rows
        assert all(row.dtype == np.int32 for row in whole.ids)


def test_fields_other_than_the_prompt_are_read() -> None:
    roles = Roles(
        text="T", max_tokens="M", stream="S", session="W", adapter="A", stop="E", sampling="P"
    )
    inputs = {
        "T": Tensor("BYTES", (1,), packed("hello")),
        "M": Tensor("INT32", (1, 1), b"\7\0\0\0"),
        "S": Tensor("BOOL", (1,), b"\1"),
        "W": Tensor("BYTES", (1,), None, ["me"]),
        "A": Tensor("UINT64", (1,), None, [12]),
        "E": Tensor("BOOL", (1,), None, [True]),
    }
    given_ids = {"sequence_id": 5, "sequence_start": True, "sequence_end": False}
    found = content_of(roles, inputs, given_ids)
    assert (found.max_output_tokens, found.stream, found.session) == (7, True, "me")
    assert (found.adapter, found.stop) == ("12", True)
    assert found.sequence == Sequenced("5", start=True)
    more = content_of(roles, {"P": Tensor("BYTES", (1,), packed('{"max_tokens":"9"}'))}, {"A": "x"})
    assert (more.max_output_tokens, more.adapter, more.sequence) == (9, "x", None)
    assert content_of(roles, {}, {"sequence_id": 0}).sequence is None


def test_different_images_give_different_media_keys() -> None:
    roles = roles_of(model("vllm", "text_input:STRING", "image:STRING"))

    def media(*images: str) -> str | None:
        one = Tensor("BYTES", (len(images),), packed(*images))
        return content_of(roles, {"image": one} if images else {}, {}).media

    assert media("a") == media("a") != media("b")
    assert media() is None


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (Tensor("BYTES", (1,), b"\5\0\0\0abc"), "T: has a text that is cut short"),
        (Tensor("BYTES", (1,), b"\5"), "T: has a text that is cut short"),
        (Tensor("FP32", (1,), b"\0\0\0\0"), "T: is FP32, not BYTES"),
        (Tensor("BYTES", (1,), None, [3]), "T: has an element that is no text"),
    ],
)
def test_an_unreadable_tensor_is_routed_by_load_alone(one: Tensor, why: str) -> None:
    found = content_of(Roles(text="T", why="T"), {"T": one}, {})
    assert (found.texts, found.why, found.unread) == ((), BY_LOAD.why, (why,))


def test_invalid_token_ids_are_not_used_for_routing() -> None:
    for one in (
        Tensor("INT32", (1, 2), np.array([1, -1], "<i4").tobytes()),
        Tensor("INT64", (1, 2), np.array([1, -(2**40)], "<i8").tobytes()),
        Tensor("INT32", (1, 9), b"\1\0\0\0"),
        Tensor("INT32", (), b""),
        Tensor("INT32", (1, 0), b""),
        Tensor("INT32", (1,), None, [2**40]),
        Tensor("INT32", (1,), None, [[[[[[[[[[[1]]]]]]]]]]]),
    ):
        found = content_of(Roles(ids="I"), {"I": one}, {})
        assert not found.ids
        assert len(found.unread) == 1


def test_only_the_beginning_of_a_long_text_is_read() -> None:
    one = Tensor("BYTES", (1,), packed("x" * (MAX_TEXT_BYTES + 9)))
    assert len(content_of(Roles(text="T"), {"T": one}, {}).texts[0]) == MAX_TEXT_BYTES


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
INPUTS = st.builds(
    Tensor,
    st.sampled_from(["BYTES", "INT32", "INT64", "UINT64", "BOOL", "FP16", "FP32", "", "x" * 99]),
    st.lists(st.integers(-(2**64), 2**64) | st.integers(0, 4), max_size=10).map(tuple),
    st.none() | st.binary(max_size=64) | st.binary(max_size=64).map(lambda data: memoryview(data)),
    st.none() | st.lists(VALUES, max_size=4),
)


@given(
    st.dictionaries(st.sampled_from(ROLES), INPUTS, max_size=4),
    st.dictionaries(
        st.text() | st.sampled_from([*ROLES, "sequence_id", "lora_name"]), VALUES, max_size=4
    ),
)
def test_any_tensors_and_parameters_are_read_without_an_exception(
    inputs: dict[str, Tensor], parameters: dict[str, Any]
) -> None:
    every: dict[str, Any] = {name: name for name in ROLES}
    roles = Roles(images=("text",), **every)
    found = content_of(roles, inputs, parameters)
    assert all(text for text in found.texts)
    assert all(len(row) and row.min() >= 0 for row in found.ids)
    assert found.max_output_tokens is None or 0 <= found.max_output_tokens < 2**31
    for text in found.texts:
        text.encode()


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input":1}', b"\xff", b"[" * 9999])
def test_an_invalid_model_config_is_an_error(body: bytes) -> None:
    with pytest.raises(WireError, match="config"):
        config_of(body)


def test_the_number_of_inputs_in_a_model_config_is_bounded() -> None:
    with pytest.raises(WireError, match="over"):
        model("python", *(f"i{n}:STRING" for n in range(300)))


@given(VALUES)
def test_any_json_as_model_config_is_read_or_refused(value: Any) -> None:
    try:
        body = msgspec.json.encode({"input": value, "ensemble_scheduling": value})
    except (msgspec.EncodeError, TypeError, UnicodeError):
        return
    with contextlib.suppress(WireError):
        roles_of(config_of(body))


@pytest.mark.parametrize(
    ("levels", "default", "asked", "found"),
    [
        (0, 0, 1, -1), (0, 0, 2, 0), (0, 0, 9, 7), (0, 0, 0, 0), (0, 0, None, 0), (0, 0, "1", -1),
        (5, 3, 1, -2), (5, 3, 3, 0), (5, 3, 5, 2), (5, 3, 6, 0), (5, 0, 1, 0), (5, 0, 2, 1),
        (5, 9, 5, 0), ("5", "3", 1, -2), (0, 0, -1, 0), (0, 0, True, 0), (0, 0, 2**70, 0),
    ],
)  # fmt: skip
def test_triton_priorities_are_converted(levels: Any, default: Any, asked: Any, found: int) -> None:
    """Triton's priorities are converted to ours: its highest is 1, ours is the lowest number; a
    request without one has the priority of the default level.
    """
    batching = {"priority_levels": levels, "default_priority_level": default}
    roles = roles_of(model("python", "x:STRING", dynamic_batching=batching))
    assert content_of(roles, {}, {"priority": asked}).priority == found


def test_an_ensemble_has_the_priorities_of_its_step() -> None:
    batching = {"priority_levels": 5, "default_priority_level": 3}
    engine = msgspec.structs.replace(
        ENGINE, dynamic_batching=model("x", dynamic_batching=batching).dynamic_batching
    )
    inputs = ("text_input:STRING", "max_tokens:INT32")
    top = model("", *inputs, ensemble_scheduling={"step": [BEFORE, STEP]})
    roles = roles_of(top, {"preprocessing": PREPROCESSING, "tensorrt_llm": engine})
    assert content_of(roles, {}, {"priority": 1}).priority == -2


@pytest.mark.parametrize(
    ("asked", "found"),
    [(1_500_000, 1.5), (1, 1e-6), (0, None), (-1, None), (True, None), ("9", None), (2**64, None)],
)
def test_a_timeout_limits_how_long_a_request_may_be_held(asked: Any, found: float | None) -> None:
    assert content_of(BY_LOAD, {}, {"timeout": asked}).hold_s == found
