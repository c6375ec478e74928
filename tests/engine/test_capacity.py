"""Tests of the KV capacity that is left next to a model: it is counted in blocks and requests, and
refused if no request fits.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.capacity import CapacityError, Footprint, Limits, fit

GIB = 1 << 30
# Llama 3.1 8B in bf16: 2 (K and V) * 32 layers * 8 heads * 128 * 2 bytes a token.
LLAMA = Footprint(16 * GIB, 131_072, 200_000)
TINY = Footprint(1000, 10, 1)


def test_the_report_counts_blocks_tokens_and_requests() -> None:
    capacity = fit(80 * GIB, LLAMA, Limits())
    free_bytes = 64 * GIB - 200_000 * 8192
    assert capacity.blocks == int(free_bytes * 0.8) // (131_072 * 16)
    assert capacity.tokens == capacity.blocks * 16
    assert capacity.fitting_requests == capacity.blocks // 80  # of 1,280 tokens
    assert capacity.limited_by == "max_batch_size"
    assert capacity.requests == 256
    assert capacity.warning is None
    first, *rows = capacity.report().splitlines()
    assert first == (
        f"{capacity.blocks:,} blocks = {capacity.tokens:,} tokens = 256 requests at (1024, 256); "
        "limited by max_batch_size"
    )
    assert [row.split()[0] for row in rows] == ["weights", "activations", "KV", "headroom", "all"]


def test_the_report_names_a_default_capacity_as_the_limit() -> None:
    """A default capacity that holds only one request is named as the limit: with 2,560 KV tokens
    and a context window of 2,560, as in the docs, one request runs at a time.
    """
    limits = Limits(
        max_tokens_in_paged_kv_cache=2560, expected_input_tokens=2048, expected_output_tokens=512
    )
    capacity = fit(80 * GIB, LLAMA, limits)
    assert (capacity.requests, capacity.limited_by) == (1, "max_tokens_in_paged_kv_cache")
    assert capacity.warning is not None
    assert "raise max_tokens_in_paged_kv_cache" in capacity.warning
    assert str(2560 * 256) in capacity.warning


@pytest.mark.parametrize(
    ("memory_bytes", "limits", "says"),
    [
        (17 * GIB, Limits(), "lower max_num_tokens"),
        (1 << 20, Limits(), "leave nothing"),
        (80 * GIB, Limits(max_tokens_in_paged_kv_cache=1000), "to 1280 or more"),
        (18 * GIB, Limits(must_fit=True), "raise kv_cache_free_gpu_mem_fraction"),
        (
            80 * GIB,
            Limits(max_tokens_in_paged_kv_cache=64_000, must_fit=True),
            "max_model_len needs 131072",
        ),
    ],
)
def test_a_capacity_below_one_request_is_refused(
    memory_bytes: int, limits: Limits, says: str
) -> None:
    with pytest.raises(CapacityError, match=says):
        fit(memory_bytes, LLAMA, limits)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_cache_free_gpu_mem_fraction": 0.0}, "kv_cache_free_gpu_mem_fraction"),
        ({"kv_cache_free_gpu_mem_fraction": 1.5}, "kv_cache_free_gpu_mem_fraction"),
        ({"kv_cache_free_gpu_mem_fraction": float("nan")}, "kv_cache_free_gpu_mem_fraction"),
        ({"max_tokens_in_paged_kv_cache": 15}, "one block of 16"),
        ({"expected_input_tokens": 0}, "expected_input_tokens"),
    ],
)
def test_impossible_limits_are_rejected(changes: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Limits(**changes)  # type: ignore[arg-type]


@given(
    memory_bytes=st.integers(0, 1 << 24),
    share=st.floats(0.01, 1.0),
    cap_tokens=st.none() | st.integers(16, 1 << 16),
    inputs=st.integers(1, 4096),
    outputs=st.integers(1, 4096),
)
def test_the_parts_of_the_report_never_exceed_the_memory(
    memory_bytes: int, share: float, cap_tokens: int | None, inputs: int, outputs: int
) -> None:
    limits = Limits(
        max_model_tokens=4096,
        max_num_tokens=512,
        kv_cache_free_gpu_mem_fraction=share,
        max_tokens_in_paged_kv_cache=cap_tokens,
        expected_input_tokens=inputs,
        expected_output_tokens=outputs,
    )
    try:
        capacity = fit(memory_bytes, TINY, limits)
    except CapacityError:
        return
    parts = capacity.weights_bytes + capacity.activation_bytes + capacity.kv_bytes
    assert parts + capacity.headroom_bytes == memory_bytes
    assert capacity.fitting_requests >= 1
    assert capacity.input_tokens + capacity.output_tokens <= 4096
    assert cap_tokens is None or capacity.tokens <= cap_tokens
