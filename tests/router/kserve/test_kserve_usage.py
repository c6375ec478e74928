"""Tests of the token counts in KServe v2 answers: they are read in every form, whatever a worker
sends.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.tensors import Tensor
from router.http.reply import Usage
from router.kserve.content import USAGE_OUTPUTS, usage_of
from router.kserve.http import answer_usage
from router.upstream.meter import Meter
from tests.effort import examples

SIZE = 32
COUNTS = {"kv_cache_reused_blocks": 3, "num_input_tokens": 130, "num_output_tokens": 7}
USAGE = Usage(130, 7, 96)
DECOY = '"kv_cache_reused_blocks":9,{"name":"num_input_tokens","data":[1]}'


def generate_answer(counts_given: Mapping[str, Any] = COUNTS, text: str = DECOY) -> bytes:
    """Return an answer of `generate` that reports these counts."""
    fields = {"model_name": "m", **counts_given, "text_output": text, "sequence_id": 0}
    return json.dumps(fields, separators=(",", ":")).encode()


def infer_answer(counts_given: Mapping[str, Any] = COUNTS, text: str = DECOY) -> bytes:
    """Return an answer of `infer` that reports these counts, all as JSON."""
    outputs: list[dict[str, Any]] = [
        {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [text]}
    ]
    for name, value in counts_given.items():
        outputs.append({"name": name, "datatype": "INT32", "shape": [1, 1], "data": [[value]]})
    return json.dumps({"model_name": "m", "outputs": outputs}).encode()


def binary_infer_answer(counts_given: Mapping[str, int] = COUNTS, text: str = DECOY) -> bytes:
    """Return an answer of `infer` that reports these counts, whose data follows the JSON
    in binary.
    """
    raw = len(text).to_bytes(4, "little") + text.encode()
    data = {"text_output": raw} | {
        n: np.array([v], "<i4").tobytes() for n, v in counts_given.items()
    }
    outputs = [
        {
            "name": name,
            "datatype": "BYTES" if name == "text_output" else "INT32",
            "shape": [1],
            "parameters": {"binary_data_size": len(one)},
        }
        for name, one in data.items()
    ]
    return json.dumps({"outputs": outputs}).encode() + b"".join(data.values())


def streamed(*events: bytes) -> bytes:
    return b"".join(b"data: " + event + b"\n\n" for event in events)


@pytest.mark.parametrize("body", [generate_answer(), infer_answer(), binary_infer_answer()])
def test_usage_is_read_in_each_form_whatever_the_texts_contain(body: bytes) -> None:
    assert answer_usage(body, 0, SIZE) == USAGE
    for packed in (gzip.compress(body), zlib.compress(body)):
        assert answer_usage(packed, 0, SIZE) == USAGE


def test_usage_is_found_in_the_end_of_a_long_answer() -> None:
    for body in (generate_answer(), infer_answer()):
        assert answer_usage(body[12:], 0, SIZE) == USAGE


def test_usage_is_found_in_the_beginning_of_a_long_answer() -> None:
    """The counts are found in the beginning of a long answer, because `generate` of Triton 2.51
    writes its outputs in the order of their names.
    """
    meter = Meter(False, 64, ends=True)
    for at in range(0, len(body := generate_answer(text=DECOY * 99)), 100):
        meter.feed(body[at : at + 100])
    assert not meter.whole
    assert answer_usage(meter.kept, 0, SIZE) == USAGE


def test_the_last_event_with_usage_counts_and_each_event_is_a_token() -> None:
    first = dict.fromkeys(COUNTS, 1)
    body = streamed(generate_answer(first), generate_answer(), b'{"text_output":""}')
    assert answer_usage(body, 3, SIZE) == USAGE
    counts_given = COUNTS | {"num_output_tokens": 1}
    assert answer_usage(streamed(*[generate_answer(counts_given)] * 9), 9, SIZE) == Usage(
        130, 9, 96
    )


def test_usage_is_read_from_llmapis_texts_and_missed_blocks() -> None:
    counts_given = {"kv_cache_reused_block": "3", "kv_cache_missed_block": "2"}
    for body in (generate_answer(counts_given), infer_answer(counts_given)):
        assert answer_usage(body, 0, SIZE) == Usage(160, None, 96)


def test_more_reused_blocks_than_the_prompt_has_are_ignored() -> None:
    counts_given = COUNTS | {"kv_cache_reused_blocks": 6}
    assert answer_usage(generate_answer(counts_given), 0, SIZE) == Usage(130, 7, None)
    assert answer_usage(generate_answer(COUNTS | {"kv_cache_reused_blocks": 5}), 0, SIZE) == Usage(
        130, 7, 130
    )
    assert answer_usage(generate_answer(), 0, None) == Usage(130, 7, None)


@pytest.mark.parametrize("value", [-1, 2**40, 1.5, None, "x", [], {}, [[[1, "a"]]], "9" * 5_000])
def test_an_invalid_count_is_ignored(value: Any) -> None:
    counts_given = {"num_output_tokens": 7, "num_input_tokens": value}
    found = answer_usage(generate_answer(counts_given), 0, SIZE)
    assert found is None or found == Usage(None, 7, None)


def test_an_answer_without_counts_has_no_usage() -> None:
    for body in (
        generate_answer({}),
        infer_answer({}),
        binary_infer_answer({}),
        b"",
        b"{",
        b"\x1f\x8b\0",
        b"x\x9c",
        b"data: ",
    ):
        assert answer_usage(body, 1, SIZE) is None
    assert usage_of({}, SIZE) is None
    assert usage_of({"num_input_tokens": Tensor("FP32", (1,), b"\0\0\0\0")}, SIZE) is None


_BODIES = [
    generate_answer(),
    infer_answer(),
    binary_infer_answer(),
    streamed(generate_answer(), generate_answer()),
    gzip.compress(binary_infer_answer()),
]
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.sampled_from(_BODIES), st.integers(0, 400), st.integers(0, 60), st.binary(max_size=9))
@settings(max_examples=examples(2_000), deadline=None)
def test_a_mutated_answer_raises_no_exception(body: bytes, at: int, gone: int, put: bytes) -> None:
    found = answer_usage(body[:at] + put + body[at + gone :], 2, SIZE)
    if found is not None:
        counts = (found.prompt_tokens, found.completion_tokens, found.cached_tokens)
        assert all(n is None or n >= 0 for n in counts)


@given(st.dictionaries(st.sampled_from(sorted(USAGE_OUTPUTS)), _ANY))
@settings(max_examples=examples(2_000), deadline=None)
def test_any_values_of_counts_raise_no_exception(counts_given: dict[str, Any]) -> None:
    answer_usage(json.dumps(counts_given).encode(), 0, SIZE)
    answer_usage(infer_answer(counts_given), 0, SIZE)


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
    st.sampled_from(["INT32", "INT64", "UINT8", "BYTES", "FP16", "?"]),
    st.binary(max_size=64),
)
@settings(max_examples=examples(2_000), deadline=None)
def test_any_tensor_raises_no_exception(shape: list[int], kind: str, raw: bytes) -> None:
    for name in USAGE_OUTPUTS:
        usage_of({name: Tensor(kind, tuple(shape), raw)}, SIZE)


@given(st.binary(max_size=300), st.integers(1, 64), st.integers(1, 400))
@settings(max_examples=examples(2_000), deadline=None)
def test_the_meter_keeps_the_end_and_whether_it_is_complete(
    body: bytes, step: int, tail: int
) -> None:
    meter, both = Meter(False, tail), Meter(False, tail, ends=True)
    for at in range(0, len(body), step):
        meter.feed(body[at : at + step])
        both.feed(body[at : at + step])
    assert meter.kept == body[-tail:]
    assert meter.whole == both.whole == (len(body) <= tail)
    assert both.kept == (body if both.whole else body + b"\0" + body[-tail:])
