"""Tests that a prompt is tokenized in the way of the engine kind that serves its model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from engine.wire.memo import MemoEncoder
from engine.wire.tokens import WordTokenizer
from router.body.scan import Scanned
from router.request.prompts import PromptReader
from router.tokens.check import TokenCheck
from router.tokens.encoders import Encoders
from router.tokens.render_calls import RenderTerms
from router.tokens.renderers import Renderers
from tests.router.request.prompt_support import NOW_S, chat, completion

USUAL, OWN = (MemoEncoder(WordTokenizer(vocab), None, 0) for vocab in (1_000, 1_001))
KINDS = {"m": "vllm", "other": "sglang"}


@pytest.mark.parametrize("scanned", [completion("a b c"), chat("a b c")])
async def test_each_engine_kind_has_its_encoder(scanned: Scanned) -> None:
    encoders = Encoders(USUAL, {"vllm": OWN}, USUAL.memo)
    check = TokenCheck(lambda: 0.0, lambda: 1.0)
    with ThreadPoolExecutor(1) as executor:
        reader = PromptReader(encoders, executor, lambda: NOW_S, 8, check, kind_of=KINDS.get)
        ids = {}
        for model in ("m", "other", "new"):
            prompt = await reader.read(scanned, model, [16])
            ids[model] = prompt.encoded[0].tolist()
    assert ids["m"] != ids["other"]
    assert ids["new"] == ids["other"]


@pytest.mark.parametrize("cuts", [True, False])
async def test_chats_are_truncated_if_the_engine_truncates_them(
    cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OWN, "cuts_chats", cuts, raising=False)
    encoders = Encoders(None, {"vllm": OWN}, OWN.memo)
    check = TokenCheck(lambda: 0.0, lambda: 1.0)
    with ThreadPoolExecutor(1) as executor:
        reader = PromptReader(encoders, executor, lambda: NOW_S, 8, check, kind_of=KINDS.get)
        asked = chat("a b c d e f", truncate_prompt_tokens=2)
        assert ((await reader.read(asked, "m", [16])).tokens == 2) is cuts
        text = completion("a b c d e f", truncate_prompt_tokens=2)
        assert (await reader.read(text, "m", [16])).tokens == 2


async def test_a_kind_without_an_encoder_is_read_as_text() -> None:
    encoders = Encoders(None, {"vllm": OWN}, OWN.memo)
    check = TokenCheck(lambda: 0.0, lambda: 1.0)
    with ThreadPoolExecutor(1) as executor:
        reader = PromptReader(encoders, executor, lambda: NOW_S, 8, check, kind_of=KINDS.get)
        assert not (await reader.read(chat("a"), "m", [16])).approximate
        assert (await reader.read(chat("a"), "other", [16])).approximate


def test_a_model_served_by_several_engine_kinds_has_no_kind() -> None:
    def member(kind: str | None, *models: str) -> Any:
        facts = SimpleNamespace(models=models, has_events=True)
        recognized = kind and SimpleNamespace(kind=kind, facts=facts, model_path=None)
        return SimpleNamespace(recognized=recognized, ready=True)

    listed = [("vllm", "a", "b"), ("sglang", "b", "c"), (None,), ("vllm",)]
    members = {number: member(*one) for number, one in enumerate(listed)}
    fleet: Any = SimpleNamespace(members=members)
    http: Any = None
    renderers = Renderers(http, fleet, lambda: 0.0, lambda: RenderTerms((), True, 1, 1, 1, 1, 1))
    kinds = [renderers.kind(model) for model in ("a", "b", "c", "d")]
    assert kinds == ["vllm", None, "sglang", None]
