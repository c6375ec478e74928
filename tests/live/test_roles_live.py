"""Tests of workers that change roles at an operator's request while requests run: no
request fails.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

from tests.live.meeting_engines import SGLang
from tests.live.stack import Stack, engine_arguments, running, until

ROLES = ("prefill", "prefill", "decode")


async def change(stack: Stack, worker_id: int, role: str) -> tuple[int, str]:
    url = f"{stack.admin}/workers/{worker_id}/role"
    async with stack.http.post(url, json={"role": role}) as reply:
        return reply.status, await reply.text()


async def until_role(stack: Stack, worker_id: int, role: str) -> None:
    async def has_role() -> bool:
        row = await stack.row(worker_id)
        return (row["role"], row["state"], row["role_to_be"]) == (role, "ready", None)

    await until(has_role, f"worker {worker_id} to be {role}")


async def test_roles_change_under_load_and_no_request_fails(tmp_path: Path) -> None:
    """Every worker takes each role once, after its requests have ended, and no request fails."""
    flags = ("--disaggregation", "always")
    async with running(tmp_path, 3, flags, speed=50) as stack:
        statuses: list[int] = []
        over = asyncio.Event()

        async def ask(number: int) -> None:
            while not over.is_set():  # a new prompt each time, so that no worker has its prefix
                prompt = [number, len(statuses), *range(62)]
                status, _ = await stack.complete(prompt, max_tokens=20)
                statuses.append(status)

        for worker_id, role in enumerate(ROLES):
            assert (await change(stack, worker_id, role))[0] == 202
            await until_role(stack, worker_id, role)
        load = [asyncio.create_task(ask(number)) for number in range(6)]
        slowest_s = 0.0
        for worker_id, role in ((0, "decode"), (2, "prefill"), (0, "prefill"), (2, "decode")):
            began_s, asked = time.monotonic(), len(statuses)
            assert (await change(stack, worker_id, role))[0] == 202
            await until_role(stack, worker_id, role)
            slowest_s = max(slowest_s, time.monotonic() - began_s)

            async def served(worker_id: int = worker_id, asked: int = asked) -> bool:
                busy = (await stack.row(worker_id))["inflight_requests"]
                return len(statuses) > asked + 12 and busy > 0

            await until(served, f"worker {worker_id} to serve as {role}")
        over.set()
        await asyncio.gather(*load)
        assert set(statuses) == {200}
        assert await stack.metric("warmroute_role_changes_total") >= 5
        await stack.assert_idle()
        print(f"\n{len(statuses)} requests, slowest change {slowest_s:.2f} s")


async def test_the_error_for_a_refused_role_change_names_the_reason(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as stack:
        status, text = await change(stack, 0, "cook")
        assert status == 400
        assert "both, prefill, decode" in text
        worker_id = await stack.add(
            f"{stack.workers[0].url.replace('127.0.0.1', 'localhost')},kind=openai"
        )
        status, text = await change(stack, worker_id, "decode")
        assert status == 409
        assert "it has no group" in text


async def test_roles_reported_by_engines_hold_until_an_operator_sets_others(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, 0, ("--disaggregation", "always")) as stack:
        urls = {}
        for role in ("prefill", "decode"):
            flags = [*engine_arguments(), "--role", role]
            urls[role] = (await stack.programs.start(role, "engine", flags)).url
        told = {role: await stack.add(url) for role, url in urls.items()}
        given = await stack.add(f"{urls['decode'].replace('127.0.0.1', 'localhost')},role=prefill")
        roles = {row["id"]: row["role"] for row in await stack.rows()}
        assert roles == {told["prefill"]: "prefill", told["decode"]: "decode", given: "prefill"}
        await stack.remove(given)
        assert (await stack.complete("a b c"))[0] == 200
        assert await stack.metric("warmroute_prefill_leg_seconds_count") == 1
        for role in ("both", "prefill"):
            await change(stack, told["decode"], role)
            await until_role(stack, told["decode"], role)
        await stack.assert_idle()


async def test_a_pool_with_only_prefill_workers_is_reported(tmp_path: Path) -> None:
    async with running(tmp_path, 1, ("--log-level", "info")) as stack:
        await change(stack, 0, "prefill")
        await until_role(stack, 0, "prefill")
        async with stack.http.get(f"{stack.url}/ready") as reply:
            shown = await reply.json()
        assert reply.status == 200, "it serves alone"
        assert "decodes: 1 have the role prefill" in shown["halves_missing"]["tiny"][0]
        assert await stack.metric("warmroute_pool_half_missing") == 1
        assert (await stack.complete("a b c"))[0] == 200
        line = "decodes: 1 have the role prefill; it is used only as far as it serves alone"

        async def logged() -> bool:
            return line in (tmp_path / "router.log").read_text()

        await until(logged, "the log to say so")


async def test_roles_follow_the_mix_of_prompt_and_answer_lengths(tmp_path: Path) -> None:
    """With long prompts and short answers more workers take the prefill role, and no
    request fails.
    """
    follow = ("--roles-follow", "true", "--roles-window-s", "1", "--roles-settle-s", "1")
    flags = ("--disaggregation", "always", "--log-level", "info", *follow)
    async with running(tmp_path, 4, flags, speed=1) as stack:
        for worker_id, role in enumerate(("prefill", "decode", "decode", "decode")):
            await change(stack, worker_id, role)
            await until_role(stack, worker_id, role)
        statuses: list[int] = []
        over = asyncio.Event()

        async def ask(number: int) -> None:
            asked = 0
            while not over.is_set():
                asked += 1
                prompt = [number * 1_000 + asked % 900, *range(4_000)]
                statuses.append((await stack.complete(prompt, max_tokens=4))[0])

        load = [asyncio.create_task(ask(number)) for number in range(8)]

        async def followed() -> bool:
            roles = [row["role"] for row in await stack.rows() if row["state"] == "ready"]
            return roles.count("prefill") >= 2 and "decode" in roles

        await until(followed, "another worker to prefill")
        over.set()
        await asyncio.gather(*load)
        assert set(statuses) == {200}
        assert await stack.metric("warmroute_role_work") > 0
        log = (tmp_path / "router.log").read_text()
        assert "more can be carried" in log
        assert "role prefill, by idle" in log
        await stack.assert_idle()


async def test_sglang_workers_switch_roles_only_when_idle_and_no_request_fails(
    tmp_path: Path,
) -> None:
    """SGLang's workers are told to switch roles only when they are idle, and no request fails. The
    engines here are mocks that only prefill or only decode and cannot serve alone.
    """
    async with AsyncExitStack() as rest:
        roles = ("prefill", "prefill", "decode", "decode")
        engines = [await rest.enter_async_context(SGLang(role).serving()) for role in roles]
        flags = ("--disaggregation", "always", "--log-level", "info")
        stack = await rest.enter_async_context(running(tmp_path, 0, flags))
        for engine in engines:
            await stack.add(f"{engine.url},kind=sglang,events=none")
        statuses: list[int] = []
        over = asyncio.Event()

        async def ask() -> None:
            while not over.is_set():
                statuses.append((await stack.complete("a b c", max_tokens=8))[0])

        load = [asyncio.create_task(ask()) for _ in range(4)]
        for worker_id, role in ((0, "decode"), (2, "prefill"), (0, "prefill"), (2, "decode")):
            assert (await change(stack, worker_id, role))[0] == 202
            await until_role(stack, worker_id, role)
            assert engines[worker_id].role == role, "its engine was told"
            asked, seen = len(statuses), len(engines[worker_id].bodies)

            async def served(
                worker_id: int = worker_id, asked: int = asked, seen: int = seen
            ) -> bool:
                return len(statuses) > asked + 8 and len(engines[worker_id].bodies) > seen

            await until(served, f"worker {worker_id} to serve as {role}")
        over.set()
        await asyncio.gather(*load)
        assert set(statuses) == {200}
        status, text = await change(stack, 0, "both")
        assert status == 409
        assert "prefill or decode only" in text
        await stack.assert_idle()
