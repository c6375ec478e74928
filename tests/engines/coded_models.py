"""Models that vLLM renders by its own code, with their real vocabularies and random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.hybrid_models import GPT_OSS, SHARED
from tests.engines.model import write_tokenizer
from tests.router.tokens.chats import TEKKEN_FILE

DAY = "2026-03-04"  # in prompts of gpt-oss
LONGEST = 16_384  # tokens of a prompt


@dataclass(frozen=True, slots=True)
class CodedModel:
    """A model whose chats vLLM renders by its own code and not by a template."""

    name: str
    config: Mapping[str, Any]
    flags: tuple[str, ...]
    thinks: bool  # its chats have reasoning
    blocks: int = 1_200  # of the cache

    @property
    def serving(self) -> tuple[str, ...]:
        """The arguments of `vllm serve` for the model."""
        flags = ("--load-format", "dummy", "--max-model-len", str(LONGEST), "--enable-scale-out")
        return (*flags, *self.flags)

    def make(self, folder: Path) -> Path:
        """Write the model's configuration and vocabulary into `folder`; return the folder."""
        folder.mkdir()
        config = {**SHARED, **self.config, "max_position_embeddings": LONGEST}
        (folder / "config.json").write_text(json.dumps(config))
        if self.thinks:
            write_tokenizer(folder)
        else:
            shutil.copy(TEKKEN_FILE, folder / "tekken.json")
        return folder


CODED = (
    CodedModel("gpt-oss", {**GPT_OSS.config, "vocab_size": 201_088}, (), thinks=True),
    CodedModel(
        "mistral",
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "num_hidden_layers": 2,
            "vocab_size": 131_072,
        },
        ("--tokenizer-mode", "mistral"),
        thinks=False,
    ),
)
