"""Tests of model files that cannot be read: the error names the file and the field, and no other
error is raised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.step_times.derive import Deployment, DeploymentError, derived
from simulator.step_times.fields import MAX_FILE_BYTES, ConfigError
from simulator.step_times.gpus import GPUS
from simulator.step_times.model_shape import ModelShape
from simulator.step_times.read_shape import read_shape
from tests.simulator.step_times.configs import CONFIGS, Config, written

BASE = CONFIGS["qwen3-30b-a3b"]
REFUSED: dict[str, tuple[Config, str]] = {
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers"),
    "zero layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "negative layers": ({"num_hidden_layers": -1}, "num_hidden_layers"),
    "layers without end": ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
    "layers by halves": ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
    "no heads": ({"num_attention_heads": None}, "num_attention_heads"),
    "zero heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "true heads": ({"num_attention_heads": True}, "num_attention_heads"),
    "heads in words": ({"num_attention_heads": "32"}, "num_attention_heads"),
    "KV heads that do not divide": ({"num_key_value_heads": 5}, "num_key_value_heads"),
    "no width": ({"hidden_size": None}, "hidden_size"),
    "no width of a head": ({"head_dim": None, "hidden_size": 2050}, "head_dim"),
    "no vocabulary": ({"vocab_size": None}, "vocab_size"),
    "more experts a token than there are": ({"num_experts_per_tok": 129}, "num_experts_per_tok"),
    "no experts a token": ({"num_experts_per_tok": None}, "num_experts_per_tok"),
    "an unknown kind of layer": ({"layer_types": ["quantum"] * 48}, "layer_types"),
    "too few types": ({"layer_types": ["full_attention"]}, "layer_types"),
    "types that are numbers": ({"layer_types": [1] * 48}, "layer_types"),
    "no window": ({"layer_types": ["sliding_attention"] * 48}, "sliding_window"),
    "a quantization nobody knows": ({"quantization_config": {"quant_method": "x"}}, "quant_method"),
    "three bits": ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "bits"),
    "a quantization in words": ({"quantization_config": "fp8"}, "quantization_config"),
    "layers one by one": ({"block_configs": [{}]}, "block_configs"),
    "an encoder": ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    "a name that cannot be shown": ({"model_type": "a\nb"}, "model_type"),
    "a model in words": ({"text_config": "x"}, "text_config"),
    "too many parameters": (
        {"hidden_size": 1 << 22, "moe_intermediate_size": 1 << 22}, "parameters"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_error_for_a_wrong_field_names_it(tmp_path: Path, name: str) -> None:
    more, field = REFUSED[name]
    path = written(tmp_path, {**BASE, **more})
    with pytest.raises(ConfigError, match=field) as refused:
        read_shape(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b"{" + b" " * MAX_FILE_BYTES + b"}"],
    ids=["empty", "cut", "a list", "a number", "no text", "deep", "large"],
)
def test_the_error_for_a_wrong_file_names_it(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as refused:
        read_shape(path)
    assert str(path) in str(refused.value)


def test_a_missing_file_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "no.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_shape(path)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 10**6)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["full_attention", "linear_attention", "mamba", "fp8", "M*E-", "NVFP4"])
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KNOWN = sorted(
    {name for config in CONFIGS.values() for name in config}
    | {"layer_types", "hybrid_override_pattern", "index_topk", "index_n_heads", "index_head_dim"}
    | {"hybrid_layer_pattern", "full_attention_interval", "mlp_only_layers", "global_head_dim"}
    | {"swa_num_attention_heads", "swa_head_dim", "kv_cache_scheme", "n_shared_experts"}
)
FIELDS = st.dictionaries(st.sampled_from(KNOWN), VALUES, max_size=6)
QUANTIZATION = ("quant_method", "quant_algo", "bits", "config_groups", "ignore", "group_0")
QUANTIZATIONS = st.dictionaries(st.sampled_from(QUANTIZATION), VALUES)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(CONFIGS)),
    FIELDS,
    st.none() | QUANTIZATIONS,
    st.sampled_from(sorted(GPUS)),
    st.integers(1, 16),
    st.booleans(),
)
def test_any_config_is_read_or_raises_a_config_error(
    tmp_path: Path, base: str, more: Config, stored: Config | None, gpu: str, gpus: int, ep: bool
) -> None:
    config = {**CONFIGS[base], **more}
    if stored is not None:
        config["quantization_config"] = stored
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    try:
        shape = read_shape(path)
    except ConfigError:
        return
    assert isinstance(shape, ModelShape)
    try:
        found = derived(shape, Deployment(GPUS[gpu], gpus, ep), "x")
    except DeploymentError:
        return
    assert found.profile.kv_capacity_tokens > 0
    assert found.profile.step_time.prefill_s(100) > 0


@given(st.binary(max_size=60))
def test_any_bytes_raise_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "config.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError):
        read_shape(path)
