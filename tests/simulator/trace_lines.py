"""Lines of every trace format, and small files made of them."""

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
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": lambda data: zstandard.compress(data),
}


def write(folder: Path, *lines: str | dict[str, Any], packed: str = "plain") -> WorkloadSpec:
    """A trace whose name says nothing about what it is."""
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
}
