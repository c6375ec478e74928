"""Tests of `make-tiny`: it writes the same bytes each time, with a readable tokenizer, and refuses
wrong input with one message.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cli import main as cli
from engine.model.checkpoint import Checkpoint
from engine.model.config import read_config
from engine.model.tiny import ARCHS, TinySettings, make_tiny
from engine.wire.hf import HfTokenizer
from engine.wire.tokens import Chat


@pytest.mark.parametrize("arch", ARCHS)
def test_a_tiny_model_has_a_matching_tokenizer_and_template(arch: str, tmp_path: Path) -> None:
    assert cli.main(["make-tiny", str(tmp_path / "m"), "--arch", arch]) == 0
    tokenizer, config = HfTokenizer(tmp_path / "m"), read_config(tmp_path / "m")
    assert tokenizer.vocab == config.vocab == 264
    ids = tokenizer.encode("héllo 世界", add_special_tokens=False)
    assert len(ids) == len("héllo 世界".encode())
    assert tokenizer.decode(ids) == "héllo 世界"
    chat = tokenizer.encode_chat(Chat([{"role": "user", "content": "hi"}]), 0.0)
    assert chat[0] == config.bos_ids[0] if arch == "llama" else chat[0] == 257
    assert set(config.eos_ids) & set(chat), "the turn's end ends an answer, too"
    assert tokenizer.decode(chat).endswith(("assistant\n", "assistant<|end_header_id|>\n\n"))


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_tiny(tmp_path / name, TinySettings(seed=seed))
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_bfloat16_is_rounded_as_by_torch(tmp_path: Path) -> None:
    make_tiny(tmp_path / "wide", TinySettings())
    make_tiny(tmp_path / "half", TinySettings(dtype="bfloat16"))
    assert read_config(tmp_path / "half").dtype == "bfloat16"
    with Checkpoint(tmp_path / "wide") as wide, Checkpoint(tmp_path / "half") as half:
        for name in wide.names():
            assert torch.equal(wide.tensor(name).bfloat16(), half.tensor(name))
        part = wide.tensor("model.embed_tokens.weight", slice(3, 9), slice(2, 5))
        full = wide.tensor("model.embed_tokens.weight")
        assert np.array_equal(part.numpy(), full.numpy()[3:9, 2:5])


def test_an_existing_model_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["make-tiny", str(tmp_path)]) == 0
    assert cli.main(["make-tiny", str(tmp_path)]) == 1
    assert "has a model already" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--arch", "gpt2"], ["--layers", "0"], ["--seed", "-1"], []])
def test_bad_flags_are_rejected(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    where = ["nowhere"] if flags else []
    with pytest.raises(SystemExit) as caught:
        cli.main(["make-tiny", *where, *flags])
    assert caught.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{"arch": "gpt2"}, {"dtype": "int8"}])
def test_unknown_settings_are_rejected(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        TinySettings(**settings)  # type: ignore[arg-type]
