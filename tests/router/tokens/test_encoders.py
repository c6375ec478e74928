"""Tests of which tokenizer the files of a folder give for each engine kind, and what happens if a
package is missing.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from engine.wire.memo import MemoEncoder
from engine.wire.tokens import Chat, PromptError
from router.tokens import encoders
from router.tokens.dates import date_of
from router.tokens.encoders import NO_TOKENS, TokenizerTerms, encoders_of
from router.tokens.harmony import HarmonyEncoder
from router.tokens.tekken import TekkenEncoder
from tests.router.tokens.chats import TEKKEN_FILE
from tests.tokenizer_folder import write_model

CHAT = Chat(messages=[{"role": "user", "content": "hi"}])


def terms(folder: Path | None) -> TokenizerTerms:
    return TokenizerTerms(
        str(folder) if folder is not None else None,
        "auto", "local", "auto", "{}", False, 1 << 20, 1_000_000, 8,
    )  # fmt: skip


def gpt_oss(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    return write_model(folder)


def tekken(folder: Path) -> Path:
    (folder / "tekken.json").symlink_to(TEKKEN_FILE)
    return folder


def test_without_a_folder_there_are_no_encoders() -> None:
    assert encoders_of(terms(None)) is None


def test_a_chat_template_is_used_for_all_engine_kinds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = encoders_of(terms(write_model(tmp_path)))
    assert found is not None
    assert isinstance(found.of("vllm"), MemoEncoder)
    assert found.of("vllm") is found.of("sglang") is found.of(None)
    assert not found.is_rendering("vllm")


def test_harmony_is_used_only_for_engines_that_render_with_it(tmp_path: Path) -> None:
    found = encoders_of(terms(gpt_oss(tmp_path)))
    assert found is not None
    harmony, template = found.of("vllm"), found.of("sglang")
    assert isinstance(harmony, HarmonyEncoder)
    assert found.of("trtllm") is harmony
    assert isinstance(template, MemoEncoder)
    assert found.of(None) is template
    assert found.is_rendering("vllm")
    assert not found.is_rendering("sglang")
    # One vocabulary for plain prompts, one memo.
    assert harmony.encode("x y").tolist() == template.encode("x y").tolist()
    assert harmony.encode_chat(CHAT, 0.0).tolist() != template.encode_chat(CHAT, 0.0).tolist()
    assert found.memo is template.memo
    assert found.memo.encoded_chars > len("x y")


def test_tekken_is_used_only_for_vllm(tmp_path: Path) -> None:
    found = encoders_of(terms(tekken(tmp_path)))
    assert found is not None
    assert isinstance(found.of("vllm"), TekkenEncoder)
    assert found.of("sglang") is None
    assert found.of(None) is None


@pytest.mark.parametrize(
    ("mode", "weights", "is_tekken"),
    [
        ("auto", (), True),
        ("auto", ("model.safetensors",), False),
        ("auto", ("model.safetensors", "consolidated-00001.safetensors"), True),
        ("mistral", ("model.safetensors",), True),
        ("hf", (), False),
    ],
)
def test_with_two_tokenizers_the_one_of_vllm_is_used(
    tmp_path: Path, mode: str, weights: tuple[str, ...], is_tekken: bool
) -> None:
    for name in weights:
        (tmp_path / name).touch()
    found = encoders_of(replace(terms(tekken(write_model(tmp_path))), mode=mode))
    assert found is not None
    assert isinstance(found.of("vllm"), TekkenEncoder if is_tekken else MemoEncoder)
    assert isinstance(found.of("sglang"), MemoEncoder)


def test_a_missing_harmony_package_is_a_warning_and_the_template_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoders, "find_spec", lambda _: None)
    caplog.set_level(logging.WARNING)
    found = encoders_of(terms(gpt_oss(tmp_path)))
    assert found is not None
    assert NO_TOKENS in caplog.text
    encoder = found.of("vllm")
    assert encoder is not None
    assert encoder.encode("x").tolist()
    with pytest.raises(PromptError):
        encoder.encode_chat(CHAT, 0.0)
    template = found.of("sglang")
    assert template is not None
    assert template.encode_chat(CHAT, 0.0).tolist()


def test_with_both_tokenizers_a_missing_package_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoders, "find_spec", lambda _: None)
    found = encoders_of(terms(tekken(write_model(tmp_path))))
    assert found is not None
    assert isinstance(found.of("vllm"), MemoEncoder)
    assert NO_TOKENS in caplog.text


def test_tekken_alone_without_its_package_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="pip install"):
        encoders_of(terms(tekken(tmp_path)))


def test_the_date_is_that_of_the_engines_time_zone() -> None:
    late_s = 1_772_668_799.0  # 2026-03-04, a second before midnight in UTC
    assert date_of("UTC")(late_s) == "2026-03-04"
    assert date_of("Europe/Berlin")(late_s) == "2026-03-05"
    assert date_of("2025-01-01")(late_s) == "2025-01-01"
    assert date_of("local")(late_s) in ("2026-03-04", "2026-03-05")
    for wrong in ("", "2026-1-1", "Mars/Base", "/etc/passwd", "../x"):
        with pytest.raises(ValueError, match="neither a date"):
            date_of(wrong)
