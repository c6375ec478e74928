"""Recognizes workers' refusals that mean a missing model or a full queue.

Engines say in different words that a model or LoRA adapter is missing: vLLM and OpenAI "The model
`x` does not exist.", SGLang "The following requested LoRA adapters are not loaded: ['x']", Triton
"Request for unknown model: 'x' is not found", Dynamo "Model not found". If the worker has the
model, but not the version that the client asked for, the model does not count as missing.
"""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec

from router.engines.triton import is_triton_queue_full
from router.http.errors import WorkerError
from router.http.reply import HeldReply, Outcome, ReplySink
from router.upstream.collected_reply import CollectedReply

_READ_BYTES = 16_384  # longest refusal that is examined, bytes
_CODE = "model_not_found"  # OpenAI's
_WHAT = re.compile(r"\b(?:models?|lora|adapters?)\b", re.IGNORECASE)
_GONE = re.compile(
    r"does(?: not|n't) exist|\bnot (?:be )?found|\bunknown model|\bnot loaded|no such model|"
    r"\bhas no available versions|\bnot served\b",
    re.IGNORECASE,
)
_VERSION = re.compile(r"\bversion \S+ is not", re.IGNORECASE)


class _ErrorBody(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _RefusalBody(msgspec.Struct):
    error: _ErrorBody | str | None = None
    message: str | None = None
    detail: msgspec.Raw = msgspec.Raw(b"null")
    code: str | int | None = None


_REFUSAL = msgspec.json.Decoder(_RefusalBody)
_TEXT = msgspec.json.Decoder(str)


def denies_model(status: int, body: bytes, model: str) -> bool:
    """Return True if an answer of status 404 or 400 says that the worker lacks `model`."""
    if status not in (400, 404) or not body or len(body) > _READ_BYTES:
        return False
    try:
        refusal = _REFUSAL.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    message, code = _text_of(refusal)
    if code == _CODE:
        return True
    if not (_WHAT.search(message) and _GONE.search(message)) or _VERSION.search(message):
        return False
    named = re.search(rf"(?<![\w/-]){re.escape(model)}(?![\w/-])", message) is not None
    return named or (status == 404 and len(message) <= len("Model not found."))


def _text_of(refusal: _RefusalBody) -> tuple[str, str | int | None]:
    """Return the message and the error code of a worker's refusal."""
    error = refusal.error
    if isinstance(error, _ErrorBody):
        return error.message, error.code
    if isinstance(error, str):  # Triton's
        return error, refusal.code
    if refusal.message is not None:
        return refusal.message, refusal.code
    try:
        return _TEXT.decode(refusal.detail), None
    except msgspec.DecodeError:
        return "", None


_FULL_BYTES = 4_096  # longest error of a worker that is examined for a full queue, bytes
# Engines' words in JSON for a lack of room (SGLang: "The request queue is full."; TGI: "Model is
# overloaded"; llama.cpp: "no slot available"; Dynamo: "All workers are busy").
_FULL = re.compile(
    rb"queue (?:is )?full|overloaded|too many requests|rate limit|no slots? |(?:is|are) busy", re.I
)


def is_queue_full(status: int, body: bytes) -> bool:
    """Return True if an error answer says that the worker's queue is full."""
    if status == 503 and len(body) <= _FULL_BYTES and body.lstrip()[:1] == b"{":
        return _FULL.search(body) is not None or is_triton_queue_full(status, body)
    return is_triton_queue_full(status, body)


def _is_full(held: HeldReply) -> bool:
    return is_queue_full(held.head.status, held.body)


def queue_full() -> WorkerError:
    """Return the error for a worker whose queue is full."""
    return WorkerError("busy", "its queue is full", 0.0)


def model_missing() -> WorkerError:
    """Return the error for a worker that lacks the request's model."""
    return WorkerError("no_model", "the worker says that it has not got the model")


def is_model_missing(outcome: Outcome) -> bool:
    """Return True if the worker refused the request because the worker lacks the model."""
    return isinstance(outcome.error, WorkerError) and outcome.error.kind == "no_model"


def pass_refusal_on(outcome: Outcome, sink: ReplySink, model: str) -> Outcome:
    """Handle a refusal that the relay held back, and return the resulting outcome.

    If the refusal says that the worker lacks the model, the outcome gets an error. Any other
    refusal is sent on to `sink`.
    """
    held = outcome.held
    if outcome.error is not None or held is None:
        return outcome
    if denies_model(held.head.status, held.body, model):
        return replace(outcome, error=model_missing())
    held.deliver(sink)
    return replace(outcome, held=None, bytes_to_client=len(held.body))


def outcome_of_prefill(outcome: Outcome, collected: CollectedReply, model: str) -> Outcome:
    """Return the outcome of a prefill leg, in which a missing model or a full queue is an error.

    `collected` is the worker's answer, which may be a refusal that the relay held back.
    """
    outcome = pass_refusal_on(outcome, collected, model)
    held = outcome.held or collected.held
    if isinstance(outcome.error, WorkerError) and held is not None and _is_full(held):
        return replace(outcome, error=queue_full())
    refusal = None if outcome.error is not None or outcome.answers else collected.held
    if refusal is not None and denies_model(refusal.head.status, refusal.body, model):
        return replace(outcome, error=model_missing(), held=refusal)
    return outcome
