"""Tests of the cost of quantization: the perplexity of a trained model, and its size in bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.config import Quantization
from tests.engine.model.trained import VOCAB, perplexity, text, train
from tests.engine.tiny_models import cache, loaded

HELD_OUT = text(99, 1_600)
# Change allowed, as a share of the unquantized model's perplexity.
SETTINGS = {
    ("int8", "auto"): 0.01,
    ("int8-all", "auto"): 0.01,
    ("none", "int8"): 0.01,
    ("int8", "int8"): 0.01,
    ("none", "fp8"): 0.02,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    torch.set_num_threads(1)
    train(folder)
    return folder


def test_quantization_changes_perplexity_little(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = loaded(trained, torch.float32)
    base = perplexity(plain, HELD_OUT, "auto")
    lines = [f"{'weights':<10}{'KV':<6}{'perplexity':>12}{'change':>10}{'bytes':>9}{'KV/token':>9}"]
    changes = {}
    for weights, kv in (("none", "auto"), *SETTINGS):
        quantization = Quantization(weights, kv)
        model = loaded(trained, torch.float32, quantization=quantization)
        found = perplexity(model, HELD_OUT, kv)
        changes[weights, kv] = found / base - 1
        per_token = model.config.kv_bytes_per_token("float32", quantization=quantization)
        lines.append(
            f"{weights:<10}{kv:<6}{found:>12.5f}{changes[weights, kv]:>+10.4%}"
            f"{model.weights_bytes:>9}{per_token:>9}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert base < VOCAB / 50, "the model has learned too little for its perplexity to mean much"
    assert changes.pop(("none", "auto")) == 0.0
    for setting, change in changes.items():
        assert change != 0.0
        assert abs(change) < SETTINGS[setting], setting


def test_a_coarser_scale_raises_perplexity(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Perplexity shows a coarser scale of seven levels instead of 255, so the test above is able to
    fail.
    """
    base = perplexity(loaded(trained, torch.float32), HELD_OUT, "auto")
    monkeypatch.setattr("engine.model.layers.LIMIT", 3)
    coarse = loaded(trained, torch.float32, quantization=Quantization("int8"))
    assert perplexity(coarse, HELD_OUT, "auto") > base * 1.01
    assert cache(coarse).scales is None
