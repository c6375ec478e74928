"""An event of one worker's stream, written as the client's stream has it. No I/O.

Bytes are cut out and put in, never encoded anew, so that all else stays as the engine wrote it.
Quotes inside of JSON strings are escaped, so a name in quotes with a colon can only be a key.
"""

from __future__ import annotations

import json
import re

import msgspec

CHOICES = b'"choices":'
_IDS = re.compile(rb'"(prompt_)?token_ids":(?:null|\[[^\]]*\])')
_COMMA_IDS = re.compile(rb',"(prompt_)?token_ids":(?:null|\[[^\]]*\])')
_TEXT = re.compile(rb'"text":("(?:[^"\\]|\\.)*")')
_USAGE = re.compile(rb'"usage":(?=\{)')
_CHOICE_PROMPT = re.compile(rb',"prompt_token_ids":(?:null|\[[^\]]*\])')
_NO_STOP = b',"finish_reason":null,"stop_reason":null'
_DECODER = json.JSONDecoder()
_DONE = b"data: [DONE]\n\n"


def prefix_of(data: bytes) -> bytes | None:
    """What stands before an event's choices: its id, object, time and model; None: no choices."""
    at = data.find(CHOICES)
    return None if at < 0 else data[:at]


def with_prefix(data: bytes, prefix: bytes) -> bytes:
    """The event under the first stream's id, object, time and model."""
    at = data.find(CHOICES)
    return data if at < 0 else prefix + data[at:]


def without_ids(data: bytes, hidden: bytes, prompt_only: bool = False) -> bytes:
    """The event with `hidden` where its ids were; empty: without the fields.

    `prompt_only`: those of what it says may be seen.
    """
    if b'token_ids":' not in data:
        return data

    def cut(found: re.Match[bytes]) -> bytes:
        return found[0] if prompt_only and found[1] is None else b""

    def blank(found: re.Match[bytes]) -> bytes:
        if prompt_only and found[1] is None:
            return found[0]
        return b'"%btoken_ids":%b' % (found[1] or b"", hidden)

    return _IDS.sub(blank, data) if hidden else _COMMA_IDS.sub(cut, data)


def as_chat(data: bytes) -> bytes:
    """A completion's event in the shape of a chat's, as vLLM writes either.

    A chat has no field for the prompt's ids in its choices, and says why it stopped when it does.
    """
    data, texts = _TEXT.subn(lambda found: b'"delta":{"content":%b}' % found[1], data, count=1)
    if not texts:
        return data
    return _CHOICE_PROMPT.sub(b"", data).replace(_NO_STOP, b',"finish_reason":null', 1)


def with_usage(data: bytes, prompt_tokens: int, said: int) -> bytes:
    """The event with the whole answer's counts, `said` tokens of it before this worker's."""
    found = _USAGE.search(data)
    if found is None:
        return data
    try:
        text = data[found.end() :].decode()
        usage, chars = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return data
    if isinstance(answer := usage.get("completion_tokens"), int):
        usage |= counts(prompt_tokens, answer + said)  # keys that are there keep their order
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
        usage["prompt_tokens_details"] = details | {"cached_tokens": min(cached, prompt_tokens)}
    return data[: found.end()] + msgspec.json.encode(usage) + text[chars:].encode()


def counts(prompt_tokens: int, said: int) -> dict[str, int]:
    """OpenAI's counts of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + said,
        "completion_tokens": said,
    }


def closing(prefix: bytes, usage: dict[str, int] | None) -> bytes:
    """The end of a stream that said all it had to say, but for its usage and its last line."""
    if usage is None:
        return _DONE
    return b'data: %b"choices":[],"usage":%b}\n\n' % (prefix, msgspec.json.encode(usage)) + _DONE
