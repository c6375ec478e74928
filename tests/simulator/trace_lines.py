"""Makes lines of every trace format, and small files of them."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard

from router.record.request_line import chain_bytes
from simulator.traces.job import Job
from simulator.traces.spec import WorkloadSpec
from simulator.workloads.open import open_jobs

MOONCAKE = {"timestamp": 3000, "input_length": 1300, "output_length": 52, "hash_ids": [0, 1, 2]}
QWEN = {
    "chat_id": 7,
    "parent_chat_id": -1,
    "timestamp": 61.5,
    "input_length": 40,
    "output_length": 9,
    "type": "text",
    "turn": 1,
    "hash_ids": [12, 13, 14],
}
LOGGED = {
    "at": 1_700_000_000.25,
    "model": "m",
    "prompt_tokens": 40,
    "output_tokens": 9,
    "block_size": 16,
    "chain": base64.b64encode(chain_bytes(np.array([1 << 63, 5], dtype=np.uint64))).decode(),
    "session": "s",
    "tenant": "t",
    "priority": 2,
}
LOG_HEADING = {"format": "warmroute-requests", "version": 1, "started": 1.0, "workers": 8}
CHAT = {
    "timestamp": 1_700_000_000,
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are the assistant of a shop of rare books. " * 4},
        {"role": "user", "content": "Where is my order?"},
    ],
    "response": {"usage": {"prompt_tokens": 50, "completion_tokens": 20}},
}
ACCESS = {
    "at": 1_700_000_000.25,
    "id": "x",
    "tenant": "t",
    "path": "/v1/chat/completions",
    "model": "m",
    "bytes_in": 900,
    "prompt_tokens": 330,
    "output_tokens": 20,
    "cached_tokens": 33,
}


def span(at_s: float, **told: Any) -> dict[str, Any]:
    """Return the trace span of a call to a model; `told` are attributes of `gen_ai`, with dots
    written as two underlines.
    """
    told = {"operation__name": "chat", "request__model": "m"} | told
    return {
        "traceId": "5b8efff798038103d269b633813fc60c",
        "name": "chat m",
        "startTimeUnixNano": str(round(at_s * 1e9)),
        "attributes": [
            {"key": f"gen_ai.{key.replace('__', '.')}", "value": _otlp(value)}
            for key, value in told.items()
        ],
    }


def _otlp(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_otlp(one) for one in value]}}
    fields = [{"key": key, "value": _otlp(one)} for key, one in value.items()]
    return {"kvlistValue": {"values": fields}}


def export(*spans: dict[str, Any]) -> dict[str, Any]:
    """Return a line as a collector's file exporter writes it."""
    scope = {"scope": {"name": "app"}, "spans": list(spans)}
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [scope]}]}


SPANS = export(span(1_700_000_000, usage__input_tokens=330, usage__output_tokens=20))
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": lambda data: zstandard.compress(data),
}


def write(folder: Path, *lines: str | dict[str, Any], packed: str = "plain") -> WorkloadSpec:
    """Write a trace whose file name does not show its format; return its spec."""
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path = folder / "trace"
    path.write_bytes(PACKED[packed](text.encode()))
    return WorkloadSpec(str(path))


def read(spec: WorkloadSpec, **changes: Any) -> list[Job]:
    return list(open_jobs(with_(spec, **changes)).jobs)


def with_(spec: WorkloadSpec, **changes: Any) -> WorkloadSpec:
    return msgspec.structs.replace(spec, **changes)


def ids(job: Job) -> list[int]:
    assert job.ids.dtype == np.uint64
    return [int(value) for value in job.ids]


def turn(t: float, tokens: int, *runs: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "in": tokens, "out": 70, "hash_runs": runs, **more}


def session(name: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "requests": requests, **more}


GOOD: dict[str, tuple[str | dict[str, Any], ...]] = {
    "mooncake": (MOONCAKE,),
    "qwen": (QWEN,),
    "requests": (LOG_HEADING, LOGGED),
    "azure": (AZURE, "2023-11-16 18:15:47.6805900,374,44"),
    "burstgpt": (BURSTGPT, "5,ChatGPT,472,18,490,Conversation log"),
    "sessions": (session("a", turn(0, 64, [1, 1])),),
    "chats": (CHAT,),
    "access_log": (ACCESS,),
    "otel": (SPANS,),
}
