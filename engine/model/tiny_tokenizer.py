"""The tokenizer and chat template of a tiny checkpoint: bytes, and a few special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

# The special tokens that the architecture's own models have, filled up to eight.
_LLAMA = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")
_QWEN = ("endoftext", "im_start", "im_end")
BYTES = 256
SPECIALS = MappingProxyType(
    {
        arch: tuple(
            f"<|{name}|>" for name in (*names, *(f"spare_{i}" for i in range(8 - len(names))))
        )
        for arch, names in (("llama", _LLAMA), ("qwen2", _QWEN), ("qwen3", _QWEN))
    }
)
VOCAB = BYTES + 8

_LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_QWEN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


class SpecialIds(NamedTuple):
    """The ids that begin a prompt and end an answer."""

    bos: int
    ends: tuple[int, ...]


def special_ids(arch: str) -> SpecialIds:
    """The special ids of `arch`; they follow the bytes."""
    if arch == "llama":
        return SpecialIds(BYTES, (BYTES + 1, BYTES + 4))
    return SpecialIds(BYTES, (BYTES + 2, BYTES))


def write_tokenizer(directory: Path, arch: str) -> None:
    """Write tokenizer.json and tokenizer_config.json with the chat template; raises OSError."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(alphabet)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    specials = SPECIALS[arch]
    made.add_special_tokens(list(specials))
    ids = special_ids(arch)
    if arch == "llama":
        made.post_processor = processors.TemplateProcessing(
            single=f"{specials[0]} $A", special_tokens=[(specials[0], ids.bos)]
        )
    (directory / "tokenizer.json").write_text(made.to_str(pretty=True) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[0] if arch == "llama" else None,
        "eos_token": specials[ids.ends[0] - BYTES],
        "chat_template": _LLAMA_TEMPLATE if arch == "llama" else _QWEN_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
