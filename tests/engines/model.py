"""A small model for real engines: Qwen3 with random weights, a tokenizer, tools and an adapter.

Its heads have 64 elements, a size that vLLM's attention on a CPU supports. Everything is made from
a seed and the project's own pages; nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from simulator import CHECKOUT

VOCABULARY = 4096
HIDDEN = 256
KV_HEADS = 2
HEAD_DIM = 64
LORA = "pirate"  # the adapter's name
LORA_RANK = 8
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# ChatML, with tools as Qwen's templates write them.
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_model(directory: Path, shows_tools: bool = True) -> Path:
    """Write the model into `directory` and the adapter into its folder `lora`; return
    `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(
        directory, TEMPLATE if shows_tools else TEMPLATE.replace("if tools", "if false")
    )
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM, max_position_embeddings=8192, tie_word_embeddings=False,
        eos_token_id=2, bos_token_id=0, pad_token_id=0,
        # Wide enough that rounding cannot change which token is the likeliest.
        initializer_range=0.12,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    _write_lora(directory / "lora", config.num_hidden_layers)
    return directory


def write_tokenizer(
    directory: Path, template: str = TEMPLATE, more_specials: Sequence[str] = ()
) -> None:
    """Write a tokenizer trained on the project's own pages, and its chat template."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIALS, *more_specials], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train([str(page) for page in sorted((CHECKOUT / "docs").rglob("*.md"))], trainer)
    made.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def _write_lora(directory: Path, layers: int) -> None:
    directory.mkdir(exist_ok=True)
    draw = np.random.default_rng(1)
    weights = {}
    for layer in range(layers):
        for name, outputs in (("q_proj", 4 * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (LORA_RANK, HIDDEN)), ("B", (outputs, LORA_RANK))):
                values = draw.standard_normal(shape, np.float32) / 10
                weights[f"{prefix}.lora_{part}.weight"] = values
    safetensors.numpy.save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": LORA_RANK,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
