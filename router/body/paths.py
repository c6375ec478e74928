"""The client port's inference paths, how each is read, and which engines lack it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from kvkernels import AnswerDue

Reads = Literal[
    "openai",  # completions and chats
    "responses",
    "messages",
    "input",
    "pairs",
    "generate",
    "token_ids",
    "model",  # its model alone: nothing is computed
    "infer",  # KServe v2: tensors as JSON or bytes
    "tensors",  # the same as one JSON object
    "opaque",  # not even that, unless it is there
]

# How an answer to each is judged; of what is passed on unread anything may be one.
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

_OURS = frozenset({"warmroute"})
# By their HTTP servers: vLLM 0.33, SGLang 0.5.23, TensorRT-LLM 1.2, Triton's OpenAI frontend.
_NOT_SGLANG = _OURS | {"sglang", "trtllm", "triton"}
_NOT_VLLM = _OURS | {"vllm", "trtllm", "triton"}
_NEITHER = _OURS | {"trtllm", "triton"}


@dataclass(frozen=True, slots=True)
class Path:
    """One path of the client port. Lifetime: process."""

    path: str
    reads: Reads
    lacking: frozenset[str] = frozenset()  # kinds of engines that have it in no version
    salt: str | None = None  # field that keeps caches apart; None: its engines read none
    mark: bytes | None = None  # see `upstream.reply.UpstreamRequest`
    needs: str | None = None  # what a worker must not lack (`Arrival.needs`)
    computes: bool = True  # it makes work for a model
    streams: bool = False  # its answers always do; else the body says so

    def due(self, max_output_tokens: int | None) -> AnswerDue | None:
        """What an answer has to be where it may have so many tokens; None: anything."""
        form = _FORMS.get(self.reads)
        return None if form is None else AnswerDue(form, max_output_tokens != 0)


def _path(
    path: str,
    reads: Reads,
    lacking: frozenset[str],
    salt: str | None = None,
    mark: bytes | None = None,
) -> Path:
    """A path that not every engine has."""
    return Path(path, reads, lacking, salt, mark, needs=path, computes=reads != "model")


def _input(path: str, lacking: frozenset[str]) -> Path:
    return _path(path, "input", lacking)


_TABLE = (
    Path("/v1/completions", "openai", salt="cache_salt"),
    Path("/v1/chat/completions", "openai", salt="cache_salt"),
    # Events are named; an answer begins with some that no token has been computed for.
    _path("/v1/responses", "responses", _OURS | {"triton"}, "cache_salt", b".delta\n"),
    _path("/v1/messages", "messages", _NEITHER, None, b"content_block_delta\n"),
    _path("/v1/messages/count_tokens", "model", _NEITHER),
    _input("/v1/embeddings", _OURS),
    _input("/pooling", _NOT_SGLANG),
    _input("/classify", _NEITHER),
    _path("/score", "pairs", _NOT_SGLANG),
    _path("/v1/score", "pairs", _NEITHER),
    _path("/rerank", "pairs", _NOT_SGLANG),
    _path("/v1/rerank", "pairs", _NEITHER),
    _path("/v2/rerank", "pairs", _NOT_SGLANG),
    _path("/generate", "generate", _NOT_VLLM, "extra_key", b"\ndata:"),
    _path("/inference/v1/generate", "token_ids", _NOT_SGLANG, "cache_salt", b"\ndata:"),
    _path("/tokenize", "model", frozenset({"trtllm", "triton"})),
    _path("/detokenize", "model", frozenset({"trtllm", "triton"})),
)
PATHS: Mapping[str, Path] = MappingProxyType({path.path: path for path in _TABLE})
# By the last part of `/v2/models/NAME[/versions/N]/...`, of Triton and of our engine.
_NO_KSERVE = frozenset({"vllm", "sglang", "trtllm"})
KSERVE: Mapping[str, Path] = MappingProxyType(
    {
        "infer": _path("/v2/models/{model}/infer", "infer", _NO_KSERVE),
        "generate": _path("/v2/models/{model}/generate", "tensors", _NO_KSERVE),
        "generate_stream": replace(
            _path("/v2/models/{model}/generate_stream", "tensors", _NO_KSERVE), streams=True
        ),
    }
)
# The same by gRPC, which Triton alone speaks.
_NO_GRPC = _NO_KSERVE | {"warmroute", "openai"}
_INFER = _path("/inference.GRPCInferenceService/ModelInfer", "infer", _NO_GRPC)
_STREAM = _path("/inference.GRPCInferenceService/ModelStreamInfer", "infer", _NO_GRPC)
KSERVE_GRPC: Mapping[str, Path] = MappingProxyType(
    {path.path: path for path in (_INFER, replace(_STREAM, streams=True))}
)
# What a server has not got that speaks KServe v2 alone.
NOT_KSERVE = frozenset(path.needs for path in _TABLE if path.needs is not None)
OTHER = Path("", "opaque")  # those that are passed on where the operator wants it


def lacking(kind: str) -> frozenset[str]:
    """Paths that no engine of this kind has."""
    every = (*_TABLE, *KSERVE.values(), *KSERVE_GRPC.values())
    return frozenset(path.path for path in every if kind in path.lacking)
