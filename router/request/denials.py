"""Whether a worker's refusal says that it has not got the model, or the LoRA adapter.

Engines word it in their own ways: vLLM and OpenAI "The model `x` does not exist.", SGLang "The
following requested LoRA adapters are not loaded: ['x']", Triton "Request for unknown model: 'x' is
not found", Dynamo "Model not found". What a client can bring about at a worker that has the model,
such as another version of it, is none of these.
"""

from __future__ import annotations

import re

import msgspec

_READ_BYTES = 16_384  # a longer refusal is not looked at
_CODE = "model_not_found"  # OpenAI's
_WHAT = re.compile(r"\b(?:models?|lora|adapters?)\b", re.IGNORECASE)
_GONE = re.compile(
    r"does(?: not|n't) exist|\bnot (?:be )?found|\bunknown model|\bnot loaded|no such model|"
    r"\bhas no available versions|\bnot served\b",
    re.IGNORECASE,
)
_VERSION = re.compile(r"\bversion \S+ is not", re.IGNORECASE)


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Refusal(msgspec.Struct):
    error: _Error | str | None = None
    message: str | None = None
    detail: msgspec.Raw = msgspec.Raw(b"null")
    code: str | int | None = None


_REFUSAL = msgspec.json.Decoder(_Refusal)
_TEXT = msgspec.json.Decoder(str)


def denies_model(status: int, body: bytes, model: str) -> bool:
    """Whether an answer of 404, or of 400, means that the worker has not got `model`."""
    if status not in (400, 404) or not body or len(body) > _READ_BYTES:
        return False
    try:
        refusal = _REFUSAL.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    message, code = _told(refusal)
    if code == _CODE:
        return True
    if not (_WHAT.search(message) and _GONE.search(message)) or _VERSION.search(message):
        return False
    named = re.search(rf"(?<![\w/-]){re.escape(model)}(?![\w/-])", message) is not None
    return named or (status == 404 and len(message) <= len("Model not found."))


def _told(refusal: _Refusal) -> tuple[str, str | int | None]:
    """The text of a refusal, and its code."""
    error = refusal.error
    if isinstance(error, _Error):
        return error.message, error.code
    if isinstance(error, str):  # Triton's
        return error, refusal.code
    if refusal.message is not None:
        return refusal.message, refusal.code
    try:
        return _TEXT.decode(refusal.detail), None
    except msgspec.DecodeError:
        return "", None
