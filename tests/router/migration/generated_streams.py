"""Writes streams of SGLang's /generate for tests, and reads back what a client got."""

from __future__ import annotations

import json
from typing import Any, Literal

from engine.timed import continuation
from tests.router.migration.migration_engines import VOCAB, texts

PROMPT = [3, 1, 4, 1, 5]
# Which parts of each event are new: none, ids, or ids and text.
Mode = Literal["whole", "ids", "pieces"]


def stream(mode: Mode, name: str, prompt: list[int], total: int, ends: str = "") -> list[bytes]:
    """Return the events of a stream that a worker sends, as SGLang 0.5 writes them."""
    tokens = continuation(prompt, total, VOCAB)
    events, text, before = [], "", 0
    for n, piece in enumerate(texts(tokens, last=True), start=1):
        text += piece
        finish = {"type": "length", "length": total} if n == total else None
        if ends and n == total:
            finish = json.loads(ends)
        meta = {"id": name, "finish_reason": finish, "prompt_tokens": len(prompt)}
        meta |= {"weight_version": "default", "completion_tokens": n, "cached_tokens": 2}
        event = {
            "text": piece if mode == "pieces" else text,
            "output_ids": tokens[:n] if mode == "whole" else tokens[before:n],
            "meta_info": meta,
        }
        before = n
        events.append(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
    return [*events, b"data: [DONE]\n\n"]


def parsed_stream(out: bytes, mode: Mode) -> tuple[str, list[int], list[dict[str, Any]]]:
    """Return text, ids and the `meta_info` objects of a client's stream; fails if a field that
    repeats the whole answer does not begin with its earlier value.
    """
    text, ids, metas = "", list[int](), []
    events = out.split(b"\n\n")
    assert events.pop() == b""
    for event in events:
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            continue
        read = json.loads(data)
        if mode == "pieces":
            text += read["text"]
        else:
            assert read["text"].startswith(text)
            text = read["text"]
        if mode == "whole":
            assert read["output_ids"][: len(ids)] == ids
            ids = read["output_ids"]
        else:
            ids += read["output_ids"]
        metas.append(read["meta_info"])
        assert read["meta_info"]["completion_tokens"] == len(ids)
    return text, ids, metas
