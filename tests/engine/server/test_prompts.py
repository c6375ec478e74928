"""Tests of the request fields that decide which text becomes the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.scheduler.types import SchedulerSettings
from engine.wire.hf import HfTokenizer
from tests.engine.harness import running

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


async def test_truncation_and_special_token_fields_shape_the_prompt(model: Path) -> None:
    tokenizer = HfTokenizer(model)
    text = "one two three"
    plain = tokenizer.encode(text)

    async with running(tokenizer, scheduler=SchedulerSettings(max_model_tokens=12)) as worker:

        async def ids(path: str = COMPLETIONS, **fields: Any) -> list[int]:
            body = {"max_tokens": 1, "return_token_ids": True} | fields
            status, answer = await worker.post(path, body)
            assert status == 200, answer
            found = answer if path == CHAT else answer["choices"][0]
            return list(found["prompt_token_ids"])

        assert await ids(prompt=text, truncate_prompt_tokens=4) == plain[-4:]
        assert await ids(prompt=plain, truncate_prompt_tokens=4) == plain[-4:]
        first = {"truncate_prompt_tokens": 4, "truncation_side": "right"}
        assert await ids(prompt=text, **first) == plain[:4]
        assert await ids(prompt=text, truncate_prompt_tokens=-1) == plain[-11:]
        assert await ids(prompt="ab", add_special_tokens=False) == tokenizer.encode("ab", False)
        chat = {"messages": [{"role": "user", "content": "ab"}]}
        rendered = tokenizer.encode("<s>Dab", False)
        assert await ids(CHAT, **chat) == rendered
        assert await ids(CHAT, add_special_tokens=True, **chat) == [rendered[0], *rendered]
        for special in (None, False, True):
            given = {} if special is None else {"add_special_tokens": special}
            _, told = await worker.post("/tokenize", chat | given)
            assert told["tokens"] == [rendered[0]] * (special is True) + rendered
        for unfit in (0, -2):
            body = {"prompt": text, "truncate_prompt_tokens": unfit}
            assert (await worker.post(COMPLETIONS, body))[0] == 400
