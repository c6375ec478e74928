"""Fixtures: a tiny model, the tokens that it must give, and a folder with only a real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from engine.model.tiny import make_tiny

if TYPE_CHECKING:
    from tests.engine.real import Reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny random model."""
    path = tmp_path_factory.mktemp("model")
    make_tiny(path)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """Return the oracle for the model in `folder`, which computes one prompt at a time."""
    from tests.engine.real import Reference  # imports torch, which most tests here do without

    return Reference(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder with a byte-level tokenizer, which puts <s> before plain prompts, and a list
    of templates.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>"},
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}D{{ messages[0].content }}"},
            {"name": "tool_use", "template": "T"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path
