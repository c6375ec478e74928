"""Tests of the parameter counts that the config.json of known models gives, by kind of layer,
against published ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.step_times.model_shape import Heads, Latent
from simulator.step_times.read_shape import read_shape
from tests.simulator.step_times.configs import CONFIGS, Config, shape_of, written

# Billions of parameters, by model cards and reports: all, and those that one token uses.
PUBLISHED = {
    "llama-3.1-8b": (8.03, 8.03),
    "llama-3.1-70b": (70.6, 70.6),
    "qwen3-8b": (8.2, 8.2),
    "qwen3-32b": (32.8, 32.8),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.0, 22.0),
    "gpt-oss-20b": (20.9, None),  # its active ones are published without a part of the tables
    "gpt-oss-120b": (116.8, None),
    "deepseek-v3": (671.0, 37.0),
    "glm-4.5": (355.0, 32.0),
    "glm-4.5-air": (106.0, 12.0),
    "gemma-3-27b": (27.0, 27.0),
    "mixtral-8x7b": (46.7, 12.9),
    "llama-3.1-405b": (405.9, 405.9),
    "qwen3-0.6b": (0.6, 0.6),
    "qwen3-coder-480b": (480.0, 35.0),
    "minimax-m2.5": (229.0, 10.0),
    "gemma-4-26b-a4b": (25.2, 3.8),
    "qwen3.5-35b-a3b": (35.0, None),
    "nemotron-3-nano-30b": (31.6, 3.6),
    "llama-4-scout": (107.8, 17.0),
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_parameter_counts_are_as_published(tmp_path: Path, name: str) -> None:
    total, active = PUBLISHED[name]
    found = shape_of(tmp_path, name)
    assert found.parameters / 1e9 == pytest.approx(total, rel=0.02)
    if active is not None:
        assert found.active_parameters / 1e9 == pytest.approx(active, rel=0.12)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3-32b", (64, 0, 64, 0)),
        ("gpt-oss-120b", (18, 18, 0, 36)),
        ("gemma-3-27b", (10, 52, 62, 0)),
        ("deepseek-v3", (61, 0, 3, 58)),
        ("glm-4.5", (92, 0, 3, 89)),
        ("mixtral-8x7b", (32, 0, 0, 32)),
        ("gemma-4-26b-a4b", (5, 25, 0, 30)),
        ("qwen3.5-35b-a3b", (10, 0, 0, 40)),
        ("nemotron-3-nano-30b", (6, 0, 0, 23)),
    ],
)
def test_layers_are_counted_by_kind(
    tmp_path: Path, name: str, layers: tuple[int, int, int, int]
) -> None:
    found = shape_of(tmp_path, name)
    kinds = (found.full_layers, found.window_layers, found.dense_layers, found.expert_layers)
    assert kinds == layers


def test_a_folder_is_read_by_its_config(tmp_path: Path) -> None:
    found = shape_of(tmp_path, "qwen3-32b")
    assert read_shape(tmp_path) == found


def test_attention_widths_are_read(tmp_path: Path) -> None:
    assert shape_of(tmp_path, "qwen3-32b").attention == Heads(64, 8, 128, 128)
    assert shape_of(tmp_path, "deepseek-v3").attention == Latent(128, 1536, 512, 128, 64, 128)
    assert shape_of(tmp_path, "deepseek-v3").attention.kv_values == 576


ALWAYS = {"sliding_window": 4096, "use_sliding_window": None}
WINDOWS: dict[str, tuple[Config, tuple[int, int]]] = {
    "none": ({}, (36, 0)),
    "not used": ({"sliding_window": 4096, "use_sliding_window": False}, (36, 0)),
    "not said to be used": ({"sliding_window": 4096, "use_sliding_window": None}, (36, 0)),
    "from a layer on": (
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28},
        (28, 8),
    ),
    "by a pattern": (
        {"sliding_window": 4096, "use_sliding_window": True, "sliding_window_pattern": 4},
        (9, 27),
    ),
    "by types": (
        {"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"] * 18},
        (18, 18),
    ),
    "mistral": ({**ALWAYS, "model_type": "mistral"}, (0, 36)),
    "gemma 2": ({**ALWAYS, "model_type": "gemma2"}, (18, 18)),
}


@pytest.mark.parametrize("name", sorted(WINDOWS))
def test_window_layers_are_read(tmp_path: Path, name: str) -> None:
    more, layers = WINDOWS[name]
    found = read_shape(written(tmp_path, {**CONFIGS["qwen3-8b"], **more}))
    assert (found.full_layers, found.window_layers) == layers
    assert (found.window > 0) == (layers[1] > 0)


EXPERTS: dict[str, tuple[Config, tuple[int, int]]] = {
    "all": ({}, (0, 48)),
    "every second": ({"decoder_sparse_step": 2}, (24, 24)),
    "some dense": ({"mlp_only_layers": [0, 47]}, (2, 46)),
    "by marks": ({"moe_layer_freq": [0, 1] * 24}, (24, 24)),
    "no experts": ({"num_experts": 0}, (48, 0)),
}


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_expert_layers_are_read(tmp_path: Path, name: str) -> None:
    more, layers = EXPERTS[name]
    found = read_shape(written(tmp_path, {**CONFIGS["qwen3-30b-a3b"], **more}))
    assert (found.dense_layers, found.expert_layers) == layers


QUANTIZED: dict[str, tuple[Config, tuple[str, bool]]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8", False)),
    "awq": ({"quant_method": "awq", "bits": 4}, ("int4", False)),
    "gptq": ({"quant_method": "gptq", "bits": 8}, ("int8, weights only", False)),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("int4", False)),
    "modelopt": (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        },
        ("nvfp4", True),
    ),
    "modelopt fp8": ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, ("fp8", True)),
    "groups fp8": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {}}
            },
        },
        ("fp8", False),
    ),
    "groups int8": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {}}
            },
        },
        ("int8", False),
    ),
    "groups int4": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
        },
        ("int4", False),
    ),
}


@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_weight_formats_are_read(tmp_path: Path, name: str) -> None:
    more, (storage, kv_fp8) = QUANTIZED[name]
    found = read_shape(written(tmp_path, {**CONFIGS["qwen3-8b"], "quantization_config": more}))
    assert {found.stored.attention.name, found.stored.dense.name} == {storage}
    assert found.kv_fp8 == kv_fp8


def test_unquantized_weights_stay_bf16(tmp_path: Path) -> None:
    found = shape_of(tmp_path, "gpt-oss-20b")
    assert (found.stored.attention.name, found.stored.experts.name) == ("bf16", "mxfp4")
    assert any("attention" in one for one in found.assumed)
    one_layer = {"quant_method": "fp8", "ignore": ["model.layers.0.self_attn.q_proj"]}
    few = read_shape(written(tmp_path, {**CONFIGS["qwen3-8b"], "quantization_config": one_layer}))
    assert few.stored.attention.name == "fp8"


def test_the_format_is_read_from_a_separate_quantization_file(tmp_path: Path) -> None:
    beside = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    found = shape_of(tmp_path, "llama-3.1-8b")
    assert (found.stored.dense.name, found.kv_fp8) == ("fp8", True)


SAID: dict[str, tuple[Config, str]] = {
    "an unknown architecture": ({"model_type": "quux"}, "quux"),
    "no architecture": ({"model_type": None}, "without model_type"),
    "no head_dim": ({"head_dim": None}, "head_dim"),
    "linear attention": (
        {
            "layer_types": ["linear_attention", "full_attention"] * 18,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
        },
        "linear attention",
    ),
    "predicting layers": ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    "mixed formats": ({"quantization_config": {"quant_algo": "MIXED_PRECISION"}}, "mixed"),
}


@pytest.mark.parametrize("name", sorted(SAID))
def test_assumptions_are_listed(tmp_path: Path, name: str) -> None:
    more, mark = SAID[name]
    found = read_shape(written(tmp_path, {**CONFIGS["qwen3-8b"], **more}))
    assert any(mark in one for one in found.assumed)


def test_a_complete_config_needs_no_assumption(tmp_path: Path) -> None:
    assert shape_of(tmp_path, "qwen3-32b").assumed == ()


def test_sparse_attention_is_read(tmp_path: Path) -> None:
    more = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    found = read_shape(written(tmp_path, {**CONFIGS["deepseek-v3"], **more}))
    assert isinstance(found.attention, Latent)
    assert found.attention.index_keys == 2048
    assert any("sparse" in one for one in found.assumed)
