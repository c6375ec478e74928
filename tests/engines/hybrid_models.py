"""Small models whose layers keep KV by different rules, for real vLLM on a CPU.

Each is a configuration and a tokenizer: vLLM makes random weights (`--load-format dummy`), which do
not change the number of cached tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.engines.model import TEMPLATE, VOCABULARY, write_tokenizer

WINDOW = 128
HEAD = "head"  # the folder of an EAGLE head, in its model's
LLAMA: Mapping[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
HEAD_DIM = 64  # the smallest, except 32, that attention on a CPU supports
SHARED: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class HybridModel:
    """A model's name, its configuration, and the size of vLLM's cache in a test."""

    name: str
    config: Mapping[str, Any]
    asked_size: int  # of a block; vLLM may take a larger one
    blocks: int  # of the pool that its groups share
    limits: tuple[str, ...]  # the kinds of its cache groups but full attention
    max_tokens: int = 1024  # of a prompt and its answer
    drafts: bool = False  # an EAGLE head proposes tokens
    more: tuple[str, ...] = ()  # flags
    template: str = TEMPLATE  # of chats

    def flags(self, directory: Path) -> Sequence[str]:
        """Return the arguments of `vllm serve` for the model made in `directory`."""
        head = {"method": "eagle", "model": str(directory / HEAD), "num_speculative_tokens": 2}
        return [
            *("--load-format", "dummy", "--max-model-len", str(self.max_tokens)),
            *("--max-num-batched-tokens", "512"),
            *(("--speculative-config", json.dumps(head)) if self.drafts else ()),
            *self.more,
        ]

    def make(self, directory: Path) -> Path:
        """Write the configuration and the tokenizer into `directory`; return it."""
        directory.mkdir(parents=True, exist_ok=True)
        write_tokenizer(directory, self.template)
        text = json.dumps({**SHARED, **self.config}, indent=1)
        (directory / "config.json").write_text(text + "\n")
        if self.drafts:
            (directory / HEAD).mkdir(exist_ok=True)
            head = json.dumps({**SHARED, **LLAMA, "num_hidden_layers": 1}, indent=1)
            (directory / HEAD / "config.json").write_text(head + "\n")
        return directory


GEMMA = HybridModel(
    "gemma",
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": HEAD_DIM,
        "tie_word_embeddings": True,
    },
    asked_size=32,
    blocks=600,
    limits=("window",) * 5,
)
GPT_OSS = HybridModel(
    "gpt-oss",
    {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    asked_size=32,
    blocks=300,
    limits=("window",),
)
QWEN3_NEXT = HybridModel(
    "qwen3-next",
    {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    asked_size=32,
    blocks=120,
    limits=("state",) * 3,
)
MISTRAL = HybridModel(
    "mistral",
    {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
    },
    asked_size=32,
    blocks=120,
    limits=("window",),
)
HYBRIDS = (GEMMA, GPT_OSS, QWEN3_NEXT, MISTRAL)

EAGLE = HybridModel(
    "llama-eagle",
    {**LLAMA, "num_hidden_layers": 2},
    asked_size=32,
    blocks=120,
    limits=(),
    drafts=True,
)
GEMMA_EAGLE = replace(GEMMA, name="gemma-eagle", drafts=True)
DRAFTED = (EAGLE, GEMMA_EAGLE)
