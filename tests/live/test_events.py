"""Tests of the router's view of a worker's cache when workers die, freeze and return."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from pathlib import Path

from tests.frozen import freeze
from tests.live.kv_views import cut_line, explained, port_of, until_resident
from tests.live.stack import MODEL, PROFILE, Stack, engine_arguments, running, until

PROMPT = list(range(1000, 1640))  # 40 blocks of 16


async def warmed(stack: Stack) -> None:
    """Wait until the first worker has PROMPT in its cache and the router knows that."""
    await explained(stack, [*PROMPT, 1])
    await until_resident(stack, 0, 40)


async def kill(stack: Stack) -> None:
    stack.workers[0].process.send_signal(signal.SIGKILL)
    await stack.workers[0].process.wait()


async def test_a_killed_worker_returns_cold_and_its_new_events_are_followed(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as stack:
        await warmed(stack)
        await kill(stack)
        await stack.until_state(0, "down")
        port = port_of(stack.workers[0].url)
        await stack.programs.start("again", "engine", engine_arguments(port=port))
        await stack.until_state(0, "ready")
        first = await explained(stack, [*PROMPT, 2])
        assert (first["expected"], first["cached"]) == (0, 0)
        await until_resident(stack, 0, 40)
        second = await explained(stack, [*PROMPT, 3])
        assert second["expected"] == second["cached"] == len(PROMPT)


async def test_a_restart_between_two_polls_is_noticed_by_counters_that_went_back(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=1) as stack:
        await warmed(stack)
        warmed_s = time.monotonic()

        async def reported() -> bool:
            age_s = (await stack.row(0))["load_age_s"]
            return age_s is not None and bool(age_s < time.monotonic() - warmed_s)

        await until(reported, "a load report of the warm worker")
        freeze(stack.router.process.pid)  # the router sees nothing of what follows
        await kill(stack)
        port = port_of(stack.workers[0].url)
        await stack.programs.start("again", "engine", engine_arguments(port=port))
        stack.router.process.send_signal(signal.SIGCONT)

        async def cold() -> bool:
            row = await stack.row(0)
            return bool(row["state"] == "ready" and row["resident_blocks"] == 0)

        await until(cold, "the restart to be noticed")
        first = await explained(stack, [*PROMPT, 2])
        assert (first["expected"], first["cached"]) == (0, 0)


async def test_another_engine_at_the_same_address_is_recognized_again(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as stack:
        await warmed(stack)
        await kill(stack)
        await stack.until_state(0, "down")
        other = {"model-name": "other", "block-size": 32}
        port = port_of(stack.workers[0].url)
        await stack.programs.start("other", "engine", engine_arguments(port=port, **other))
        await stack.until_state(0, "ready")
        row = await stack.row(0)
        assert (row["models"], row["block_size"]) == (["other"], 32)
        status, answer = await stack.complete([1])
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert (await explained(stack, PROMPT, "other"))["expected"] == 0


async def test_a_frozen_worker_gets_no_requests_and_returns_with_its_known_cache(
    tmp_path: Path,
) -> None:
    router = ["--intervals-health-s", "0.1", "--timeouts-probe-s", "0.2"]
    async with running(tmp_path, workers=1, router=router) as stack:
        await warmed(stack)
        freeze(stack.workers[0].process.pid)
        try:
            await stack.until_state(0, "silent")
        finally:
            stack.workers[0].process.send_signal(signal.SIGCONT)
        await stack.until_state(0, "ready")
        await until_resident(stack, 0, 40)
        again = await explained(stack, [*PROMPT, 2])
        assert again["expected"] == again["cached"] == len(PROMPT)


async def test_the_cache_of_a_worker_without_events_is_modelled_until_it_dies(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=0) as stack:
        worker = await stack.programs.start("plain", "engine", engine_arguments())
        worker_id = await stack.add(f"{worker.url},kind=openai,events=none")
        assert (await explained(stack, PROMPT))["expected"] == 0
        assert (await explained(stack, [*PROMPT, 2]))["expected"] == len(PROMPT)
        worker.process.send_signal(signal.SIGKILL)
        await worker.process.wait()
        await stack.until_state(worker_id, "down")
        arguments = ["--port", str(port_of(worker.url)), "--timed", PROFILE, "--speed", "20"]
        await stack.programs.start("again", "engine", [*arguments, "--model-name", MODEL])
        await stack.until_state(worker_id, "ready")
        assert (await explained(stack, [*PROMPT, 3]))["expected"] == 0


async def test_a_reload_of_thresholds_keeps_the_known_caches(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("policy: hybrid\n")
    async with running(tmp_path, workers=1) as stack:
        router = ["serve", "--port", "0", "--admin-port", "0", "--config", str(file)]
        url = stack.workers[0].url
        file.write_text(f"workers:\n  - {url}\n")
        second = await stack.programs.start("second", "router", router)
        other = Stack(stack.programs, second, stack.workers, stack.http)
        await other.until_state(0, "ready")
        await warmed(other)
        file.write_text(f"workers:\n  - {url},max_requests=3\n")
        second.process.send_signal(signal.SIGHUP)

        async def reloaded() -> bool:
            return "reloaded; changed: workers" in second.log.read_text()

        await until(reloaded, "the reload")
        (row,) = await other.rows()
        assert (row["id"], row["state"], row["leaving"]) == (0, "ready", False)
        assert row["resident_blocks"] >= 40
        # The entry is removed and added again at once, before the worker that leaves is gone.
        file.write_text("workers: []\n")
        second.process.send_signal(signal.SIGHUP)
        file.write_text(f"workers:\n  - {url}\n")
        second.process.send_signal(signal.SIGHUP)

        async def served() -> bool:
            rows = await other.rows()
            return len(rows) == 1 and rows[0]["state"] == "ready" and not rows[0]["leaving"]

        await until(served, "the worker to be back")
        assert (await explained(other, [*PROMPT, 4]))["cached"] == len(PROMPT)


async def test_requests_at_a_frozen_worker_are_answered_by_another_worker(tmp_path: Path) -> None:
    router = ["--intervals-health-s", "0.1", "--timeouts-probe-s", "0.2"]
    async with running(tmp_path, workers=2, router=[*router, "--policy", "round_robin"]) as stack:
        frozen = stack.workers[0].process
        freeze(frozen.pid)
        try:
            answers = await asyncio.gather(*(stack.complete([n]) for n in range(6)))
        finally:
            frozen.send_signal(signal.SIGCONT)
        assert [status for status, _ in answers] == [200] * 6
        assert await stack.metric("warmroute_retries_total") >= 1
        await stack.until_state(0, "ready")
        await stack.assert_idle()


async def test_a_request_waits_for_a_frozen_worker_if_there_is_no_other(tmp_path: Path) -> None:
    router = ["--intervals-health-s", "0.1", "--timeouts-probe-s", "0.2"]
    async with running(tmp_path, workers=1, router=router) as stack:
        freeze(stack.workers[0].process.pid)
        asking = asyncio.create_task(stack.complete([1]))
        try:
            await stack.until_state(0, "silent")
        finally:
            stack.workers[0].process.send_signal(signal.SIGCONT)
        assert (await asking)[0] == 200
        await stack.assert_idle()


async def hit_tokens(stack: Stack, prompt: list[int], model: str = MODEL) -> dict[int, int]:
    """Return for each worker how many tokens of a prompt the router expects to be cached."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1}
    async with stack.http.post(f"{stack.admin}/explain", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return {best["worker"]: best["hit_tokens"] for best in (await reply.json())["best"]}


async def test_a_request_that_an_engine_refuses_adds_no_expected_hits(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as stack:
        status, answer = await stack.complete([*PROMPT, 1], best_of=3)
        assert (status, answer["error"]["param"]) == (400, "best_of")
        assert await hit_tokens(stack, [*PROMPT, 2]) == {0: 0}


async def test_a_cache_is_unknown_while_the_engines_events_cannot_be_received(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=0) as stack:
        engine = await stack.programs.start("engine", "engine", engine_arguments())
        async with stack.http.get(f"{engine.url}/kv_event_sources") as reply:
            source = (await reply.json())["0"]
        replay = f"tcp://127.0.0.1:{port_of(source['replay_endpoint'])}"
        async with cut_line(port_of(source["endpoint"])) as (port, set_up):
            await stack.add(f"{engine.url},events=tcp://127.0.0.1:{port},replay={replay}")
            await explained(stack, [*PROMPT, 1])
            await until_resident(stack, 0, 40)

            async def seen(known: bool, events_from: str) -> None:
                async def shown() -> bool:
                    row = await stack.row(0)
                    return (row["kv_known"], row["events_from"]) == (known, events_from)

                await until(shown, f"known {known}, events from {events_from}")

            await seen(True, "read here")
            await set_up(False)
            await seen(False, "connection lost")
            body = {"model": MODEL, "prompt": [5000 + n for n in PROMPT], "max_tokens": 1}
            async with stack.http.post(f"{engine.url}/v1/completions", json=body) as reply:
                assert reply.status == 200
            assert (await stack.row(0))["resident_blocks"] == 40
            assert (await hit_tokens(stack, [*PROMPT, 2]))[0] == len(PROMPT)  # as before the loss
            await set_up(True)
            await seen(True, "read here")
            assert (await stack.row(0))["resident_blocks"] == 80
        async with stack.http.get(f"{stack.admin}/metrics") as reply:
            lost = re.findall(r'kv_events_total{kind="disconnects",.*} (\S+)', await reply.text())
        assert [float(count) >= 1 for count in lost] == [True]
