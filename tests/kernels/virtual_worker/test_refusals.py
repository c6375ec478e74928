"""Tests of the input that virtual workers refuse; plain and native forms use the same message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.virtual_worker.virtual_pair import STEP_TIME, Twin

OPTIONS: dict[str, Any] = {"blocks": 64, "block_size": 4, "step_time": STEP_TIME}
NONE = np.zeros(0, dtype=np.uint64)


def test_refusals_have_codes(make: type[Twin]) -> None:
    worker = make(**(OPTIONS | {"blocks": 4, "max_model_tokens": 40, "max_queue": 1}))
    assert worker.add(1, NONE, 0, 1, 0, 0) == "empty_prompt"
    assert worker.add(1, NONE, 3, 0, 0, 0) == "no_output"
    assert worker.add(1, NONE, 40, 1, 0, 0) == "too_long"
    assert worker.add(1, NONE, 16, 1, 0, 0) == "kv_capacity"
    assert worker.next_ns() == -1
    assert worker.add(1, NONE, 15, 1, 0, 0) == ""
    assert worker.add(2, NONE, 3, 1, 0, 0) == ""
    assert worker.add(3, NONE, 3, 1, 0, 0) == "queue_full"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"blocks": 0}, "blocks must be 1..2147483647, got 0"),
        ({"blocks": 2**70}, "blocks must be 1..2147483647, got "),
        ({"block_size": 0}, "block_size must be 1..2147483647, got 0"),
        ({"step_time": (1.0,) * 8}, "step_time must have 9 constants, got 8"),
        ({"step_time": (-1.0,) * 9}, "linear_s must be finite and at least 0, got -1.0"),
        ({"step_time": (*STEP_TIME[:8], 0.2)}, "softmax_p must be at least 0.25, got 0.2"),
        (
            {"step_time": (*STEP_TIME[:5], 1.5, *STEP_TIME[6:])},
            "expert_share must be at most 1, got 1.5",
        ),
        ({"max_num_tokens": 8}, r"max_num_tokens \(8\) must be at least max_batch_size"),
        ({"max_batch_size": 0}, "max_batch_size must be 1..2147483647, got 0"),
        ({"max_model_tokens": 1}, "max_model_tokens must be 2..2147483647, got 1"),
        ({"min_chunk_tokens": 9000}, r"min_chunk_tokens \(9000\) must be at most max_num_tokens"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\), got 1.0"),
        ({"watermark": float("nan")}, r"watermark must be in \[0, 1\), got nan"),
        ({"ageing_s": 0.0}, "ageing_s must be finite and above 0, got 0.0"),
        ({"ageing_s": float("inf")}, "ageing_s must be finite and above 0, got inf"),
        ({"max_queue": 0}, "max_queue must be 1..2147483647, got 0"),
        ({"prefix_wait_tokens": -1}, "prefix_wait_tokens must be 0..2147483647, got -1"),
        ({"cache_groups": [(1, 1)]}, "window must be 0, or 2 and more, got 1"),
        ({"cache_groups": [(8, 0)]}, "cost must be 1..65536, got 0"),
        ({"cache_groups": [(1 << 25, 1)]}, "window must be 0..16777216, got 33554432"),
        ({"cache_groups": [(0, 64)]}, "take 64 blocks of 4 tokens, and the cache has 64"),
        ({"cache_groups": [(0, 1)], "host_blocks": 1}, "are not kept in host memory"),
        ({"speed": 0.0}, "speed must be finite and above 0, got 0.0"),
    ],
)
def test_the_error_names_the_bad_option(
    make: type[Twin], changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make(**(OPTIONS | changed))


@pytest.mark.parametrize(
    ("call", "arguments", "words"),
    [
        ("add", (-1, NONE, 3, 1, 0, 9), "request_id must be 0..9223372036854775807, got -1"),
        ("add", (1, NONE, -1, 1, 0, 9), "prompt_tokens must be 0..2147483647, got -1"),
        ("add", (1, NONE, 3, 2**31, 0, 9), "max_output_tokens must be -2147483647..2147483647"),
        ("add", (1, NONE, 3, 1, 2**31, 9), "priority must be -2147483647..2147483647"),
        ("add", (8, NONE, 3, 1, 0, 9), "request id 8 is in use"),
        ("add", (1, NONE, 3, 1, 0, 3), "now_ns must not go back: got 3 after 5"),
        ("add", (1, np.zeros((1, 1), np.uint64), 3, 1, 0, 9), "chain must have 1 dimension, got 2"),
        ("add", (1, np.zeros(4, np.uint64)[::2], 3, 1, 0, 9), "chain must be C-contiguous"),
        ("advance", (4,), "now_ns must not go back: got 4 after 5"),
        ("advance", (-1,), "now_ns must be 0..4611686018427387904, got -1"),
        ("stats", (2**63,), "now_ns must be 0..4611686018427387904, got 9223372036854775808"),
        ("set_speed", (-1.0, 9), "speed must be finite and above 0, got -1.0"),
        ("set_speed", (float("nan"), 9), "speed must be finite and above 0, got nan"),
    ],
)
def test_bad_arguments_change_nothing(
    make: type[Twin], call: str, arguments: tuple[Any, ...], words: str
) -> None:
    worker = make(**OPTIONS)
    worker.add(8, NONE, 3, 2, 0, 5)
    with pytest.raises(ValueError, match=words):
        getattr(worker, call)(*arguments)
    ended: list[int] = []
    while (now_ns := worker.next_ns()) >= 0:
        ended += worker.advance(now_ns)[2]
    assert ended == [8]
    assert worker.stats(10**9).query_tokens == 3


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("add", (1.5, NONE, 3, 1, 0, 9)),
        ("add", (1, [1, 2], 3, 1, 0, 9)),
        ("add", (1, np.zeros(2, np.int64), 3, 1, 0, 9)),
        ("hit_blocks", (None,)),
        ("advance", (1.0,)),
    ],
)
def test_wrong_types_are_refused(make: type[Twin], call: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="must be"):
        getattr(make(**OPTIONS), call)(*arguments)
