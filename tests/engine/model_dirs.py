"""Makes model directories like those that users serve, without downloads.

They have small tokenizers of each kind, trained on a few sentences, and chat templates written for
these tests with the features of real ones: tools, thinking, trims, content parts, refusals.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def answer(question):\n    return {'text': question.strip(), 'n': 42}\n",
    "Größe, naïve, œuvre, 東京は夜の七時, привет мир 🦊🦊",
    "system user assistant tool function arguments name parameters type object",
    "   leading and trailing   white space\n\n\nand newlines\t tabs",
)

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- else %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

INST = """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' and not loop.first %}
{{ raise_exception('system comes first') }}{% endif %}
{% if message['role'] in ('user', 'system', 'tool') %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ ' ' + (message['content'] or '') + eos_token }}
{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"""

TURNS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}
{% else %}{% set first = '' %}{% endif %}
{% for message in messages %}{% if message['role'] != 'system' %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + (first + '\\n' if loop.index0 == 1 and first else '') }}
{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

PARTS = """\
{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>
{% if message.content is string %}{{ message.content }}{% else %}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}
{% endfor %}{% endif %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

TEMPLATES = MappingProxyType(
    {"chatml": CHATML, "headers": HEADERS, "inst": INST, "turns": TURNS, "parts": PARTS}
)
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>"),
)
# Looked for after normalization, like Qwen's; and one with a blank beside it.
ORDINARY = ("<tool_call>", "</tool_call>", "<think>", "</think>")
KINDS = ("bytes", "metaspace-first", "metaspace-always", "prepend", "lowercase", "unigram", "words")


@cache
def tokenizer_text(kind: str) -> str:
    """Return a tokenizer of one of KINDS as the text of a `tokenizer.json`."""
    if kind == "bytes":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet)
    elif kind.startswith("metaspace") or kind == "prepend":
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        if kind == "prepend":
            steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            made.normalizer = normalizers.Sequence(steps)
        else:
            scheme = kind.partition("-")[2]
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"])
    elif kind == "lowercase":
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        steps = [normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()]
        made.normalizer = normalizers.Sequence(steps)
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"])
    elif kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    else:
        made = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(vocab_size=300, special_tokens=["<unk>"])
    if hasattr(trainer, "show_progress"):
        trainer.show_progress = False
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens([AddedToken(token, normalized=False) for token in ORDINARY[:2]])
    made.add_tokens([AddedToken(token, normalized=True) for token in ORDINARY[2:]])
    bos = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return str(made.to_str())


def write_model(
    directory: Path, kind: str = "bytes", template: str = "chatml", **config: Any
) -> Path:
    """Write a model directory with a tokenizer of `kind`, one of TEMPLATES, and the fields `config`
    in its configuration; return the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer_text(kind))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "chat_template": TEMPLATES[template],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return directory
