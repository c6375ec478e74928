"""The inference paths of the client port, and how the body of each is read.

The files of the engines (`router.engines`) say which paths an engine lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from kvkernels import AnswerDue
from router.http.reply import Usage

Reads = Literal[
    "openai",  # completions and chats
    "responses",
    "messages",
    "input",
    "pairs",
    "generate",
    "token_ids",
    "model",  # only the model's name is read: nothing is computed
    "infer",  # KServe v2: tensors as JSON or bytes
    "tensors",  # the same as one JSON object
    "opaque",  # not even that, unless it is there
]

# The form by which an answer to each is recognized; any answer will do on paths that are passed on
# unread.
_FORMS: Mapping[Reads, str] = MappingProxyType(
    {
        "openai": "completions",
        "token_ids": "completions",
        "responses": "responses",
        "messages": "messages",
        "generate": "generate",
        **dict.fromkeys(("input", "pairs", "model", "infer", "tensors"), "other"),
    }
)


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    """The functions that read and end answers in a protocol other than OpenAI's."""

    # Reads the token counts from the kept bytes of an answer, its number of events and its worker's
    # block size; None if there are none.
    usage: Callable[[bytes, int, int | None], Usage | None]
    # The end of a stream of events that breaks off. Its argument: its deadline passed, else its
    # worker failed.
    last_event: Callable[[bool], bytes]


@dataclass(frozen=True, slots=True)
class Path:
    """One path of the client port, and how requests to it are read. Lifetime: process."""

    path: str
    reads: Reads
    salt: str | None = None  # field that keeps caches apart; None: its engines read none
    mark: bytes | None = None  # see `http.reply.UpstreamRequest`
    needs: str | None = None  # a feature that the worker must have (`Arrival.needs`)
    computes: bool = True  # it makes work for a model
    streams: bool = False  # its answers always do; else the body says so
    answers: OwnAnswers | None = None  # None: of the form that OpenAI's API and its like have

    def due(self, max_output_tokens: int | None) -> AnswerDue | None:
        """Return the form that an answer of at most `max_output_tokens` tokens must have; None if
        any form will do.
        """
        form = _FORMS.get(self.reads)
        return None if form is None else AnswerDue(form, max_output_tokens != 0)


def _path(path: str, reads: Reads, salt: str | None = None, mark: bytes | None = None) -> Path:
    """Return the `Path` of a path that only some engines have."""
    return Path(path, reads, salt, mark, needs=path, computes=reads != "model")


_TABLE = (
    Path("/v1/completions", "openai", salt="cache_salt"),
    Path("/v1/chat/completions", "openai", salt="cache_salt"),
    # Events are named; an answer begins with some that no token has been computed for.
    _path("/v1/responses", "responses", "cache_salt", b".delta\n"),
    _path("/v1/messages", "messages", None, b"content_block_delta\n"),
    _path("/v1/messages/count_tokens", "model"),
    _path("/v1/embeddings", "input"),
    _path("/pooling", "input"),
    _path("/classify", "input"),
    _path("/score", "pairs"),
    _path("/v1/score", "pairs"),
    _path("/rerank", "pairs"),
    _path("/v1/rerank", "pairs"),
    _path("/v2/rerank", "pairs"),
    _path("/generate", "generate", "extra_key", b"\ndata:"),
    _path("/inference/v1/generate", "token_ids", "cache_salt", b"\ndata:"),
    _path("/tokenize", "model"),
    _path("/detokenize", "model"),
)
PATHS: Mapping[str, Path] = MappingProxyType({path.path: path for path in _TABLE})
# By the last part of `/v2/models/NAME[/versions/N]/...`, of Triton and of our engine.
KSERVE: Mapping[str, Path] = MappingProxyType(
    {
        "infer": _path("/v2/models/{model}/infer", "infer"),
        "generate": _path("/v2/models/{model}/generate", "tensors"),
        "generate_stream": replace(
            _path("/v2/models/{model}/generate_stream", "tensors"), streams=True
        ),
    }
)
# The same by gRPC, which Triton alone speaks.
_INFER = _path("/inference.GRPCInferenceService/ModelInfer", "infer")
_STREAM = _path("/inference.GRPCInferenceService/ModelStreamInfer", "infer")
KSERVE_GRPC: Mapping[str, Path] = MappingProxyType(
    {path.path: path for path in (_INFER, replace(_STREAM, streams=True))}
)
GRPC_PATHS = frozenset(KSERVE_GRPC)
KSERVE_PATHS = GRPC_PATHS | {path.path for path in KSERVE.values()}
# Paths of the other APIs that not every engine has; a server of KServe v2 alone has none of them.
OPTIONAL_PATHS = frozenset(path.needs for path in _TABLE if path.needs is not None)
OTHER = Path("", "opaque")  # unknown paths, which are passed on if the operator allows it
