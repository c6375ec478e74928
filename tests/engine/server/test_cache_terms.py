"""Tests of block worth and pins over HTTP: what keeps a prefix in a worker's cache, and what is
refused.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.pins import Pins
from engine.scheduler.types import SchedulerSettings
from kvkernels import chain_hashes, chain_seed
from tests.engine.harness import Running, running
from tests.engine.scheduling import array
from tests.oracles.block_pool import check_pool

COMPLETIONS = "/v1/completions"
TRUNK = list(range(100, 164))  # 4 blocks
MODEL = "/v2/models/warmroute-timed"
PINNING = SchedulerSettings(pinned_share=0.25)


def pins(worker: Running) -> Pins:
    return worker.worker.runner.scheduler.pins


async def flood(worker: Running) -> None:
    """Send unrelated prompts that fill a cache of 32 blocks several times over."""
    for first in range(1_000, 1_010):
        prompt = [first + at for at in range(0, 256 * 20, 20)]
        status, _ = await worker.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        assert status == 200
    check_pool(worker.worker.pool)


async def cached(worker: Running, **more: Any) -> int:
    """Send the shared prompt with one more token; return how many tokens were found in
    the cache.
    """
    _, answer = await worker.post(COMPLETIONS, {"prompt": [*TRUNK, 7], "max_tokens": 1} | more)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_blocks_with_a_high_retention_priority_survive_a_flood() -> None:
    said = {"token_range_retention_configs": [{"token_start": 0, "token_end": 32, "priority": 80}]}
    async with running(kv_tokens=512) as worker:
        assert await cached(worker) == 0
        await flood(worker)
        assert await cached(worker, kv_cache_retention_config=said) == 0
        await flood(worker)
        assert await cached(worker) == 32


@pytest.mark.parametrize(
    "path", ["/generate", "/infer"], ids=["generate takes JSON", "infer takes tensors"]
)
async def test_triton_requests_set_retention_by_tensorrt_llms_input_names(path: str) -> None:
    told: dict[str, Any] = {
        "retention_token_range_starts": [0, 32],
        "retention_token_range_ends": [32, -1],
        "retention_token_range_priorities": [80, 90],
        "retention_token_range_durations_ms": [-1, 0],
        "retention_decode_priority": 3,
    }
    text = " ".join(f"t{token}" for token in [*TRUNK, 7])
    body: dict[str, Any] = {"text_input": text, "max_tokens": 1} | told
    if path == "/infer":
        tensors = [("text_input", "BYTES", [text]), ("max_tokens", "INT32", [1])]
        tensors += [
            (name, "INT32", value if isinstance(value, list) else [value])
            for name, value in told.items()
        ]
        body = {
            "inputs": [
                {"name": name, "datatype": datatype, "shape": [len(data)], "data": data}
                for name, datatype, data in tensors
            ]
        }
    async with running(kv_tokens=512) as worker:
        status, answer = await worker.post(MODEL + path, body)
        assert status == 200, answer
        await flood(worker)
        assert await cached(worker) == 32, "the second range's time was over at once"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"decode_retention_priority": 101}, "decode_retention_priority must be 0..100"),
        ({"directory": "/tmp"}, "unknown field `directory`"),
        ({"token_range_retention_configs": [{"token_start": 0}]}, "priority"),
        (
            {"token_range_retention_configs": [{"token_start": 5, "token_end": 5, "priority": 1}]},
            "token_start must be 0 or more and below token_end",
        ),
        ([], "Expected `object"),
    ],
)
async def test_a_bad_retention_gets_400(said: Any, told: str) -> None:
    async with running() as worker:
        body = {"prompt": TRUNK, "kv_cache_retention_config": said}
        status, answer = await worker.post(COMPLETIONS, body)
        assert status == 400
        assert told in answer["error"]["message"]
        uneven = {"text_input": "a", "retention_token_range_starts": [1, 2]}
        uneven["retention_token_range_priorities"] = [1]
        status, answer = await worker.post(MODEL + "/generate", uneven)
        assert status == 400
        assert "of one length" in answer["error"]
        assert worker.worker.unfinished == 0


async def test_a_pinned_prefix_survives_a_flood_until_it_is_unpinned() -> None:
    async with running(kv_tokens=512, scheduler=PINNING) as worker:
        status, pin = await worker.post("/pin_prefix", {"prompt": [*TRUNK, 7, 8]})
        seed = chain_seed("warmroute-timed", None, None)
        name = int(chain_hashes(array(TRUNK).data, 16, seed)[-1])
        shown = {"chain_hash": name, "blocks": 4, "tokens": 64, "held_blocks": 0, "ttl_ms": None}
        assert (status, pin) == (200, shown)
        before = json.loads(await worker.get("/pinned_prefixes"))
        assert before["max_blocks"] == 8
        assert (before["wanted_blocks"], before["pinned_blocks"]) == (4, 0)
        assert await cached(worker) == 0
        await flood(worker)
        assert await cached(worker) == 64
        text = (await worker.get("/metrics")).decode()
        assert 'warmroute_engine_pinned_blocks{engine="0",model_name="warmroute-timed"} 4.0' in text
        status, _ = await worker.post("/unpin_prefix", {"chain_hash": name})
        assert status == 200
        await flood(worker)
        assert await cached(worker) == 0
        status, answer = await worker.post("/unpin_prefix", {"prompt": TRUNK})
        assert status == 404
        assert "not_pinned" in answer["error"]["message"]


async def test_a_pinned_salted_text_or_chat_prefix_is_hit_by_requests() -> None:
    words = " ".join(f"t{token}" for token in TRUNK)
    messages = [{"role": "system", "content": words}]
    chat = {"messages": [*messages, {"role": "user", "content": "hi"}], "max_tokens": 1}
    async with running(kv_tokens=2_048, scheduler=PINNING) as worker:
        for path, body in (
            (COMPLETIONS, {"prompt": words, "cache_salt": "mine", "max_tokens": 1}),
            ("/v1/chat/completions", chat),
        ):
            prefix: dict[str, Any] = {"messages": messages} if "messages" in body else {}
            prefix = prefix or {name: body[name] for name in ("prompt", "cache_salt")}
            status, pin = await worker.post("/pin_prefix", prefix)
            assert status == 200, pin
            status, _ = await worker.post(path, body)
            assert status == 200
        pins(worker).advance(0.0)
        held = json.loads(await worker.get("/pinned_prefixes"))["pinned"]
        assert [pin["held_blocks"] for pin in held] == [pin["blocks"] for pin in held] == [4, 4]


async def test_a_pin_expires_in_an_idle_engine() -> None:
    async with running(kv_tokens=512, scheduler=PINNING) as worker:
        status, pin = await worker.post("/pin_prefix", {"prompt": TRUNK, "ttl_ms": 60_000})
        assert status == 200
        assert 0 < pin["ttl_ms"] <= 60_000
        status, pin = await worker.post("/pin_prefix", {"prompt": TRUNK, "ttl_ms": 1})
        assert (await worker.get("/health")) is not None
        while json.loads(await worker.get("/pinned_prefixes"))["pinned"]:
            pass
        assert pins(worker).wanted_blocks == 0


async def test_a_pin_survives_a_cache_reset_and_is_not_in_the_snapshot() -> None:
    async with running(kv_tokens=512, scheduler=PINNING) as worker:
        assert await cached(worker) == 0
        before = worker.worker.pool.snapshot()
        await worker.post("/pin_prefix", {"prompt": TRUNK})
        after = worker.worker.pool.snapshot()
        assert [run.block_hashes for run in after] == [run.block_hashes for run in before]
        async with worker.http.post(worker.url + "/reset_prefix_cache") as reply:
            assert reply.status == 200
        assert worker.worker.pool.snapshot() == []
        assert await cached(worker) == 0
        await flood(worker)
        assert await cached(worker) == 64


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"prompt": TRUNK[:15]}, 400, "too_short"),
        ({"prompt": list(range(16 * 9))}, 409, "pin_share: 9 more blocks"),
        ({"chain_hash": 77}, 404, "not_cached"),
        ({"chain_hash": -1}, 400, "chain_hash must be 0.."),
        ({"chain_hash": 2**64}, 400, "chain_hash"),
        ({}, 400, "one of prompt, messages and chain_hash"),
        ({"prompt": TRUNK, "chain_hash": 3}, 400, "one of prompt"),
        ({"prompt": ["a", "b"]}, 400, "one prefix at a time"),
        ({"prompt": [99_999_999]}, 400, "token ids must be below"),
        ({"prompt": TRUNK, "ttl_ms": 0}, 400, "ttl_ms"),
        ({"prompt": TRUNK, "ttl": 5}, 400, "unknown field `ttl`"),
        ({"prompt": TRUNK, "model": "other"}, 404, "does not exist"),
        (b"{", 400, "request body"),
    ],
)
async def test_the_error_names_the_reason_for_a_refused_pin(
    body: Any, status: int, told: str
) -> None:
    async with running(kv_tokens=512, scheduler=PINNING) as worker:
        got, answer = await worker.post("/pin_prefix", body)
        assert got == status, answer
        assert told in answer["error"]["message"]
        assert pins(worker).all == []


async def test_a_worker_without_a_pinned_share_refuses_pins() -> None:
    async with running(kv_tokens=512) as worker:
        status, answer = await worker.post("/pin_prefix", {"prompt": TRUNK})
        assert status == 409
        assert "pins_off" in answer["error"]["message"]
        assert "--pinned-share" in answer["error"]["message"]
