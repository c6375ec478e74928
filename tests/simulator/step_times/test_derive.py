"""Tests of profiles derived from a model's shape: capacity, how times grow, and what cannot run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.profiles import read_profile, write_profile
from simulator.step_times.derive import (
    TYPICAL_CONTEXT,
    Deployment,
    DeploymentError,
    derived,
    step_time,
    weight_bytes,
)
from simulator.step_times.gpus import GPUS
from simulator.step_times.model_shape import ModelShape
from simulator.step_times.read_shape import read_shape
from simulator.step_times.storage import STORAGES, Stored
from tests.simulator.step_times.configs import CONFIGS, shape_of, written

H100, H200, A100 = GPUS["h100"], GPUS["h200"], GPUS["a100"]


def stored_as(shape: ModelShape, name: str) -> ModelShape:
    storage = STORAGES[name]
    return replace(shape, stored=Stored(storage, storage, storage))


def test_kv_memory_is_what_weights_leave(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "llama-3.1-8b")
    found = derived(shape, Deployment(H100), "x")
    assert found.profile.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    room = 0.9 * 80e9 - 2 * shape.parameters - 4e9
    assert found.profile.kv_capacity_tokens == int(room / 131_072)
    eight = derived(shape, Deployment(H100, kv_fp8=True), "x").profile
    assert eight.kv_capacity_tokens == pytest.approx(2 * found.profile.kv_capacity_tokens, rel=1e-4)


def test_a_latent_kv_vector_is_on_every_gpu(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "deepseek-v3")
    found = derived(shape, Deployment(H200, 8, kv_fp8=True), "x")
    room = 0.9 * 141e9 - weight_bytes(shape) / 8 - 4e9
    assert found.profile.kv_bytes_per_token == 61 * 576
    assert found.profile.kv_capacity_tokens == int(room / (61 * 576))


def test_few_kv_heads_are_replicated_on_several_gpus(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "qwen3-30b-a3b")
    four, eight = (derived(shape, Deployment(H100, n), "x").profile for n in (4, 8))
    assert four.step_time.context_s == eight.step_time.context_s
    assert four.kv_bytes_per_token == eight.kv_bytes_per_token
    assert eight.kv_capacity_tokens < 1.4 * four.kv_capacity_tokens


def test_kv_of_window_layers_does_not_grow_with_the_context(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "gemma-3-27b")
    found = derived(shape, Deployment(H200), "x")
    layer = 2 * 16 * 128 * 2
    assert found.profile.kv_bytes_per_token == layer * (10 + 52 * 1024 / TYPICAL_CONTEXT)
    whole = replace(shape, full_layers=62, window_layers=0)
    other = step_time(whole, Deployment(H200))
    mine = found.profile.step_time
    assert mine.pair_s == pytest.approx(other.pair_s * 10 / 62)
    assert mine.context_s == pytest.approx(other.context_s * 10 / 62)
    assert mine.seq_s - other.seq_s == pytest.approx(other.context_s * 1024 * 52 / 62)
    assert mine.linear_s - other.linear_s == pytest.approx(other.pair_s * 1024 * 52 / 62)
    assert any("window" in one for one in found.assumed)


def test_more_gpus_have_less_work_each_and_more_communication(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "llama-3.1-70b")
    four, eight = (step_time(shape, Deployment(H100, n)) for n in (4, 8))
    assert eight.pair_s == pytest.approx(four.pair_s / 2)
    assert eight.context_s == pytest.approx(four.context_s / 2)
    assert four.linear_s / 2 < eight.linear_s < four.linear_s
    assert four.weights_s / 2 < eight.weights_s < four.weights_s


def test_smaller_weights_are_read_faster(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "qwen3-32b")
    half = step_time(stored_as(shape, "fp8"), Deployment(H100, 2))
    quarter = step_time(stored_as(shape, "int4"), Deployment(H100, 2))
    whole = step_time(shape, Deployment(H100, 2))
    assert quarter.weights_s < half.weights_s < whole.weights_s
    assert half.linear_s < whole.linear_s
    assert quarter.linear_s == whole.linear_s  # its products are in BF16


def test_unsplit_experts_wait_for_the_busiest_gpu(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "qwen3-235b-a22b")
    parts, whole = (step_time(shape, Deployment(H200, 8, split)) for split in (False, True))
    assert whole.linear_s > parts.linear_s
    assert whole.experts_s == parts.experts_s
    assert parts.expert_share == 8 / 128


def test_the_error_for_a_model_that_does_not_fit_names_enough_gpus(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "llama-3.1-70b")
    with pytest.raises(DeploymentError, match=r"141\.1 GB .* lacks 73\.8 GB.* 4 GPUs would do"):
        derived(shape, Deployment(H100), "x")
    with pytest.raises(DeploymentError, match="no number up to 64 would do"):
        derived(replace(shape, dense_width=1 << 21), Deployment(H100), "x")


def test_the_error_for_an_impossible_split_lists_the_valid_ones(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "qwen3-32b")
    with pytest.raises(DeploymentError, match=r"64 attention heads .* 3 GPUs; valid: 1, 2, 4, 8"):
        derived(shape, Deployment(H100, 3), "x")
    with pytest.raises(DeploymentError, match="no experts"):
        derived(shape, Deployment(H100, 2, True), "x")
    with pytest.raises(DeploymentError, match=r"and 160 experts .* valid: 1, 2, 4, 8, 16, 32"):
        derived(shape_of(tmp_path, "glm-4.5"), Deployment(H200, 24, True), "x")


def test_assumptions_are_in_the_provenance(tmp_path: Path) -> None:
    shape = stored_as(shape_of(tmp_path, "qwen3-30b-a3b"), "fp8")
    found = derived(shape, Deployment(A100, 2, kv_fp8=True), "x")
    assert any("no a100 multiplies fp8" in one for one in found.assumed)
    assert any("not measured on a100" in one and "kv fp8" in one for one in found.assumed)
    assert all(one in found.profile.provenance for one in (*found.assumed, found.error))
    assert "median 4 %" in found.error


def test_unmeasured_features_have_a_caveat_in_the_stated_error(tmp_path: Path) -> None:
    latent = shape_of(tmp_path, "deepseek-v3")
    assert "nobody" in derived(latent, Deployment(H100, 16), "x").error
    more = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    sparse = read_shape(written(tmp_path, {**CONFIGS["deepseek-v3"], **more}))
    found = derived(sparse, Deployment(H200, 8), "x")
    assert "sparse attention" in found.error
    states = derived(shape_of(tmp_path, "qwen3.5-35b-a3b"), Deployment(H100, 2), "x")
    assert "without KV" in states.error
    assert any("heads of 256" in one for one in states.assumed)
    assert found.profile.step_time.pair_s < step_time(latent, Deployment(H200, 8)).pair_s


def test_a_profile_is_stored_in_a_file(tmp_path: Path) -> None:
    found = derived(shape_of(tmp_path, "gpt-oss-20b"), Deployment(H100), "mine").profile
    write_profile(found, tmp_path / "mine.json")
    assert read_profile(tmp_path / "mine.json") == found
