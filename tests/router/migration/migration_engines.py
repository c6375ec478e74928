"""Streams of engines with and without token ids, written out by hand for tests of migration.
Formats: vLLM 0.11 (`CompletionStreamResponse` with nulls; `ChatCompletionStreamResponse` without
unset fields), and our own engine's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from engine.timed import continuation

VOCAB = 97
# Bytes of a token: words, an umlaut and an emoji in pieces, quotes, and text like a field.
_PIECES = (
    b" to", b" be", b"\xc3", b"\xbc", b"\xf0\x9f", b"\x98\x80", b'"', b"\\", b"\n\n",
    b',"token_ids":[1]', b"data: [DONE]", b'"choices":', b"",
)  # fmt: skip


def piece(token: int) -> bytes:
    """Return the bytes to which a token decodes."""
    return _PIECES[token % len(_PIECES)]


def texts(tokens: list[int], last: bool) -> list[str]:
    """Return the text that becomes certain with each token; half a character waits for its other
    half. With `last`, the answer ends with the last token, so no text waits there.
    """
    said, held = [], b""
    for n, token in enumerate(tokens):
        held += piece(token)
        text = held.decode("utf-8", "replace")
        waits = text.endswith("\ufffd") and not (last and n == len(tokens) - 1)
        if waits and len(held) < 16:
            said.append("")
        else:
            said.append(text)
            held = b""
    return said


@dataclass(frozen=True)
class Engine:
    """Writes streams in the format of one kind of engine."""

    kind: str  # "vllm" or "warmroute"
    name: str  # part of ids and times, which differ from engine to engine

    def stream(self, body: dict[str, Any], prompt: list[int], total: int) -> list[bytes]:
        """Return the events with which the engine answers `body`: `total` tokens after `prompt`."""
        chat, ids = "messages" in body, bool(body.get("return_token_ids"))
        tokens = continuation(prompt, total, VOCAB)
        events = []
        if chat:
            delta = {"role": "assistant", "content": ""}
            opening = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            events.append(self._event(chat, [opening], self._ids("prompt_token_ids", prompt, ids)))
        for n, (token, text) in enumerate(zip(tokens, texts(tokens, last=True), strict=True)):
            ends = n == total - 1
            part: dict[str, Any] = {"index": 0}
            part |= {"delta": {"content": text}} if chat else {"text": text}
            part |= {"logprobs": None, "finish_reason": "length" if ends else None}
            if self.kind == "vllm" and (not chat or ends):
                part["stop_reason"] = None
            if not chat and self.kind == "vllm":
                part |= self._ids("prompt_token_ids", prompt, ids and n == 0)
            elif not chat and n == 0:
                part |= self._ids("prompt_token_ids", prompt, ids)
            part |= self._ids("token_ids", [token], ids)
            events.append(self._event(chat, [part], {}))
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + total}
            usage |= {"completion_tokens": total}
            events.append(self._event(chat, [], {"usage": usage}))
        return [*events, b"data: [DONE]\n\n"]

    def _ids(self, name: str, ids: list[int], shown: bool) -> dict[str, Any]:
        if shown:
            return {name: ids}
        return {name: None} if self.kind == "vllm" else {}

    def _event(self, chat: bool, choices: list[Any], more: dict[str, Any]) -> bytes:
        head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + self.name,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1_700_000_000 + len(self.name),
            "model": "m",
        }
        event = json.dumps({**head, "choices": choices, **more}, separators=(",", ":"))
        return b"data: " + event.encode() + b"\n\n"
