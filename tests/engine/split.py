"""Sends the two requests of prefill and decode at separate workers as a router does, and what it
carries between them.
"""

from __future__ import annotations

from typing import Any

from tests.engine.harness import Running, eventually

ASK = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
PATH = "/v1/completions"


async def prefilled(worker: Running, body: dict[str, Any], path: str = PATH) -> Any:
    """Send the prefill request; return the `kv_transfer_params` of its answer."""
    leg = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK}
    status, answer = await worker.post(path, leg)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] <= 1  # none where it was told early
    return answer.get("kv_transfer_params")


async def split(
    prefill: Running, decode: Running, body: dict[str, Any], path: str = PATH
) -> dict[str, Any]:
    """Send the prefill and the decode request; return the answer of the decode worker."""
    params = await prefilled(prefill, body, path)
    assert params is not None
    status, answer = await decode.post(path, body | {"kv_transfer_params": params})
    assert status == 200, answer
    return answer  # type: ignore[no-any-return]


def computed(worker: Running) -> int:
    """Return how many prompt tokens the worker has computed so far."""
    return int(worker.worker.steps.tokens["prefill"])


async def until_idle(*workers: Running) -> None:
    """Wait until nothing is left of any KV transfer except cached blocks."""

    def idle() -> bool:
        parts = [one.worker.transfers for one in workers]
        used = sum(one.worker.pool.used_blocks for one in workers)
        return not used and all(
            part is not None and not part.exporter.readers and not part.importer.active
            for part in parts
        )

    await eventually(idle, "no block, lease, or connection left")
    for one in workers:
        assert not len(one.worker.runner.scheduler.exports)
        assert one.worker.runner.scheduler.reading == 0
