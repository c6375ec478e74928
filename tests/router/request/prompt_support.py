"""Bodies of requests, and a reader of prompts, for the tests of reading prompts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from engine.wire.memo import MemoEncoder
from router.body.scan import Scanned, scan
from router.request.prompts import Prompt, PromptReader
from router.tokens.check import TokenCheck
from router.tokens.encoders import Encoders

NOW_S = 1_700_000_000.0


def completion(prompt: Any, **fields: Any) -> Scanned:
    return scan(json.dumps({"prompt": prompt} | fields).encode(), "/v1/completions")


def chat(*messages: str, **fields: Any) -> Scanned:
    body = {"messages": [{"role": "user", "content": text} for text in messages]} | fields
    return scan(json.dumps(body).encode(), "/v1/chat/completions")


def reader_of(
    tokenizer: Any, executor: ThreadPoolExecutor, waiting_max: int = 8, **more: Any
) -> PromptReader:
    encoders = None
    if tokenizer is not None:
        encoder = MemoEncoder(tokenizer, None, 0)
        encoders = Encoders(encoder, {}, encoder.memo)
    check = more.pop("check", None) or TokenCheck(lambda: 0.0, lambda: 1.0)
    return PromptReader(encoders, executor, lambda: NOW_S, waiting_max, check, **more)


async def read(
    scanned: Scanned,
    executor: ThreadPoolExecutor,
    tokenizer: Any = None,
    model: str = "m",
    sizes: tuple[int, ...] = (4,),
) -> Prompt:
    return await reader_of(tokenizer, executor).read(scanned, model, sizes)


def same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other))
