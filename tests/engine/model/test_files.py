"""Tests of model folders that cannot be served: one error names the file, the field or tensor, and
a remedy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.model.checkpoint import INDEX, Checkpoint
from engine.model.config import ModelError, read_config
from engine.model.rope import attention_factor, inverse_frequencies
from engine.model.tiny import TinySettings
from engine.wire.hf import HfTokenizer
from tests.effort import examples
from tests.engine.tiny_models import loaded, written

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("sound"), TinySettings("qwen3", shards=2))


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; the value None removes a field."""
    value = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def change_header(path: Path, name: str, **fields: Any) -> None:
    """Set fields of one tensor in the header of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[name] |= fields
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def shard_with(folder: Path, name: str) -> Path:
    return folder / str(json.loads((folder / INDEX).read_text())["weight_map"][name])


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


Harm = Callable[[Path], object]
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architectures is 'GPT2LMHeadModel', .* not built"),
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "mixture of experts.*; serve one of"),
    ({"architectures": None, "model_type": "bert"}, "'bert'"),
    ({"num_experts": 8}, "num_experts asks for a mixture of experts"),
    ({"quantization_config": {"quant_method": "gptq"}}, "asks for gptq weights; serve the unq"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "'longrope' is not built"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor must be a number"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs by layer type"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"vocab_size": -4}, "vocab_size must be an int in"),
    ({"hidden_size": True}, "hidden_size must be an int"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide 4"),
    ({"head_dim": 7}, "head_dim 7 cannot be rotated"),
    ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
    ({"eos_token_id": 264}, r"eos_token_id must be ids in 0\.\.263"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    ({"hidden_size": 32}, r"has the shape \[264, 64\], config.json asks for \[264, 32\]"),
]
FILES: list[tuple[Harm, str]] = [
    (lambda d: (d / "config.json").unlink(), "config.json: cannot be read"),
    (lambda d: (d / "config.json").write_text("[1]"), "is no JSON object"),
    (lambda d: (d / "config.json").write_text('{"a":'), "is no JSON object"),
    (lambda d: (d / "config.json").write_bytes(b"\xff" * (2 << 20)), "larger than"),
    (lambda d: (d / FIRST).unlink(), f"{INDEX}: names {FIRST}, which is not there"),
    (lambda d: (d / INDEX).unlink(), "has neither model.safetensors nor"),
    (lambda d: (d / INDEX).write_text("{}"), "has no weight_map"),
    (lambda d: truncate(d / SECOND, 4), f"{SECOND}: .*cut short within its header"),
    (lambda d: truncate(d / SECOND, 500), f"{SECOND}: .*cut short within its header"),
    (lambda d: truncate(d / SECOND, 30_000), f"{SECOND}: .*tensor .* cut short or damaged"),
    (lambda d: (d / SECOND).write_bytes(b"\xff" * 64), "asks for a header of"),
    (lambda d: (d / SECOND).write_bytes(b"\4" + b"\0" * 7 + b"abcd"), "no safetensors header"),
    (
        lambda d: change_header(shard_with(d, K_PROJ), K_PROJ, shape=[32, 128]),
        f"{K_PROJ} has the shape",
    ),
    (
        lambda d: change_header(shard_with(d, K_PROJ), K_PROJ, dtype="I8"),
        f"{K_PROJ} has the dtype I8",
    ),
    (lambda d: change_header(shard_with(d, K_PROJ), K_PROJ, dtype="F64"), "cannot be read"),
    (
        lambda d: change(d / INDEX, weight_map={K_PROJ: "../other/model.safetensors"}),
        "puts .* into '../other/model.safetensors', no file name",
    ),
    (
        lambda d: change(d / INDEX, weight_map={"absent": SECOND}),
        f"{SECOND}: has no tensor absent",
    ),
]


@pytest.mark.parametrize(("fields", "said"), CONFIGS)
def test_unsupported_configurations_are_refused(
    fields: dict[str, Any], said: str, folder: Path
) -> None:
    change(folder / "config.json", **fields)
    with pytest.raises(ModelError, match=said) as caught:
        loaded(folder)
    assert str(folder) in str(caught.value)
    assert "; " in str(caught.value), "what to do is missing"


@pytest.mark.parametrize(("harm", "said"), FILES)
def test_damaged_files_are_refused(harm: Harm, said: str, folder: Path) -> None:
    harm(folder)
    with pytest.raises(ModelError, match=said) as caught:
        loaded(folder)
    assert "; " in str(caught.value), "what to do is missing"


def test_a_shard_missing_from_the_index_is_refused(folder: Path) -> None:
    listed = json.loads((folder / INDEX).read_text())["weight_map"]
    del listed[K_PROJ]
    (folder / INDEX).write_text(json.dumps({"weight_map": {
        name: file for name, file in listed.items() if file != shard_with(folder, K_PROJ).name
    }}))  # fmt: skip
    with pytest.raises(ModelError, match="no shard has the tensor"):
        loaded(folder)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no folder"):
        read_config(tmp_path / "absent")


def test_the_error_names_a_corrupt_tokenizer(folder: Path) -> None:
    truncate(folder / "tokenizer.json", 900)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        HfTokenizer(folder)


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.binary(max_size=300))
def test_garbage_is_never_read_as_weights(data: bytes, folder: Path) -> None:
    (folder / INDEX).unlink(missing_ok=True)
    length = len(data).to_bytes(8, "little")
    for content in (data, length + data, length + b'{"a":' + data):
        (folder / "model.safetensors").write_bytes(content)
        try:
            assert not list(Checkpoint(folder).names())
        except ModelError:
            continue


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_random_configuration_is_read_or_refused(
    data: st.DataObject, sound: Path, folder: Path
) -> None:
    value = json.loads((sound / "config.json").read_text())
    rope = ("rope_type", "factor", "rope_theta", "beta_fast", "original_max_position_embeddings")
    for name in data.draw(st.lists(st.sampled_from(sorted(value)), min_size=1, max_size=3)):
        value[name] = data.draw(JSON)
    value["rope_scaling"] = {name: data.draw(JSON) for name in rope}
    (folder / "config.json").write_text(json.dumps(value))
    try:
        config = read_config(folder)
    except ModelError:
        return
    # A folder that was accepted can be computed with.
    assert bool(inverse_frequencies(config.rope, config.head_dim, 64).isfinite().all())
    assert attention_factor(config.rope) > 0
