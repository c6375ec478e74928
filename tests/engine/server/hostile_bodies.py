"""Makes hostile requests to a worker: strange values in valid JSON, tensors of wrong sizes, and
broken bytes.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.live.hostile.mutations import harm

OPENAI = ("/v1/completions", "/v1/chat/completions")
CACHE = ("/pin_prefix", "/unpin_prefix", "/tokenize", "/detokenize")
LENGTH_HEADER = "Inference-Header-Content-Length"

_NUMBERS = (
    *(0, 1, -1, 2, 7, 64, 65, 1e-300, 1e300, -0.0, 0.5, 1.5, 2**31 - 1, 2**31, -(2**31) - 1),
    *(2**53, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**30, 1e-45, 3.4e38),
)
_TEXTS = (
    *("", " ", "a", "\x00", "\ud800", "\udfff\ud800", "é" * 50, "\U0001f600", "a" * 5_000),
    *("{{ x }}", "{% for %}", "t99999999", "t-1", "null", "NaN", "../../etc/passwd", "\r\n\r\n"),
)
_NESTED = (None, True, False, [], {}, [[]], [None], {"": {}}, [[[1]]], {"a": [{"b": []}]})
_MESSAGES = (
    [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": None}],
    [{"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "1"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}],
    [{"role": "\ud800", "content": "\ud800"}],
    [{"role": "system", "content": "a"}] * 300,
)
_PROMPTS = (
    *("hi", [1, 2, 3], ["a", "b"], [[1], [2, 3]], [1] * 300, [0], [-1], [31_999], [32_000]),
    *([2**31 - 1], [2**31], [1.5], ["a", 1], [[1], "a"], [[]], [[[1]]], [True], [1] * 5_000),
)
_RANGE = {"token_start": 0, "token_end": 16, "priority": 80, "duration_ms": 5.0}
_RETENTIONS = (
    *({}, {"token_range_retention_configs": [_RANGE]}, {"decode_retention_priority": 0}),
    *({"token_range_retention_configs": [_RANGE] * 2}, {"decode_duration_ms": 1e300}),
)
_FIELDS = (
    *("max_tokens", "max_completion_tokens", "n", "best_of", "temperature", "top_k", "top_p"),
    *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop"),
    *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "stream"),
    *("stream_options", "cache_salt", "priority", "return_token_ids", "skip_special_tokens"),
    *("truncate_prompt_tokens", "truncation_side", "add_special_tokens", "logprobs", "echo"),
    *("top_logprobs", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("chat_template_kwargs", "reasoning_effort", "model", "kv_cache_retention_config", "user"),
    *("ttl_ms", "chain_hash", "tokens"),
)
_TENSORS = (
    *("text_input", "input_ids", "max_tokens", "request_output_len", "temperature", "top_k"),
    *("top_p", "random_seed", "stop_words", "ignore_eos", "bad_words", "beam_width", "\ud800"),
    *("retention_token_range_starts", "retention_token_range_priorities"),
)
_KINDS = ("BYTES", "INT32", "INT64", "UINT32", "UINT64", "FP32", "BOOL", "FP64", "", "\ud800")


@dataclass(frozen=True)
class FuzzedRequest:
    """One request: its path, body and headers."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_stream(self) -> bool:
        return b'"stream": true' in self.body or self.path.endswith("generate_stream")

    def raw(self) -> bytes:
        """Return the request as bytes of HTTP/1.1."""
        head = [f"POST {self.path} HTTP/1.1", "Host: x", f"Content-Length: {len(self.body)}"]
        head += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + self.body


def requests(rng: random.Random, model: str) -> Iterator[FuzzedRequest]:
    """Yield endless requests that any HTTP server can read, most with a value or two that this
    server cannot serve.
    """
    makers = (_openai, _openai, _openai, _cache, _generate, _infer, _infer)
    while True:
        made = rng.choice(makers)(rng, model)
        headers: dict[str, str] = dict(made.headers)
        if not rng.randrange(8):
            headers["x-request-timeout-ms"] = rng.choice(["0", "1", "50", "-1", "1e3", "9" * 30])
        if not rng.randrange(8):
            headers["x-tenant"] = rng.choice(["a", "", "b" * 1_025, "c" * 1_024])
        yield FuzzedRequest(made.path, made.body, headers)


def broken(rng: random.Random, model: str) -> Iterator[bytes]:
    """Yield endless requests as bytes, each with up to four faults."""
    whole = requests(rng, model)
    while True:
        parts = [next(whole).raw() for _ in range(3)]
        data = bytearray(parts[0])
        for _ in range(rng.randrange(5)):
            harm(rng, data, parts)
        yield bytes(data)


def _value(rng: random.Random) -> Any:
    kinds = (_NUMBERS, _NUMBERS, _TEXTS, _NESTED, _PROMPTS, _MESSAGES, _RETENTIONS)
    value = rng.choice(rng.choice(kinds))
    return [value] * rng.randrange(70) if not rng.randrange(10) else value


def _written(rng: random.Random, told: dict[str, Any]) -> bytes:
    data = json.dumps(told).encode()  # lone surrogates stay escapes, valid JSON as it is
    match rng.randrange(12):
        case 0:
            return data[:-1] + b', "prompt": "twice"}'
        case 1:
            return data[:-1] + b', "deep": ' + b"[" * 3_000 + b"]" * 3_000 + b"}"
        case 2:
            return b" " * 300 + data + b"\n"
        case _:
            return data


def _openai(rng: random.Random, model: str) -> FuzzedRequest:
    path = rng.choice(OPENAI)
    told: dict[str, Any] = {"max_tokens": rng.randrange(1, 5)}
    if path == OPENAI[0]:
        told["prompt"] = rng.choice(_PROMPTS) if rng.randrange(4) else _value(rng)
    else:
        told["messages"] = rng.choice(_MESSAGES) if rng.randrange(4) else _value(rng)
    for _ in range(rng.randrange(4)):
        told[rng.choice(_FIELDS)] = _value(rng)
    if not rng.randrange(3):
        told["stream"] = True
    return FuzzedRequest(path, _written(rng, told))


def _cache(rng: random.Random, model: str) -> FuzzedRequest:
    told = {rng.choice(("prompt", "messages", "chain_hash", "tokens")): _value(rng)}
    if rng.randrange(2):
        told["prompt"] = rng.choice(_PROMPTS)
    if not rng.randrange(3):
        told[rng.choice(_FIELDS)] = _value(rng)
    return FuzzedRequest(rng.choice(CACHE), _written(rng, told))


def _generate(rng: random.Random, model: str) -> FuzzedRequest:
    told: dict[str, Any] = {"text_input": rng.choice(_TEXTS), "max_tokens": 3}
    for _ in range(rng.randrange(3)):
        told[rng.choice(_TENSORS)] = _value(rng)
    name = rng.choice(("generate", "generate_stream"))
    return FuzzedRequest(f"/v2/models/{model}/{name}", _written(rng, told))


def _infer(rng: random.Random, model: str) -> FuzzedRequest:
    inputs, after = [], b""
    names = ["input_ids", "max_tokens", *rng.choices(_TENSORS, k=rng.randrange(3))]
    for name in names:
        kind = rng.choice(_KINDS) if not rng.randrange(4) else "INT32"
        count = rng.randrange(4) if name != "max_tokens" else 1
        one: dict[str, Any] = {"name": name, "datatype": kind, "shape": [count]}
        if not rng.randrange(5):
            one["shape"] = rng.choice([[], [-1], [2**62, 4], [0], [1] * 20, [2, 2], "x", [1.5]])
        if rng.randrange(2):
            values = b"".join(struct.pack("<i", rng.randrange(-2, 30)) for _ in range(count))
            if not rng.randrange(5):
                values = rng.randbytes(rng.randrange(40))
            one["parameters"] = {"binary_data_size": len(values)}
            if not rng.randrange(6):
                one["parameters"] = {"binary_data_size": _value(rng)}
            after += values
        else:
            one["data"] = [rng.randrange(1, 30) for _ in range(count)]
            if not rng.randrange(4):
                one["data"] = _value(rng)
        inputs.append(one)
    told: dict[str, Any] = {"inputs": inputs}
    if not rng.randrange(3):
        told["outputs"] = [{"name": rng.choice(["text_output", "output_ids", "x"])}]
    if not rng.randrange(3):
        told["parameters"] = {"binary_data_output": rng.choice([True, 1, "x"])}
    if not rng.randrange(6):
        told["id"] = _value(rng)
    data = json.dumps(told).encode()
    length = rng.choice(["-1", "0", "9" * 20, str(len(data) + 1)]) if not rng.randrange(6) else ""
    headers = {LENGTH_HEADER: length or str(len(data))}
    return FuzzedRequest(f"/v2/models/{model}/infer", data + after, headers)
