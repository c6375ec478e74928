"""Tests that our logits equal those of transformers for all architectures, dtypes and kinds of
rotary embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.model.tiny import TinySettings
from tests.engine.tiny_models import full_logits, loaded, oracle, some_ids, written

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
}
# The rotation's fields of config.json, by kind.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": YARN,
    "yarn-scaled": YARN | {"attention_factor": 0.7, "truncate": False},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
}
SETTINGS = {
    "llama": TinySettings("llama", shards=3),
    "llama-tied": TinySettings("llama", is_tied=True, heads=4, kv_heads=1),
    "qwen2": TinySettings("qwen2"),
    "qwen2-untied": TinySettings("qwen2", is_tied=False, kv_heads=4),
    "qwen3": TinySettings("qwen3", layers=3),
    "qwen3-tied": TinySettings("qwen3", is_tied=True, hidden_size=48, head_dim=32),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, ids = written(tmp_path, SETTINGS[name]), some_ids(100)
    ours, theirs = full_logits(loaded(folder), ids), oracle(folder, ids)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_close_to_those_of_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder, ids = written(tmp_path, SETTINGS[name]), some_ids(120)
    ours, exact = full_logits(loaded(folder, dtype), ids), oracle(folder, ids, torch.float64)
    theirs = oracle(folder, ids, dtype).float()
    assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
    # Our logits are no farther from the truth than transformers', except by chance.
    ours_off, theirs_off = (ours - exact).norm(), (theirs - exact).norm()
    assert float(ours_off) < 1.25 * float(theirs_off)


@pytest.mark.parametrize("kind", ROPES)
def test_logits_with_every_rope_type_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    settings = TinySettings("qwen2", max_positions=128, rope=ROPES[kind])
    folder, ids = written(tmp_path, settings), some_ids(100)
    torch.testing.assert_close(
        full_logits(loaded(folder), ids), oracle(folder, ids), rtol=0, atol=1e-5
    )


def test_dynamic_rope_scaling_equals_that_of_transformers(tmp_path: Path) -> None:
    """Dynamic rope scaling equals that of transformers for the longest sequence: transformers
    rescales by the current sequence, our model by the longest that it serves.
    """
    settings = TinySettings("llama", max_positions=64, rope=ROPES["dynamic"])
    folder, ids = written(tmp_path, settings), some_ids(120)
    ours = full_logits(loaded(folder, max_tokens=120), ids)
    torch.testing.assert_close(ours, oracle(folder, ids), rtol=0, atol=1e-5)
    unscaled = full_logits(loaded(folder, max_tokens=64), ids[:64])
    assert not torch.allclose(ours[:64], unscaled, rtol=0, atol=1e-3)


def test_both_configuration_schemas_give_the_same_model(tmp_path: Path) -> None:
    """A configuration in the schema of transformers 5 gives the same model as one in the older
    schema.
    """
    folder, ids = written(tmp_path, SETTINGS["llama"]), some_ids(40)
    again = tmp_path / "again"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(again)
    assert "rope_parameters" in (again / "config.json").read_text()
    assert torch.equal(full_logits(loaded(again), ids), full_logits(loaded(folder), ids))
