"""Tests of how exact each worker's hits are, as running routers show it in `/workers` and
metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.engine.model_dirs import write_model
from tests.live.stack import MODEL, Stack, engine_arguments, metric_sum, running, until
from tests.told_decision import EXPLAIN, decision_in

TEXT = "The quick brown fox jumps over the lazy dog. " * 20
Cause = tuple[str, str | None]
EXACT: Cause = ("exact", None)


async def cause_of(stack: Stack, worker_id: int = 0) -> Cause:
    """Return a worker's hit mode and its cause; check that a reason is given if and only if the
    mode is not exact.
    """
    hits = (await stack.row(worker_id))["hits"]
    assert (hits["reason"] is None) == (hits["cause"] is None) == (hits["mode"] == "exact")
    return hits["mode"], hits["cause"]


async def until_cause(stack: Stack, wanted: Cause, worker_id: int = 0) -> None:
    async def reached() -> bool:
        return await cause_of(stack, worker_id) == wanted

    await until(reached, f"worker {worker_id} to be {wanted}")


async def counted(stack: Stack, mode: str, cause: str) -> float:
    """Return how many workers have this hit mode and cause, by the router's metrics."""
    async with stack.http.get(f"{stack.admin}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    labels = f'cause="{cause}",mode="{mode}"'
    return sum(float(line.split()[-1]) for line in lines if labels in line.replace(" ", ""))


@asynccontextmanager
async def engines(folder: Path) -> AsyncIterator[tuple[Stack, Path]]:
    """Yield a router with the engines' tokenizer and no workers yet, and the model's folder."""
    model = write_model(folder / "model")
    async with running(folder, workers=0, router=["--tokenizer", str(model)]) as stack:
        yield stack, model


async def started(stack: Stack, model: Path, **options: Any) -> str:
    name = f"worker-{len(stack.workers)}"
    arguments = engine_arguments(tokenizer=model, **options)
    stack.workers.append(await stack.programs.start(name, "engine", arguments))
    return stack.workers[-1].url


async def test_a_worker_with_all_events_is_exact_and_one_without_events_is_not(
    tmp_path: Path,
) -> None:
    async with engines(tmp_path) as (stack, model):
        await stack.add(await started(stack, model))
        await stack.add(f"{await started(stack, model)},events=none")
        await until_cause(stack, EXACT, 0)
        await until_cause(stack, ("approximate", "events-none"), 1)
        hits = (await stack.row(1))["hits"]
        assert hits["lift"] == "events=none out of the worker's line"
        assert (await counted(stack, "exact", ""), await counted(stack, "degraded", "")) == (1, 0)
        assert await counted(stack, "approximate", "events-none") == 1
        assert await metric_sum(stack.http, stack.admin, "warmroute_worker_hit_mode") == 2
        why, decision = await explained(stack)
        assert await cause_of(stack, 0) == EXACT
        for _ in range(2):
            why, decision = await explained(stack)
            row = await stack.row(decision["worker"])
            verb = "holds" if decision["hits"]["mode"] == "exact" else "holds about"
            assert why.startswith(f"worker {row['id']} {verb} ")
            assert " blocks; " in why
            assert decision["hits"] == row["hits"]


async def test_without_a_tokenizer_hits_are_approximate(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as stack:
        assert await cause_of(stack) == ("approximate", "no-tokenizer")
        assert (await stack.row(0))["hits"]["lift"] == "--tokenizer DIR"


async def test_with_another_tokenizer_than_the_engines_hits_are_approximate(tmp_path: Path) -> None:
    router = ["--tokenizer", str(write_model(tmp_path / "model"))]
    async with running(tmp_path, workers=1, router=router) as stack:
        await until_cause(stack, ("approximate", "tokens-differ"))


async def test_a_router_started_after_an_engine_without_replay_has_degraded_hits(
    tmp_path: Path,
) -> None:
    """A router that starts after an engine without replay shows its hits as degraded, and as exact
    once the engine's cache was cleared.
    """
    async with engines(tmp_path) as (stack, model):
        url = await started(stack, model)
        async with stack.http.get(f"{url}/kv_event_sources") as reply:
            endpoint = (await reply.json())["0"]["endpoint"].replace("*", "127.0.0.1")
        await ask(stack, url)
        await stack.add(f"{url},kind=vllm,events={endpoint}")
        await until_cause(stack, ("degraded", "no-replay"))
        why, decision = await explained(stack)
        assert why.startswith("worker 0 is known to hold 0 of ")
        assert decision["hits"]["cause"] == "no-replay"
        hits = (await stack.row(0))["hits"]
        assert "replay_endpoint" in hits["lift"]
        async with stack.http.post(f"{url}/reset_prefix_cache") as reply:
            assert reply.status == 200
        await ask(stack, url)
        await until_cause(stack, EXACT)


async def test_a_worker_that_is_down_has_no_hit_mode(tmp_path: Path) -> None:
    async with engines(tmp_path) as (stack, model):
        await stack.add(await started(stack, model))
        await until_cause(stack, EXACT)
        stack.workers[0].process.kill()
        await stack.until_state(0, "down")
        assert (await stack.row(0))["hits"] is None
        assert await metric_sum(stack.http, stack.admin, "warmroute_worker_hit_mode") == 0


async def explained(stack: Stack) -> tuple[str, dict[str, Any]]:
    """Send a completion; return the sentence and the JSON of the router's explain header."""
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 2}
    url, headers = f"{stack.url}/v1/completions", {EXPLAIN: "1"}
    async with stack.http.post(url, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        told = reply.headers[EXPLAIN]
        return told.partition("; {")[0], decision_in(told)


async def ask(stack: Stack, url: str) -> None:
    """Send a prompt of several blocks directly to the worker, so that the router does not
    see it.
    """
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 2}
    async with asyncio.timeout(20), stack.http.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
